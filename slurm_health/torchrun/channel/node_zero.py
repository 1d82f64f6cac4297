# SPDX-License-Identifier: Apache-2.0
"""Node 0's end of the channel: a launcher of agents that are on machines of their own.

What their nodes send is appended to their files in the journal, and what the master writes there is
read and sent to them. It stands in the journal first: a node that was cut off gets what it missed.
"""

from __future__ import annotations

import os
import selectors
import time
from collections.abc import Callable, Sequence

from slurm_health.preflight.master.launcher import LEAVE_S
from slurm_health.records.nodeset import fold
from slurm_health.records.records import AgentsLost, LossCause
from slurm_health.torchrun.arguments import NodeZeroAddress
from slurm_health.torchrun.channel import messages
from slurm_health.torchrun.channel.admission import Admission
from slurm_health.torchrun.channel.peers import Peer, Peers, SharedRun
from slurm_health.torchrun.joint_check import OwnAgent

# Since its connection was lost: then a node is taken for unreachable.
LOST_S = 30.0
# How long nodes may take to say that they have heard the outcome.
HEARD_S = 10.0
# After a longer wait it is said which nodes are missing.
_SAY_AFTER_S = 5.0
_LOOK_S = 0.2


class NodeZero:
    """A `Launcher` whose agents are started by the processes of their own nodes, but for one."""

    def __init__(
        self,
        meeting: NodeZeroAddress,
        secret: bytes,
        run: SharedRun,
        agent: OwnAgent,
        say: Callable[[str], None],
    ) -> None:
        """Open the port.

        Raises:
            ChannelError: it is taken, or may not be opened.
        """
        self._meeting = meeting
        self._agent = agent
        self._say = say
        self._bell: int | None = None
        self._selector = selectors.DefaultSelector()
        self._peers = Peers(run, self._selector, say)
        try:
            self._admission = Admission(
                meeting, secret, run.nodes, self._selector, self._peers.welcome, say
            )
        except BaseException:
            self._selector.close()
            raise

    # --- a launcher -------------------------------------------------------------------------------

    def start(self, launch: int, nodes: Sequence[str]) -> None:
        """Start this node's own agent; the others' processes hear of it from the journal."""
        for peer in self._peers:
            peer.launch = launch if peer.node in nodes else peer.launch
        self._agent.start(launch, nodes)
        self._forget_bell()
        if (bell := self._agent.descriptor) is not None:
            # The agent's own is closed with it, and its number given out again.
            self._bell = os.dup(bell)
            self._selector.register(self._bell, selectors.EVENT_READ, self._hear_bell)

    def poll(self) -> list[AgentsLost]:
        """Return the end of this node's agent, and nodes that cannot be reached."""
        lost = self._agent.poll()
        now_s = time.monotonic()
        for peer in self._peers:
            if peer.launch < 0 or peer.lost or peer.connection is not None:
                continue
            if not peer.came:
                peer.lost = f"it has not connected to node0 at {self._meeting.text}"
            elif peer.left:
                peer.lost = f"its process was ended by {peer.left}"
            elif now_s - peer.lost_s > LOST_S:
                peer.lost = (
                    f"it could not be reached: the connection from {peer.host} broke off and did"
                    f" not come back within {LOST_S:g} s"
                )
            else:
                continue
            lost.append(_lost(peer))
        return lost

    def ring(self) -> None:
        """Send to each node what the master has written for it."""
        self._peers.route()
        self._agent.ring()

    def wait(self, timeout_s: float, gather_s: float) -> set[str]:
        """Wait for lines of other nodes, and for the ring of this node's agent."""
        until_s = time.monotonic() + timeout_s
        self._peers.route()
        while True:
            left_s = until_s - time.monotonic()
            if self._serve(max(0.0, left_s)):
                until_s = min(until_s, time.monotonic() + gather_s)
            if left_s <= 0.0:
                break
        rung, self._peers.rung = self._peers.rung, set()
        return rung

    def stop(self, leave_s: float = LEAVE_S) -> None:
        """Let this node's agent leave; the others' are left to their processes."""
        self._agent.stop(leave_s)

    # --- beside it --------------------------------------------------------------------------------

    def await_nodes(self, least: int, *, join_s: float, last_call_s: float) -> list[str]:
        """Wait for all nodes; return those that have not come.

        For all as long as `join_s`; once `least` nodes are there, `last_call_s` after the last one
        that came.
        """
        begun_s = came_s = time.monotonic()
        said = False
        missing = self._missing()
        while missing:
            now_s = time.monotonic()
            enough = len(self._peers) + 1 - len(missing) >= least
            if now_s - begun_s > join_s or (enough and now_s - came_s > last_call_s):
                break
            if not said and now_s - begun_s > _SAY_AFTER_S:
                said = True
                self._say(f"waiting for {fold(missing)} at {self._meeting.text}")
            self._serve(_LOOK_S)
            missing, before = self._missing(), missing
            came_s = came_s if missing == before else time.monotonic()
        return missing

    def finish(self) -> None:
        """Wait until all nodes that are there have heard the outcome; then close."""
        give_up_s = time.monotonic() + HEARD_S
        self._peers.route()
        while time.monotonic() < give_up_s and any(map(_owes, self._peers)):
            self._serve(_LOOK_S)
        self.close()

    def end(self, why: str, *, unchecked: bool = False) -> None:
        """Tell all nodes that the run is over, and close."""
        self._peers.part(messages.Ended(why=why, unchecked=unchecked))
        self.close()

    def close(self) -> None:
        """Close the port and all connections."""
        self._admission.close()
        self._peers.close()
        self._forget_bell()
        self._selector.close()

    def _missing(self) -> list[str]:
        return [peer.node for peer in self._peers if not peer.came]

    # --- what goes in and out ---------------------------------------------------------------------

    def _serve(self, timeout_s: float) -> bool:
        """Handle what arrives within this time; tell whether an agent rang."""
        rung = len(self._peers.rung)
        for key, events in self._selector.select(timeout_s):
            if isinstance(key.data, Peer):
                self._peers.attend(key.data, key.fileobj, events)
            else:
                key.data(key.fileobj)
        self._admission.expire()
        self._peers.keep_alive()
        return len(self._peers.rung) > rung

    def _hear_bell(self, _bell: int) -> None:
        self._peers.rung |= self._agent.hear()
        if self._agent.descriptor is None:
            self._forget_bell()

    def _forget_bell(self) -> None:
        if self._bell is not None:
            self._selector.unregister(self._bell)
            os.close(self._bell)
            self._bell = None


def _owes(peer: Peer) -> bool:
    """Tell whether a node that is there, or may be again, has yet to say that it has heard all."""
    return peer.came and not peer.lost and not peer.left and peer.heard < len(peer.told)


def _lost(peer: Peer) -> AgentsLost:
    # It can write to the journal no more, and may be well: this says nothing against the node.
    return AgentsLost(
        launch=peer.launch, nodes=[peer.node], reason=peer.lost, cause=LossCause.NO_JOURNAL
    )
