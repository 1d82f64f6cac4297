# SPDX-License-Identifier: Apache-2.0
"""Real processes: nothing outlives its parent or its deadline."""

import ast
import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slurm_health
from slurm_health.system.processes import (
    ask_python,
    close_pipes,
    end_session,
    kill_session,
    read_available,
    run,
    start_tied,
)
from tests.support.supervised import eventually

STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
# Both ignore SIGTERM; the child's id goes to standard output.
STUBBORN_PARENT = STUBBORN + (
    "import subprocess, sys; "
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); "
    "print(child.pid, flush=True); time.sleep(100)"
)
STARTS_TIED = """
import os, subprocess, sys, time
from slurm_health.system.processes import start_tied
child = start_tied(["sleep", "100"], environ=os.environ)
print(child.pid, flush=True)
time.sleep(100)
"""


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat.rpartition(b")")[2].split()[0] != b"Z"
    return False


def start(*argv: str) -> subprocess.Popen[bytes]:
    return start_tied(argv, environ=os.environ, stdout=subprocess.PIPE)


def said(process: subprocess.Popen[bytes]) -> str:
    """Return what a process writes first to its standard output."""
    text = b""

    def has_spoken() -> bool:
        nonlocal text
        text += read_available(process.stdout)
        return b"\n" in text

    eventually(has_spoken, "a first line")
    return text.decode().strip()


@pytest.mark.parametrize(
    "start", ['processes.start_tied(["true"], environ=os.environ)', "killable.run_one(bytes, 60.0)"]
)
def test_an_interrupt_while_a_child_is_started_is_heard(start: str) -> None:
    code = f"""
import os, signal
from slurm_health.system import killable, processes
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    {start}
except KeyboardInterrupt:
    print("heard")
"""
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("heard\n", "")


def test_a_child_that_ignores_sigterm_is_gone_with_its_own_child() -> None:
    parent = start(sys.executable, "-c", STUBBORN_PARENT, STUBBORN + "time.sleep(100)")
    child = int(said(parent))

    end_session(parent, grace_s=0.1)

    assert parent.returncode == -signal.SIGKILL
    eventually(lambda: not alive(child), "the grandchild's end")
    close_pipes(parent)


def test_what_an_ended_leader_left_behind_is_killed() -> None:
    leader = start("sh", "-c", "trap '' TERM; sleep 100 & echo $!")
    child = int(said(leader))
    leader.wait(10)
    assert alive(child)

    end_session(leader, grace_s=0.1)

    eventually(lambda: not alive(child), "the child's end")
    close_pipes(leader)


def test_a_child_dies_with_its_parent_even_when_that_is_killed() -> None:
    parent = start(sys.executable, "-c", STARTS_TIED)
    child = int(said(parent))

    parent.kill()  # the parent alone: the child is in a session of its own
    parent.wait(10)

    eventually(lambda: not alive(child), "the child's end")
    close_pipes(parent)


def test_reading_never_waits_and_ending_or_killing_twice_is_no_error() -> None:
    process, killed = start("sleep", "100"), start("sleep", "100")
    assert read_available(process.stdout) == read_available(process.stderr) == b""

    end_session(process, grace_s=10.0)
    kill_session(process)
    end_session(process, grace_s=0.1)
    assert process.returncode == -signal.SIGTERM

    kill_session(killed)
    killed.wait(10)
    assert read_available(killed.stdout) == b""
    for each in (process, killed):
        close_pipes(each)


@pytest.mark.parametrize("last_bytes", [None, 1000])
def test_a_command_reads_all_that_it_is_given_while_it_answers(last_bytes: int | None) -> None:
    given = b"".join(b"%07d\n" % number for number in range(100_000))
    ended = run(
        ["sh", "-c", "cat; echo said >&2; exit 3"],
        environ=os.environ,
        stdin=given,
        deadline_s=60,
        last_bytes=last_bytes,
    )

    assert ended.returncode == 3
    assert ended.stdout == (given if last_bytes is None else given[-last_bytes:])
    assert ended.stderr == b"said\n"


def test_a_command_that_is_late_or_reads_or_says_too_much_or_is_not_there_does_no_harm() -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TimeoutError):
        run(["yes", "x" * 4000], environ=os.environ, deadline_s=1, last_bytes=4096)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 20_000

    with pytest.raises(TimeoutError):  # it has ended, and left its streams to another
        run(["sh", "-c", "sleep 100 &"], environ=os.environ, deadline_s=0.5)
    assert run(["true"], environ=os.environ, stdin=b"x" * (1 << 20), deadline_s=60).returncode == 0
    with pytest.raises(FileNotFoundError):
        start_tied(["/nonexistent/python"], environ=os.environ)


# --- interpreters of jobs ---------------------------------------------------------------------


@pytest.mark.heavy
@pytest.mark.parametrize("more", [{}, {"PYTHONPATH": ""}, {"PYTHONPATH": ":/nowhere"}])
def test_an_interpreter_that_is_asked_imports_nothing_of_the_callers_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, str]
) -> None:
    (tmp_path / "torch.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    environ = {"PATH": os.defpath, **more}
    question = "import importlib.util as u; print(u.find_spec('torch'))\nimport torch"
    ended = ask_python(sys.executable, question, environ=environ, deadline_s=60)
    assert b"torch.py" not in ended.stdout
    assert not (tmp_path / "ran").exists()

    (tmp_path / "bin").mkdir()  # it is found where the caller stands
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    ended = ask_python("bin/python", "print(1)", environ=environ, deadline_s=60)
    assert ended.stdout == b"1\n"


def interpreter_calls(path: Path) -> Iterator[list[ast.expr]]:
    """Yield the literal command lines in a module that have -c or -m."""
    for each in ast.walk(ast.parse(path.read_text())):
        if isinstance(each, ast.List | ast.Tuple) and any(
            isinstance(word, ast.Constant) and word.value in ("-c", "-m") for word in each.elts
        ):
            yield each.elts


# Shells, a check's own option, and torchrun, which the process becomes in its user's directory.
NO_INTERPRETERS = {
    "preflight/master/job_environment.py",
    "preflight/supervisor/kept_spares.py",
    "node/checks/external.py",
    "node/checks/vendors.py",
    "torchrun/train.py",
    "system/owner.py",
}


# `own_python` calls ours with -P.
SAFE = {"'-I'", "'-P'", "*flags", "*own_python()"}


def test_no_interpreter_is_called_so_that_it_imports_from_the_callers_directory() -> None:
    package = Path(slurm_health.__file__).parent
    loose = []
    for path in sorted(package.rglob("*.py")):
        place = str(path.relative_to(package))
        for words in interpreter_calls(path):
            said = {ast.unparse(word) for word in words}
            if place not in NO_INTERPRETERS and not said & SAFE:
                loose.append(f"{place}: {' '.join(sorted(said))}")
    assert loose == ["system/processes.py: '-c' path question"]  # in `ask_python`, from /


def test_no_shell_script_calls_python_without_a_flag_that_keeps_the_directory_out() -> None:
    top = Path(slurm_health.__file__).parents[1]
    scripts = [path for name in ("prolog", "epilog") for path in (top / name).iterdir()]
    scripts += [
        top / "slurm_health/preflight/sbatch/launcher.sbatch",
        *(top / "distribution").glob("*.sh"),
    ]
    calls = [
        line
        for path in scripts
        for line in path.read_text().splitlines()
        if re.search(r"python\S* .*(?<!/sh )-[cm] ", line) and not line.startswith("#")
    ]
    assert calls
    assert [each for each in calls if not re.search(r"-I |-P |\$\{flags\} ", each)] == []
