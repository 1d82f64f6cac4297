# SPDX-License-Identifier: Apache-2.0
"""No test sees the caller's job or settings, and none leaves a process behind."""

import contextlib
import functools
import gc
import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer  # type: ignore[import-untyped]
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests import lab
from tests.played_gpu import build
from tests.support.supervised import with_variable

_FOREIGN = ("SLURM_", "SLURMD_", "NCCL_", "MASTER_", "SLURM_HEALTH_", "PLAYED_GPUS_", "CUDA_")
_LAB = Path(__file__).parent / "lab"
# PLAYED_VENV names the venv of another release of PyTorch.
_PLAYED = Path(__file__).parents[1] / os.environ.get("PLAYED_VENV", ".venv-played")
# Every process a test starts inherits this, unless it is given an environment of its own.
_TAG = "STARTED_BY_TEST_RUN"
_REAP_S = 20.0
_FUZZ_CASES = int(os.environ.get("FUZZ_CASES", "100000"))
_HANGS_MS = 10_000  # a case takes one or two

# The same examples each time, so that a change is judged by what it changed. Others each time:
# pytest --hypothesis-profile=search; very many of them: fuzz, where a slow case is one that hangs.
_BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no test is a race
settings.register_profile("search", _BUSY)
settings.register_profile("steady", _BUSY, derandomize=True)
settings.register_profile(
    "fuzz", _BUSY, max_examples=_FUZZ_CASES, deadline=_HANGS_MS, database=None, print_blob=True
)
settings.load_profile("steady")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "root: needs to be run as root")
    os.umask(0o022)  # with another one, files that tests lay ready would be refused
    # A shell has what it runs in the background ignore SIGINT, and nohup SIGHUP; every process a
    # test starts would inherit that, and not end when it is interrupted.
    for number, handler in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for garbage neither while collecting nor, later, in what was: it stays until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = {
        "torch": "" if importlib.util.find_spec("torch") else "no torch beside this interpreter",
        "root": "" if os.getuid() == 0 else "not root",
        "played_gpu": build.why_not(_PLAYED),
    }
    for item in items:
        if item.get_closest_marker("lab"):
            # Where a busy machine lends its processors elsewhere for seconds, Slurm's daemons meet
            # time limits of their own: once more.
            item.add_marker(pytest.mark.flaky(reruns=1))
        reasons = [missing[name] for name in missing if item.get_closest_marker(name)]
        for reason in (*reasons, _no_lab(item)):
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


class _ByLab(LoadScopeScheduling):  # type: ignore[misc]
    """Have one worker run all tests of a module that share a lab, and any worker any other test."""

    def _split_scope(self, nodeid: str) -> str:
        module = nodeid.partition("::")[0]
        return module if "lab" in module or "recipes" in module else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    # Not --dist=loadgroup: xdist 3.8 does not know how pytest 9.2 keeps a test's name.
    return _ByLab(config, log)


def _no_lab(item: pytest.Item) -> str:
    """Why a test that is marked `lab` cannot have one; `lab(accounting=True)` asks for that too."""
    marks = list(item.iter_markers("lab"))
    kinds = frozenset(kind for mark in marks for kind, wanted in mark.kwargs.items() if wanted)
    return _missing(kinds) if marks else ""


@functools.cache
def _missing(kinds: frozenset[str]) -> str:
    return (
        lab.missing(
            accounting="accounting" in kinds, network_filesystem="network_filesystem" in kinds
        )
        or ""
    )


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.option.markexpr.startswith("not (slow"):
        terminalreporter.line("make test-all runs what was left out")
    if again := terminalreporter.getreports("rerun"):
        names = sorted({report.nodeid for report in again})
        terminalreporter.line(f"run twice, find out why: {', '.join(names)}")
        for report in again:
            terminalreporter.section(f"first run of {report.nodeid}")
            terminalreporter.line(report.longreprtext)


@pytest.fixture(scope="session")
def played_python() -> Path:
    """Return the interpreter whose PyTorch has played GPUs; they are built if they have changed."""
    build.ready(_PLAYED)
    return _PLAYED / "bin/python"


@pytest.fixture
def public_path() -> Iterator[Path]:
    """Yield a directory that every user can reach, as `tmp_path` is not.

    pytest keeps all of a user's sessions below one directory, which each that begins closes again.
    """
    with tempfile.TemporaryDirectory(prefix="public-") as name:
        path = Path(name)
        path.chmod(0o755)
        yield path


@pytest.fixture(scope="session", autouse=True)
def _clean_environment() -> Iterator[None]:
    """Take away what a surrounding job, or its user, would impose on every test."""
    foreign = {name: value for name, value in os.environ.items() if name.startswith(_FOREIGN)}
    for name in foreign:
        del os.environ[name]
    os.environ[_TAG] = str(os.getpid())
    yield
    del os.environ[_TAG]
    os.environ.update(foreign)


@pytest.fixture(autouse=True)
def _nothing_left_running(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a process behind, and end that process."""
    if request.node.path.is_relative_to(_LAB) or request.node.get_closest_marker("lab"):
        yield  # a lab's processes end with it, and it outlives the test
        return
    before = {entry.name for entry in Path("/proc").iterdir()}
    yield
    deadline = time.monotonic() + _REAP_S
    while (left := _started(before)) and time.monotonic() < deadline:
        time.sleep(0.02)
    names = [_command_line(pid) for pid in left]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not names, f"left running: {names}"


def _started(before: set[str]) -> list[int]:
    return with_variable(_TAG, str(os.getpid()), without=before)


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return str(pid)
