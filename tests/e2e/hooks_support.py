# SPDX-License-Identifier: Apache-2.0
"""A cluster with the hooks installed as the documentation says."""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.lab import Lab
from tests.lab.installed_site import Site
from tests.support.sites import write_site

ROOT = Path(__file__).parents[2]
# Of a site with the hooks, by its places: slurm.conf and config.toml.
SLURM_CONF, CONFIG = (
    (ROOT / "tests/data/hooks" / name).read_text() for name in ("slurm.conf", "config.toml")
)
STATE = "/tmp/slurm-health-state"  # each node of the lab has a /tmp of its own
FLAG = "/tmp/broken"
HOOK_LOG = "/tmp/hooks.log"
HIDDEN = "/tmp/hidden-fault"

# What a job's own check would have left: a verdict of its owner's making, on its own node.
ACCUSE = """\
#!/bin/sh
exec {python} - {node} <<'END'
import os, pathlib, sys
from slurm_health.records.record_codec import encode
from slurm_health.records.records import RunStarted, VerdictReached
from slurm_health.records.verdict import Level, NodeVerdict
job, node = int(os.environ["SLURM_JOB_ID"]), sys.argv[1]
run = pathlib.Path.home() / ".slurm-health/journal" / os.environ["SLURM_CLUSTER_NAME"]
run = run / str(job) / os.environ.get("SLURM_RESTART_COUNT", "0")
run.mkdir(parents=True)
started = RunStarted(run_id="r", job_id=job, attempt=0, cluster="c", partition="p",
                     nodes=[node], master_node="n1", user="u")
bad = NodeVerdict(node=node, level=Level.FAULTY, reason="allgather failed", evidence=("a", "b"))
with open(run / "master.jsonl", "wb") as file:
    for number, record in enumerate((started, VerdictReached(nodes=[bad]))):
        file.write(encode(record, entry_id=f"master:{{number}}", time_s=1.0))
END
"""


class HookedSite(Site):
    """A cluster whose nodes run the hooks, and the directory they are installed in."""

    def __init__(self, lab: Lab, directory: Path, shared: Path | None = None) -> None:
        """Take a lab with the hooks in `directory`; the breaker's ledger lies in `shared`."""
        super().__init__(lab)
        self.installed = directory
        self.shared = shared or directory / "shared"

    def configure(self, more: str = "", share: float = 0.2) -> None:
        """Write the site's file, and forget what earlier tests had drained."""
        text = CONFIG.format(
            state=STATE,
            shared=self.shared,
            share=share,
            flag=FLAG,
            hidden=HIDDEN,
            more=more,
        )
        write_site(self.installed / "etc", text)
        self.on(self.lab.nodes[0], "find", str(self.shared), "-type", "f", "-delete")
        for node in self.lab.nodes:
            self.on(node, "rm", "-rf", FLAG, HIDDEN, STATE)

    def on(self, node: str, *argv: str) -> str:
        return self.lab.run(list(argv), node=node).stdout

    def health_check(self, node: str) -> None:
        self.lab.run(
            [str(self.installed / "healthcheck")], node=node, env={"SLURMD_NODENAME": node}
        )

    def health_checks(self) -> None:
        """Let all nodes run their health checks at once, so that they meet at the lock."""
        hook = [str(self.installed / "healthcheck")]
        running = [
            self.lab.popen(hook, node=node, env={"SLURMD_NODENAME": node})
            for node in self.lab.nodes
        ]
        assert [process.wait(120) for process in running] == [0] * len(running)

    def out_of_pool(self) -> dict[str, str]:
        return {
            name: record.get("Reason", "")
            for name, record in self.lab.node_states().items()
            if "DRAIN" in record["State"]
        }

    def accuse(self, node: str) -> int:
        """Run a job of alice's on a node whose journal accuses it; wait until it is over."""
        script = ACCUSE.format(python=sys.executable, node=node)
        job = self.lab.sbatch(script, f"-w{node}")
        self.lab.wait_job(job, {"COMPLETED"})
        self.lab.wait_until(
            lambda: self.lab.node_state(node)["State"],
            lambda state: "COMPLETING" not in state,
            f"the epilog on {node}",
            60,
        )
        return job

    def hook_log(self, node: str) -> str:
        path = self.lab.paths.tmp(node) / "hooks.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def slurmd_log(self, node: str) -> str:
        found = [each for each in self.lab.paths.log.iterdir() if node in each.name]
        return "".join(each.read_text(errors="replace") for each in found)


def install(directory: Path) -> None:
    """Copy the shims and edit their lines, as the documentation says."""
    directory.chmod(0o755)
    (directory / "shared").mkdir(mode=0o755)
    sources = {
        "prolog": "prolog/slurm-health",
        "epilog": "epilog/slurm-health",
        "healthcheck": "prolog/slurm-health-healthcheck",
        "unkillable": "epilog/slurm-health-unkillable",
    }
    for name, shim in sources.items():
        text = (ROOT / shim).read_text()
        settings = {"python": sys.executable, "config": str(directory / "etc/config.toml")}
        for key, value in settings.items():
            text = re.sub(rf"^{key}=.*$", f"{key}={value}", text, flags=re.MULTILINE)
        # slurmd shows what a hook says that succeeds at a high debug level only.
        text = text.replace('"$config" </dev/null\n', f'"$config" </dev/null 2>>{HOOK_LOG}\n')
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)


@contextmanager
def hooked_site(
    directory: Path,
    nodes: int,
    slurm_conf_extra: str = "",
    *,
    gpus: int = 0,
    visible: Sequence[Path] = (),
    volume_mb: int = 0,
    gres_conf: str = "",
) -> Iterator[HookedSite]:
    """Start a cluster with the hooks in place; with `volume_mb` the ledger is on GlusterFS."""
    install(directory)
    # slurmd runs a first health check before a test writes its settings, and a node of the lab has
    # the host's /var/lib.
    write_site(directory / "etc", f'[hooks]\nstate = "{STATE}"\n')
    extra = SLURM_CONF.format(directory=directory) + "RebootProgram=/bin/true\n"
    extra += slurm_conf_extra
    seen = (directory, *visible)
    with Lab.start(
        nodes=nodes,
        slurm_conf_extra=extra,
        gpus=gpus,
        visible=seen,
        network_filesystem_mb=volume_mb,
        gres_conf=gres_conf,
    ) as lab:
        shared = lab.paths.shared / "breaker" if volume_mb else None
        if shared:
            lab.run(["install", "-d", "-m", "755", str(shared)])
        yield HookedSite(lab, directory, shared)
