# SPDX-License-Identifier: Apache-2.0
"""The script behaves as if it ran alone, and gets the signals that are its own."""

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slurm_health.preflight.supervisor.script_process import end_script
from tests.support.full_filesystem import NO_LARGE_FILES, full_filesystem
from tests.support.rows import rows
from tests.support.supervised import (
    MASTER_THAT_WAITS,
    Bench,
    descendants,
    eventually,
    with_variable,
)

# Logs every signal it is sent, one line each, until SIGTERM; its child in the same group too.
LOGS_SIGNALS = f"""#!{sys.executable} -S
import os, signal
log = os.open(os.environ["LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
wanted = {{signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT, signal.SIGWINCH}}
signal.pthread_sigmask(signal.SIG_BLOCK, wanted)
name = "script" if os.fork() else "child"
os.write(log, f"{{name}}:ready\\n".encode())
while True:
    number = signal.sigwait(wanted)
    os.write(log, f"{{name}}:{{signal.Signals(number).name}}\\n".encode())
    if number == signal.SIGTERM:
        os._exit(7)
"""


INTERPRETERS = [
    "/bin/sh",
    "/bin/sh  -e ",
    " \t/bin/sh\t-e ",
    " /usr/bin/env bash",
    "/usr/bin/env -S sh",
]


@pytest.fixture
def logging_script(bench: Bench) -> subprocess.Popen[bytes]:
    process = bench.supervised(LOGS_SIGNALS)
    bench.wait_for("script:ready")
    bench.wait_for("child:ready")
    return process


