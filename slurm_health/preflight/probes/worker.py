# SPDX-License-Identifier: Apache-2.0
"""One process per device: loads torch or numpy once, then runs one round after another.

The agent starts it with the job's own interpreter, a light one with the agent's. It sends commands
as JSON lines on its standard input and reads events as JSON lines from its standard output:

    command  {"op": "round", "round": 0, "timeout_s": 60.0, "local_size": 1, "options": {},
              "probes": [{"name": "matmul", "scope": "solo", "path": ""}, ...],
              "groups": {"pair": {"rank": 0, "world_size": 4, "address": "10.0.0.1",
                                  "port": 4711, "prefix": "3f2a/0/n1"},
                         "rail": {"rank": 0, "world_size": 2}, ...}}
             {"op": "abort", "round": 0}
             end of file: leave
    line     {"event": "state", "state": "loaded", "torch": "2.4.1"}, or before it ends
             {"event": "state", "state": "no_torch", "detail": "..."}
             {"event": "state", "state": "opened"}, or before it ends
             {"event": "state", "state": "unusable" or "refused", "detail": "..."}
             {"event": "ready", "store_port": 4711, "torch": "2.4.1", "backend": "gloo", ...}
             {"event": "scope", "round": 0, "scope": "solo"}
             {"kind": "sampled", "round": 0, "probe": "matmul", "iteration_ms": [[...]], ...}
             {"event": "done", "round": 0, "outcome": "measured", "detail": "", "own_fault": false,
              "wrong_results": false, "spent": false, "connecting": []}

What it measures is a record of the journal's, `Sampled`, without node and group: the agent adds
these. Between "loaded", which a worker without a device does not say, and "opened" it waits for its
device and its driver, and for nothing else; "unusable" says that one of these failed, in its own
words, "refused" why it cannot be used for a reason that says nothing of the node.
A probe whose scope has no group in the command is left out: there is nobody to run it with.
"scope" says with whom the worker works from now on: if it dies, whose fault that may be.
Outcomes: "measured", "failed" ("own_fault" where no partner can be to blame, "wrong_results" where
a device was seen to compute wrongly), "unmeasured" for what is no fault of the node, "timed_out".
A worker destroys its process group before it says that it measured: leaving is part of the round,
and no other begins before. After anything else it reports first over gloo; NCCL's group it aborts,
because destroying one of which somebody is missing may hang. "spent" says that this did not work,
or that its device no longer computes: the worker is not to be used again. "connecting" names the
members of the group that NCCL was connecting when it was told to stop: some of this node by local
rank, or all by rank.
An aborted worker answers "done" with outcome "timed_out". Over NCCL the abort also ends what it
waits for; one that is stuck inside a collective of gloo, or on its device, is killed by the agent.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from slurm_health.preflight.probes.context import Device
    from slurm_health.preflight.probes.worker_round import Channel, MakeGroup, WorkerRound

_STARTED = time.perf_counter()
DETAIL_LENGTH = 300
TORCH, LIGHT = ("torch", "light")


def main() -> None:
    """Serve rounds as the words of the command line say, until the agent leaves."""
    local_rank, threads, devices = (int(argument) for argument in sys.argv[1:4])
    # With torch loaded a core file takes gigabytes, and devices are held until it is written.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from slurm_health.preflight.probes import worker_round
    from slurm_health.preflight.probes.context import Unusable

    channel = worker_round.Channel()
    gc.disable()  # it finds nothing in what is being loaded, and takes its time
    try:
        if sys.argv[4] == LIGHT:
            opened = _open_light(threads, sys.argv[5])
        else:
            opened = _open_torch(channel, local_rank, threads, devices)
        facts = opened.device.facts()
    except ModuleNotFoundError as err:
        if err.name != "torch":
            raise
        channel.send("state", state="no_torch", detail=f"{sys.executable} has no torch")
        raise SystemExit(str(err)) from err
    except Unusable as err:
        channel.send("state", state="unusable", detail=_cut(str(err)))
        raise SystemExit(str(err)) from err
    except SystemExit as err:
        channel.send("state", state="refused", detail=_cut(str(err)))
        raise
    gc.enable()
    gc.freeze()  # what is loaded stays: the collector need not walk it during a measurement
    channel.send("state", state="opened")
    start_ms = round((time.perf_counter() - _STARTED) * 1e3, 1)
    channel.send("ready", store_port=opened.port, **facts, start_ms=start_ms)
    while True:
        _serve(channel, channel.rounds.get(), opened, local_rank)


class _Opened(NamedTuple):
    """A device, what makes groups, and the port at which those meet that its node leads.

    The first worker of a node serves the rendezvous, as long as `server` lives.
    """

    device: Device
    make_group: MakeGroup
    port: int
    server: object


def _open_torch(channel: Channel, local_rank: int, threads: int, devices: int) -> _Opened:
    import torch

    from slurm_health.preflight.probes import torch_device, torch_group

    torch_group.record_ways(os.environ)
    if devices:
        channel.send("state", state="loaded", torch=str(torch.__version__))
    device = torch_device.claim(local_rank, expected=devices, environ=os.environ, threads=threads)
    server, port = torch_group.serve_store() if local_rank == 0 else (None, 0)

    def make_group(command: dict[str, Any], check: Any) -> torch_group.TorchGroup:
        return torch_group.TorchGroup(device, command, local_rank, check)

    return _Opened(device, make_group, port, server)


def _open_light(threads: int, address: str) -> _Opened:
    from slurm_health.preflight.probes import light

    server = light.listen(address)

    def make_group(command: dict[str, Any], check: Any) -> light.LightGroup:
        del command
        return light.LightGroup(server, check)

    return _Opened(light.LightDevice(threads), make_group, server.getsockname()[1], server)


def _serve(channel: Channel, command: dict[str, Any], opened: _Opened, local_rank: int) -> None:
    """Run one round and say how it ended, whatever happened."""
    from slurm_health.preflight.probes.context import NodeFault
    from slurm_health.preflight.probes.worker_round import WorkerRound

    course = WorkerRound(channel, command, opened.device, opened.make_group, local_rank)
    ended, suspect = _Ended("measured"), False
    try:
        course.run()
    except Exception as err:
        ended = _ended_by(err, course, opened.device)
        suspect = isinstance(err, NodeFault)
    # What a device computed wrongly is tried again by another process. Processors are not spoilt.
    spent = opened.device.on_cuda and (
        suspect or (ended.outcome != "measured" and not course.group.leave_broken())
    )
    channel.send(
        "done",
        round=course.index,
        **ended._asdict() | {"detail": _cut(ended.detail)},
        spent=spent,
        connecting=course.group.connecting if ended.outcome == "timed_out" else [],
    )
    if not spent:
        course.group.leave()


class _Ended(NamedTuple):
    """How a round ended, as the event "done" says it."""

    outcome: str
    detail: str = ""
    own_fault: bool = False
    wrong_results: bool = False


def _ended_by(err: Exception, course: WorkerRound, device: Device) -> _Ended:
    """Return how a round ended that an error ended."""
    from slurm_health.preflight.probes.context import (
        NodeFault,
        NotMeasured,
        Unreachable,
        WrongResults,
    )
    from slurm_health.preflight.probes.worker_round import Aborted

    told_to_stop = _Ended("timed_out", "told to stop")
    if isinstance(err, Aborted):
        return told_to_stop
    if isinstance(err, NotMeasured):
        return _Ended("unmeasured", _said(err))
    if isinstance(err, NodeFault):
        wrong = isinstance(err, WrongResults)
        return _Ended("failed", _said(err), own_fault=True, wrong_results=wrong)
    own_fault = not course.has_partners
    if isinstance(err, Unreachable):
        return _Ended("failed", f"{course.probe}: {_said(err)}", own_fault)
    no_memory = device.is_out_of_memory(err)
    others = device.users() if no_memory else ""
    own = "on device" if device.on_cuda else "in check process"
    where = f" {own} {course.local_rank}{others}" if others or course.has_siblings else ""
    detail = f"{course.probe}{where}: {type(err).__name__}: {_said(err)}"
    if no_memory:
        return _Ended("unmeasured", detail)
    # The group may have been taken away from under it.
    return told_to_stop if course.is_aborted else _Ended("failed", detail, own_fault)


def _said(err: Exception) -> str:
    """Return what an error says in one line, with what NCCL itself said last where it did."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    if not lines:
        return ""
    marks = [index for index, line in enumerate(lines) if line.startswith("Last error:")]
    own_words = lines[marks[-1] :] if marks and marks[-1] else []
    return " ".join([lines[0], *own_words])


def _cut(text: str) -> str:
    """Return as many whole sentences as there is room for, or else as many words."""
    if len(text) <= DETAIL_LENGTH:
        return text
    head = text[: DETAIL_LENGTH - 1]
    sentences = head.rfind(". ") + 1
    return head[:sentences] if sentences else f"{head.rsplit(' ', 1)[0]} …"


def _make_package_importable() -> None:
    """Make `slurm_health` importable from where this file lies.

    Not through sys.path: the packages beside this one belong to another interpreter and must not
    shadow the job's own.
    """
    if "slurm_health" in sys.modules:
        return
    package = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location(
        "slurm_health", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["slurm_health"] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    words = sys.argv[1:]
    if len(words) != 5 or not all(map(str.isdigit, words[:3])) or words[3] not in (TORCH, LIGHT):
        raise SystemExit(
            "usage: worker.py LOCAL_RANK THREADS DEVICES torch|light ADDRESS (the agent starts it)"
        )
    # A worker is run by its path; its own directory must not be searched for modules.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)
    _make_package_importable()
    main()
