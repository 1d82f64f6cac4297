# SPDX-License-Identifier: Apache-2.0
"""A `scontrol` for a PATH: nodes in a file, refusals as Slurm's own, and every call kept.

Beside it a `squeue` that knows when a job started, if it is told.
"""

from __future__ import annotations

import os
from pathlib import Path

_PROGRAM = """\
#!/bin/sh
dir={directory}
echo "$@" >> $dir/calls
[ -f $dir/trouble ] && . $dir/trouble
case "$1 $2" in
"show nodes") cat $dir/nodes; exit ;;
reboot*) exit 0 ;;
"show topology") cat $dir/topology 2>/dev/null; exit ;;
"show node") grep "^NodeName=$4 " $dir/nodes || {{ echo "Node $4 not found" >&2; exit 1; }}; exit ;;
esac
for word in "$@"; do
    case $word in
    NodeName=*) node=${{word#NodeName=}} ;;
    State=*) state=${{word#State=}} ;;
    Reason=*) reason=${{word#Reason=}} ;;
    esac
done
grep -q "^NodeName=$node " $dir/nodes || exit 1
case $state in
DRAIN) new=IDLE+DRAIN note="Reason=$reason [root@2026-01-02T03:04:05]" ;;
UNDRAIN) new=IDLE note= ;;
esac
sed "s|^NodeName=$node .*|NodeName=$node State=$new Partitions=gpu $note|" $dir/nodes \\
    > $dir/new && mv $dir/new $dir/nodes
"""


_SQUEUE = "#!/bin/sh\ncat {directory}/start 2>/dev/null || echo N/A\n"


class FakeScontrol:
    """The program, its nodes and its calls."""

    def __init__(self, directory: Path, nodes: int = 20) -> None:
        self.directory = directory
        self.bin = directory / "bin"
        self.bin.mkdir(parents=True)
        for name, text in (("scontrol", _PROGRAM), ("squeue", _SQUEUE)):
            program = self.bin / name
            program.write_text(text.format(directory=directory))
            program.chmod(0o755)
        self.set({f"n{number}": ("IDLE", "") for number in range(1, nodes + 1)})

    @property
    def path(self) -> str:
        return f"{self.bin}:{os.environ['PATH']}"

    def set(self, nodes: dict[str, tuple[str, str]]) -> None:
        """Say what state and reason each node has; others keep theirs."""
        known = {**self.nodes(), **nodes}
        lines = [
            f"NodeName={name} State={state} Partitions=gpu {f'Reason={reason}' if reason else ''}"
            for name, (state, reason) in known.items()
        ]
        (self.directory / "nodes").write_text("\n".join(lines) + "\n")

    def below(self, **leaves: str) -> None:
        """Say which nodes hang on which leaf switch."""
        lines = [f"SwitchName={leaf} Level=0 Nodes={nodes}" for leaf, nodes in leaves.items()]
        (self.directory / "topology").write_text("\n".join(lines) + "\n")

    def nodes(self) -> dict[str, tuple[str, str]]:
        """Return state and reason of each node."""
        path = self.directory / "nodes"
        found = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            head, _, reason = line.partition(" Reason=")
            words = dict(word.partition("=")[::2] for word in head.split())
            found[words["NodeName"]] = (words["State"], reason.strip())
        return found

    def trouble(self, shell: str) -> None:
        """Run this at the start of every call; an empty text ends the trouble."""
        path = self.directory / "trouble"
        path.write_text(shell) if shell else path.unlink(missing_ok=True)

    def started(self, start_s: int) -> None:
        """Say when the job started."""
        (self.directory / "start").write_text(f"{start_s}\n")

    def calls(self) -> list[str]:
        """Return what slurmctld was asked; scontrol knows its own version, asked for pyslurm."""
        path = self.directory / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line != "--version"]