def to_everyone(process: subprocess.Popen[bytes], number: int) -> None:
    for pid in [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def to_the_group(process: subprocess.Popen[bytes], number: int) -> None:
    os.killpg(process.pid, number)


@pytest.mark.parametrize(
    ("send", "children"),
    [(subprocess.Popen.send_signal, 0), (to_everyone, 1), (to_the_group, 1)],
    ids=["batch script", "every process", "group"],
)
def test_a_signal_reaches_the_script_once_and_its_group_where_that_was_meant(
    bench: Bench,
    logging_script: subprocess.Popen[bytes],
    send: Callable[[subprocess.Popen[bytes], int], None],
    children: int,
) -> None:
    for harmless in (signal.SIGCONT, signal.SIGWINCH):
        os.kill(logging_script.pid, harmless)
        bench.wait_for(f"script:{harmless.name}")
    send(logging_script, signal.SIGUSR1)
    bench.wait_for("script:SIGUSR1")
    if children:
        bench.wait_for("child:SIGUSR1")
    # The supervisor takes signals in order: once the second is here, the first is dealt with.
    os.kill(logging_script.pid, signal.SIGUSR2)
    bench.wait_for("script:SIGUSR2")
    send(logging_script, signal.SIGTERM)
    assert bench.finish(logging_script)[0] == 7
    lines = bench.lines()
    assert lines.count("script:SIGUSR2") == lines.count("script:SIGTERM") == 1
    assert (lines.count("script:SIGUSR1"), lines.count("child:SIGUSR1")) == (1, children)
    assert not children or lines.count("child:SIGTERM") == 1


def test_signals_of_the_script_to_its_own_group_are_not_taken_for_slurms(bench: Bench) -> None:
    process = bench.supervised(
        "#!/bin/bash\ntrap 'echo got >>$LOG' USR1\necho ready >>$LOG\nkill -USR1 0\n"
        "while ! [ -e $LOG.stop ]; do sleep 0.02; done\n"
    )
    bench.wait_for("got")
    os.kill(process.pid, signal.SIGUSR1)
    eventually(lambda: bench.lines().count("got") == 2, "the second SIGUSR1")
    Path(f"{bench.log}.stop").touch()
    assert bench.finish(process)[0] == 0


def test_nothing_of_the_script_outlives_a_killed_supervisor(bench: Bench) -> None:
    process = bench.supervised("#!/bin/sh\nsleep 1000 &\necho ready >>$LOG\nwait\n")
    bench.wait_for("ready")
    started = descendants(process.pid)
    process.kill()
    process.wait()
    eventually(lambda: not with_variable("LOG", str(bench.log)), f"{started} to end")


def test_background_process_does_not_keep_the_job(bench: Bench) -> None:
    process = bench.supervised("#!/bin/sh\nsleep 1000 >/dev/null 2>&1 &\necho $! >>$LOG\nexit 5\n")
    assert bench.finish(process)[0] == 5
    os.kill(int(bench.lines()[0]), signal.SIGKILL)  # still there, as after any batch script


@rows
def test_script_behaves_as_if_alone(bench: Bench, tmp_path: Path, body: str) -> None:
    if body.startswith("[ $(ps") and not Path("/bin/ps").exists():
        pytest.skip("ps is not installed")
    alone, supervised = _in_both_ways(bench, tmp_path, body)
    assert alone == supervised


def _in_both_ways(bench: Bench, tmp_path: Path, body: str) -> list[tuple[int, bytes, bytes]]:
    """Return how a script ends, and what it says, as a script of its own and below a supervisor."""
    work = tmp_path / "a b'c"
    work.mkdir()
    text = f"#!/bin/bash\n{body}\n"
    words = ["", "a b", "$(x)", "'", '"', "\\", "new\nline", "--", "-x", "ä"]
    environ = bench.environ() | {"EMPTY": "", "LINES2": "a\nb", "BASH_FUNC_f%%": "() {  :\n}"}
    results = []
    for start in (bench.alone, bench.supervised):
        process = start(text, *words, environ=environ, stdin=b"standard\ninput", cwd=work)
        results.append(bench.finish(process))
    return results


@pytest.mark.root
def test_script_runs_where_the_temporary_directory_is_full(bench: Bench, tmp_path: Path) -> None:
    text = "#!/bin/sh\necho ran\n" + "# padding\n" * 1000
    with full_filesystem(tmp_path / "full") as full:
        environ = {**bench.environ(), "TMPDIR": str(full)}
        assert bench.finish(bench.supervised(text, environ=environ)) == (0, b"ran\n", b"")


def test_a_script_that_no_temporary_directory_takes_is_an_error(bench: Bench) -> None:
    text = "#!/bin/sh\necho ran\n" + "# padding\n" * 1000
    code, out, err = bench.finish(bench.supervised(text, wrapper=NO_LARGE_FILES))
    assert (code, out) == (errno.EFBIG, b"")
    assert err.startswith(b"slurm-health: cannot run train.sh: ")
    assert b"Traceback" not in err


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_interpreter_line_is_honoured(bench: Bench, interpreter: str) -> None:
    text = (
        f"#!{interpreter}\necho $- $0 >/dev/null; tr '\\0' '\\n' </proc/$$/cmdline | head -n -1\n"
    )
    alone = bench.finish(bench.alone(text))
    ours = bench.finish(bench.supervised(text))
    assert ours[0] == alone[0] == 0
    assert ours[1] == alone[1]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        (
            "#!/no/such/shell\n",
            errno.ENOENT,
            b"execve(): /no/such/shell: No such file or directory",
        ),
        *((text, errno.ENOEXEC, b"Exec format error") for text in ("x", "#!", "#! \n")),
    ],
)
def test_a_script_that_cannot_be_run_ends_with_the_code_of_slurmstepd(
    bench: Bench, text: str, code: int, said: bytes
) -> None:
    ended, _, err = bench.finish(bench.supervised(text))
    assert ended == code
    assert said in err


def test_script_runs_from_where_nothing_may_be_executed(bench: Bench) -> None:
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "noexec", "none", str(bench.temporary)],
        check=False,
        capture_output=True,
    )
    if mount.returncode != 0:
        pytest.skip("mounting needs root")
    try:
        ours = bench.finish(bench.supervised("#!/bin/sh\necho $TMPDIR ran\n"))
        assert (ours[0], ours[1].split()[-1]) == (0, b"ran")
        assert list(bench.temporary.iterdir()) == []
    finally:
        subprocess.run(["umount", str(bench.temporary)], check=True)


