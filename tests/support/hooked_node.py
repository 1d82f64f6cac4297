# SPDX-License-Identifier: Apache-2.0
"""A node with hooks: its machine, its site's file, a fake scontrol, the directory all share."""

import contextlib
import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import msgspec
import pytest

from slurm_health.node import state
from slurm_health.node.checks.check import CheckContext
from slurm_health.node.hook import Hook
from slurm_health.node.hooks import epilog, healthcheck, prolog
from slurm_health.node.rules.recovery import DrainRecord
from slurm_health.node.site import Site, Timing
from tests.node.checks.conftest import WELL
from tests.support.accusing import Story
from tests.support.hooked_slurm import HookedSlurm
from tests.support.sites import load_site, tree

SITE = """\
journal = "{journal}"
[hooks]
state = "{state}"
[breaker]
directory = "{shared}"
share = 0.2
{more}
[checks.memory]
min_total_gib = 400
contexts = ["prolog", "healthcheck", "retest"]
[checks.scratch]
check = "file"
path = "{flag}"
exists = false
"""


class Node:
    """One node, on which the hooks are called as Slurm calls them."""

    def __init__(self, root: Path, name: str, slurm: HookedSlurm, shared: Path) -> None:
        self.name = name
        self.slurm = slurm
        self.shared = shared
        self.directory = root / name
        self.machine = tree(self.directory / "machine", WELL).root
        self.flag = self.machine / "broken"
        self.now_s = 1_000_000.0
        self.said = ""
        self.more = ""
        self.text = SITE
        # Of what answers; a test in which nothing does need not wait that long.
        self.timing = Timing(slurm_s=30, lock_s=30, journal_s=30, spread_s=0)
        self._text = ""
        self.journal = str(root / "journals")

    @property
    def site(self) -> Site:
        text = self.text.format(
            journal=self.journal,
            state=self.directory / "state",
            shared=self.shared,
            flag="/broken",
            more=self.more,
        )
        if text != self._text:  # a file that is written anew is another one
            self._text, self._site = text, load_site(self.directory / "etc", text)
        return msgspec.structs.replace(self._site, timing=self.timing)

    def hurry(self, limit_s: float = 2.0) -> None:
        """Have its hooks wait no longer for anything."""
        self.timing = Timing(slurm_s=limit_s, lock_s=limit_s, journal_s=30, spread_s=0)

    def environ(self, job: int = 0, uid: int = 1000, **extra: str) -> dict[str, str]:
        environ = {"PATH": self.slurm.path, "SLURMD_NODENAME": self.name}
        if job:
            environ |= {
                "SLURM_JOB_ID": str(job),
                "SLURM_JOB_UID": str(uid),
                "SLURM_JOB_PARTITION": "gpu",
            }
        return environ | extra

    def hook(self, name: str, environ: dict[str, str], site: Site | None = None) -> Hook:
        found = site or self.site
        context = CheckContext(
            root=self.machine,
            environ=environ,
            now_s=self.now_s,
            state=found.state,
            context=name,
        )
        return Hook(found, environ, context)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        heard = io.StringIO()
        with redirect_stderr(heard):
            yield
        self.said = heard.getvalue()

    def prolog(self, job: int = 7, uid: int = 1000, **extra: str) -> bool:
        environ = self.environ(job, uid, **extra)
        with self._listening():
            return prolog.run(self.hook("prolog", environ))

    def healthcheck(self, **extra: str) -> bool:
        environ = self.environ() | extra
        with self._listening():
            return healthcheck.run(self.hook("healthcheck", environ))

    def epilog(self, job: int = 7, uid: int = 1000, **extra: str) -> bool:
        environ = self.environ(job, uid, **extra)
        with self._listening():
            return epilog.run(self.hook("epilog", environ))

    def break_it(self) -> None:
        self.flag.touch()

    def mend(self) -> None:
        self.flag.unlink(missing_ok=True)

    @property
    def record(self) -> DrainRecord:
        """What the node has kept of our drain."""
        kept = state.load_record(self.site.state)
        assert kept is not None
        return kept

    @property
    def state(self) -> str:
        return self.slurm.nodes()[self.name][0]

    @property
    def reason(self) -> str:
        return self.slurm.nodes()[self.name][1]


@pytest.fixture
def slurm(tmp_path: Path) -> HookedSlurm:
    return HookedSlurm(tmp_path / "slurm")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir(mode=0o755)
    (path / "slurm.look").mkdir()  # another node looks at all nodes
    return path


@pytest.fixture
def node(tmp_path: Path, slurm: HookedSlurm, shared: Path) -> Node:
    return Node(tmp_path, "n3", slurm, shared)


@pytest.fixture
def rack(tmp_path: Path, slurm: HookedSlurm, shared: Path) -> list[Node]:
    return [Node(tmp_path, f"n{number}", slurm, shared) for number in range(1, 21)]


@pytest.fixture
def story(node: Node, public_path: Path) -> Story:
    found = Story(node, public_path / "journals")
    node.journal = str(found.root)
    return found


@pytest.fixture
def drained(node: Node) -> Node:
    """A node our health check has drained, and that is well again."""
    node.break_it()
    assert node.healthcheck()
    node.mend()
    assert node.state == "IDLE+DRAIN"
    (node.slurm.directory / "calls").unlink()
    return node
