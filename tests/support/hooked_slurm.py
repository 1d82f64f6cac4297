# SPDX-License-Identifier: Apache-2.0
"""The fake Slurm as hooks find it on a PATH: twenty nodes, calls as text, trouble in shell.

What the commands answer is `fake_slurm`'s; here stands only what a test adds to it.
"""

import json
import os
import sys
from pathlib import Path

from tests.support.fake_slurm import BIN, FakeSlurm

# `trouble` knows $dir, and may run `$dir/set NODE STATE REASON`.
_SCONTROL = """\
#!/bin/sh
dir={directory}
echo "$@" >> $dir/calls
[ -f $dir/trouble ] && . $dir/trouble
FAKE_SLURM_DIR=$dir/cluster exec {python} -S {bin}/scontrol "$@"
"""
_SQUEUE = "#!/bin/sh\ncat {directory}/start 2>/dev/null || echo N/A\n"
_SET = """\
#!/bin/sh
exec {python} -S - "$@" <<'END'
import json, pathlib, sys
file = pathlib.Path("{directory}/cluster/nodes.json")
nodes = json.loads(file.read_text())
nodes[sys.argv[1]].update(state=sys.argv[2], reason=sys.argv[3])
file.write_text(json.dumps(nodes))
END
"""


class HookedSlurm:
    """The commands, their nodes and their calls."""

    def __init__(self, directory: Path, nodes: int = 20) -> None:
        self.directory = directory
        self.cluster = FakeSlurm(directory / "cluster", ())
        self.cluster.set(admin=True)
        self.bin = directory / "bin"
        self.bin.mkdir()
        programs = {"bin/scontrol": _SCONTROL, "bin/squeue": _SQUEUE, "set": _SET}
        for name, text in programs.items():
            program = directory / name
            program.write_text(text.format(directory=directory, python=sys.executable, bin=BIN))
            program.chmod(0o755)
        self.set({f"n{number}": ("IDLE", "") for number in range(1, nodes + 1)})

    @property
    def path(self) -> str:
        return f"{self.bin}:{os.environ['PATH']}"

    def set(self, nodes: dict[str, tuple[str, str]]) -> None:
        """Give nodes a state and a reason; others keep theirs."""
        for name, (state, reason) in nodes.items():
            if name not in self.nodes():
                self.cluster.add_node(name)
            self.cluster.change_node(name, state=state, reason=reason, partition="gpu")

    def below(self, **leaves: str) -> None:
        lines = [f"SwitchName={leaf} Level=0 Nodes={nodes}" for leaf, nodes in leaves.items()]
        self.cluster.set(topology="\n".join(lines))

    def nodes(self) -> dict[str, tuple[str, str]]:
        nodes = json.loads((self.directory / "cluster/nodes.json").read_text())
        return {name: (node["state"], node["reason"]) for name, node in nodes.items()}

    def trouble(self, shell: str) -> None:
        """Run this at the start of every call; an empty text ends the trouble."""
        path = self.directory / "trouble"
        path.write_text(shell) if shell else path.unlink(missing_ok=True)

    def started(self, start_s: int) -> None:
        (self.directory / "start").write_text(f"{start_s}\n")

    def calls(self) -> list[str]:
        """Return what slurmctld was asked; scontrol knows its own version, asked for pyslurm."""
        path = self.directory / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line != "--version"]