def test_script_lies_in_a_private_directory_that_goes_with_it(bench: Bench) -> None:
    process = bench.supervised("#!/bin/sh\necho $0 >>$LOG\nread line\n")
    eventually(bench.lines, "the name of the script")
    script = Path(bench.lines()[0])
    code = bench.finish(process)[0]
    assert script.name == "slurm_script"
    assert script.parent.parent == bench.temporary
    assert code == 1
    assert list(bench.temporary.iterdir()) == []


def test_unusable_tmpdir_does_not_stop_the_script(bench: Bench) -> None:
    environ = bench.environ() | {"TMPDIR": "/no/such/directory"}
    code, out, _ = bench.finish(bench.supervised("#!/bin/sh\nstat -c %a $0\n", environ=environ))
    assert (code, out) == (0, b"700\n")


def test_core_limit_of_the_script_is_untouched_and_there_is_one_core_at_most(bench: Bench) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    code, out, _ = bench.finish(
        bench.supervised("#!/bin/sh\nulimit -c; ulimit -Hc; kill -ABRT $$\n")
    )
    assert code == -signal.SIGABRT
    words = [
        "unlimited" if each == resource.RLIM_INFINITY else str(each // 512) for each in (soft, hard)
    ]
    assert out.split()[0] in {words[0].encode(), str(soft // 1024).encode()}


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP, signal.SIGRTMIN + 3])
def test_a_signal_for_the_script_that_meets_the_check_is_dropped_and_named(
    bench: Bench, number: int
) -> None:
    bench.master(MASTER_THAT_WAITS)
    process = bench.supervised("#!/bin/sh\necho began >>$LOG\nexit 5\n")
    bench.wait_for("ready")
    os.kill(process.pid, number)
    os.kill(process.pid, number)
    Path(f"{bench.log}.go").touch()
    code, _, err = bench.finish(process)
    assert (code, bench.lines()) == (5, ["ready", "began"])
    assert b"arrived before train.sh started, and is not passed on" in err
    assert b"ended the check" not in err


# What a script may leave hanging: a child in a session of its own that ignores SIGTERM, with a
# child that is stopped, as of a torchrun.
HANGS = f"""
setsid {sys.executable} -c '
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
os.kill(child.pid, signal.SIGSTOP)
open("pids", "w").write(str(os.getpid()) + " " + str(child.pid) + " ")
time.sleep(600)
' &
wait
echo went on
"""


def started(directory: Path, script: str) -> subprocess.Popen[bytes]:
    with (directory / "out").open("w") as out:
        return subprocess.Popen(
            ["/bin/bash", "-c", script], cwd=directory, stdout=out, process_group=0
        )


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_what_it_started_ends_with_it_in_whatever_session_and_state(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"])
    script = started(tmp_path, HANGS)
    pids = tmp_path / "pids"
    eventually(lambda: pids.exists() and pids.read_text().endswith(" "), "the hanging children")
    children = list(map(int, pids.read_text().split()))
    eventually(
        lambda: "State:\tT" in Path(f"/proc/{children[1]}/status").read_text(), "the stopped child"
    )

    end_script(script.pid, grace_s=0.5)

    eventually(lambda: not any(map(lives, children)), "the end of the children")
    assert script.wait() == -signal.SIGTERM
    assert (tmp_path / "out").read_text() == ""
    assert lives(other.pid)
    other.kill()
    other.wait()


def test_a_script_that_ends_by_itself_is_given_the_time_to(tmp_path: Path) -> None:
    trap = "trap 'echo cleans up; kill $!; exit 7' TERM; touch ready; sleep 600 & wait"
    script = started(tmp_path, trap)
    eventually((tmp_path / "ready").exists, "the trap")
    # The shell may not yet wait: a signal that comes before that ends the wait as well.
    end_script(script.pid, grace_s=30.0)

    assert script.wait() == 7
    assert (tmp_path / "out").read_text() == "cleans up\n"


def test_one_that_has_ended_already_is_no_error(tmp_path: Path) -> None:
    script = started(tmp_path, "exit 3")
    os.waitid(os.P_PID, script.pid, os.WEXITED | os.WNOWAIT)

    end_script(script.pid, grace_s=0.5)

    assert script.wait() == 3
