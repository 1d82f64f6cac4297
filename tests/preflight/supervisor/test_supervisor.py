# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurm_health.preflight.supervisor.check_process import heartbeat
from slurm_health.preflight.supervisor.script_process import command_line
from slurm_health.records.script_records import ScriptEnded, ScriptStarted
from slurm_health.system import journal
from tests.support.fake_slurm import FakeSlurm
from tests.support.full_filesystem import NO_LARGE_FILES, full_filesystem
from tests.support.supervised import (
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
# Python adds LC_CTYPE to its own environment in the C locale; the kernel's copy is true.
PRINTS_ENVIRON = f"#!{sys.executable} -S\nprint(open('/proc/self/environ', 'rb').read())\n"
# Mounts a filesystem that never answers, served by a process that outlives this one, and becomes
# the command that follows.
ON_HUNG_FILESYSTEM = """
import os, sys
from pathlib import Path
from tests.node.hooks.hung_filesystem import mount, serve
fuse = mount(Path(sys.argv[1]))
if os.fork() == 0:
    if os.fork() == 0:
        Path(sys.argv[2]).write_text(str(os.getpid()))
        serve(fuse)
    os._exit(0)
os.wait()
os.close(fuse)
os.execv(sys.argv[3], sys.argv[3:])
"""
INTERPRETERS = ["/bin/sh", "/bin/sh -e", "/bin/sh  -e ", " /usr/bin/env bash", "/usr/bin/env -S sh"]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.clean_up()


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


# --- signals while the script runs --------------------------------------------------------------


def test_signal_to_the_batch_script_alone_reaches_the_script_once(
    bench: Bench, logging_script: subprocess.Popen[bytes]
) -> None:
    os.kill(logging_script.pid, signal.SIGUSR1)
    bench.wait_for("script:SIGUSR1")
    os.kill(logging_script.pid, signal.SIGTERM)
    assert bench.finish(logging_script)[0] == 7
    assert bench.lines().count("script:SIGUSR1") == 1
    assert "child:SIGUSR1" not in bench.lines()


def test_signal_to_every_process_reaches_each_once(
    bench: Bench, logging_script: subprocess.Popen[bytes]
) -> None:
    to_everyone(logging_script, signal.SIGUSR1)
    bench.wait_for("script:SIGUSR1")
    # The supervisor takes signals in order: once the second is here, the first is dealt with.
    os.kill(logging_script.pid, signal.SIGUSR2)
    bench.wait_for("script:SIGUSR2")
    to_everyone(logging_script, signal.SIGTERM)
    assert bench.finish(logging_script)[0] == 7
    lines = bench.lines()
    assert lines.count("script:SIGUSR1") == lines.count("child:SIGUSR1") == 1
    assert lines.count("script:SIGTERM") == lines.count("child:SIGTERM") == 1
    assert lines.count("script:SIGUSR2") == 1


def test_signal_to_the_group_reaches_the_group_of_the_script_once(
    bench: Bench, logging_script: subprocess.Popen[bytes]
) -> None:
    os.killpg(logging_script.pid, signal.SIGUSR1)
    bench.wait_for("script:SIGUSR1")
    bench.wait_for("child:SIGUSR1")
    os.killpg(logging_script.pid, signal.SIGTERM)
    assert bench.finish(logging_script)[0] == 7
    assert sorted(line for line in bench.lines() if "USR1" in line) == [
        "child:SIGUSR1",
        "script:SIGUSR1",
    ]


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGWINCH])
def test_signal_that_is_ignored_by_default_is_forwarded(
    bench: Bench, logging_script: subprocess.Popen[bytes], number: signal.Signals
) -> None:
    os.kill(logging_script.pid, number)
    bench.wait_for(f"script:{number.name}")


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


def test_time_limit_ends_a_script_without_a_trap_by_the_signal(bench: Bench) -> None:
    process = bench.supervised("#!/bin/sh\necho ready >>$LOG\nexec sleep 1000\n")
    bench.wait_for("ready")
    to_everyone(process, signal.SIGTERM)
    assert bench.finish(process)[0] == -signal.SIGTERM


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


# --- the script sees and returns what it would alone ----------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        "exit 0",
        "exit 3",
        "exit 255",
        "kill -TERM $$",
        "kill -USR1 $$",
        "kill -PIPE $$",
        "trap 'kill 0' EXIT; exit 3",
        "trap '' TERM; kill 0; exit 4",
        "yes | head -1; echo ${PIPESTATUS[*]}",
        'for word; do printf "<%s>" "$word"; done; echo $#',
        "pwd; umask; ulimit -a",
        "cat; cat",
        "grep -E 'Sig(Blk|Ign|Cgt)' /proc/self/status",
        "python3 -S -c 'import signal; print(signal.getsignal(signal.SIGINT))'",
        "exec ls /proc/self/fd",
        "[ $(ps -o pgid= -p $$) = $$ ] && echo leader",
        "basename $(dirname $0)/slurm_script; test -x $0; echo $?",
        "env -0",
        "readlink /proc/self/cwd; cat /proc/self/oom_score_adj; nice",
    ],
)
def test_script_behaves_as_if_alone(bench: Bench, tmp_path: Path, body: str) -> None:
    if body.startswith("[ $(ps") and not Path("/bin/ps").exists():
        pytest.skip("ps is not installed")
    alone, supervised = _in_both_ways(bench, tmp_path, body)
    assert alone == supervised


@pytest.mark.parametrize("body", ["kill -KILL $$", "echo ran; kill -9 0"])
def test_script_that_is_killed_ends_as_if_alone_and_a_post_mortem_says_so(
    bench: Bench, tmp_path: Path, body: str
) -> None:
    alone, supervised = _in_both_ways(bench, tmp_path, body)
    assert alone[:2] == supervised[:2]
    assert alone[2] == b""
    assert b"was killed by SIGKILL" in supervised[2]


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


def test_a_script_that_crashes_is_told_so_behind_its_own_words(bench: Bench) -> None:
    body = "#!/bin/bash\necho mine >&2\nkill -SEGV $$\n"
    status, output, errors = bench.finish(bench.supervised(body, environ=bench.environ()))
    assert (status, output) == (-signal.SIGSEGV, b"")
    assert errors.startswith(b"mine\nslurm-health: post-mortem: why ")
    assert b"crashed (SIGSEGV, a segmentation fault)" in errors


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


def test_environment_is_byte_for_byte_the_same(bench: Bench) -> None:
    environ = {"LC_ALL": "C", "x.y": "1", "BASH_FUNC_f%%": "() {  :\n}", "B": "\udcff", "A": ""}
    alone = bench.finish(bench.alone(PRINTS_ENVIRON, environ=environ))
    assert bench.finish(bench.supervised(PRINTS_ENVIRON, environ=environ)) == alone
    assert rb"x.y=1\x00" in alone[1]


def test_the_flight_recorder_is_switched_on_where_that_was_asked_for(bench: Bench) -> None:
    text = "#!/bin/sh\nenv | grep ^TORCH_ | sort\n"
    own = {"TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    bench.answer("proceed", run_directory=str(bench.directory / "journal"))
    _, out, _ = bench.finish(
        bench.supervised(text, options=("--flight-recorder",), environ={**bench.environ(), **own})
    )

    files = f"{bench.directory}/journal/flight-rank-"
    assert out.decode().splitlines() == [
        f"TORCH_FR_DUMP_TEMP_FILE={files}",
        f"TORCH_NCCL_DEBUG_INFO_TEMP_FILE={files}",
        "TORCH_NCCL_DUMP_ON_TIMEOUT=1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE=7",
    ]


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_interpreter_line_is_honoured(bench: Bench, interpreter: str) -> None:
    text = (
        f"#!{interpreter}\necho $- $0 >/dev/null; tr '\\0' '\\n' </proc/$$/cmdline | head -n -1\n"
    )
    alone = bench.finish(bench.alone(text))
    ours = bench.finish(bench.supervised(text))
    assert ours[0] == alone[0] == 0
    assert ours[1] == alone[1]


def test_interpreter_line_is_split_as_the_kernel_does() -> None:
    def split(text: bytes) -> list[bytes]:
        return command_line(text, Path("/s"), ["a b"])

    assert split(b"#!/bin/sh\nx") == [b"/bin/sh", b"/s", b"a b"]
    assert split(b"#! \t/bin/sh\t-e  -x \nx") == [b"/bin/sh", b"-e  -x", b"/s", b"a b"]
    assert split(b"#!/bin/sh") == [b"/bin/sh", b"/s", b"a b"]
    for broken in (b"", b"x", b"#!", b"#! \n"):
        with pytest.raises(OSError, match="Exec format"):
            split(broken)


def test_missing_interpreter_ends_with_the_code_of_slurmstepd(bench: Bench) -> None:
    code, _, err = bench.finish(bench.supervised("#!/no/such/shell\n"))
    assert code == 2
    assert b"slurm-health: execve(): /no/such/shell: No such file or directory" in err


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


# --- the check before it -------------------------------------------------------------------------


def test_stop_prints_the_reason_and_ends_with_its_code(bench: Bench) -> None:
    bench.answer("stop", exit_code=9, reason="n3 is broken", run_directory="")
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (9, b"")
    assert b"slurm-health: the job stops: n3 is broken\n" in err


def test_requeue_that_does_not_come_ends_with_a_message(bench: Bench) -> None:
    bench.answer("requeue", exit_code=1, reason="n3 is broken", run_directory="")
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--requeue-wait-s", "0.2"])
    code, out, err = bench.finish(process)
    assert (code, out) == (1, b"")
    assert b"not requeued the job within 0.2 s" in err


@pytest.mark.parametrize("disposition", ["requeue", "hold"])
@pytest.mark.parametrize("rest", ["", "while :; do sleep 0.1; done"], ids=["after", "during"])
def test_a_requeue_or_a_hold_that_ends_the_job_is_no_news(
    bench: Bench, disposition: str, rest: str
) -> None:
    # As the check does: it says what it will ask Slurm for, and Slurm ends both, sooner or later.
    line = json.dumps({"disposition": disposition, "reason": "n3 is broken"})
    bench.master(f"echo 'job will move' >&2\necho '{line}'\necho told >>$LOG\n{rest}\n")
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--grace-s", "0.3"])
    bench.wait_for("told")
    process.send_signal(signal.SIGTERM)
    assert bench.finish(process) == (-signal.SIGTERM, b"", b"job will move\n")


def test_a_requeue_by_a_check_that_died_over_it_is_no_news_to_the_next(bench: Bench) -> None:
    line = json.dumps({"disposition": "requeue", "reason": "n3 is broken"})
    bench.master(
        f"echo start >>$LOG\n[ $(wc -l <$LOG) = 1 ] && echo '{line}' && kill -9 $$\n"
        "echo again >>$LOG\nwhile :; do sleep 0.1; done\n"
    )
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--grace-s", "0.3"])
    bench.wait_for("again")
    process.send_signal(signal.SIGTERM)
    code, out, err = bench.finish(process)
    assert (code, out) == (-signal.SIGTERM, b"")
    assert b"killed by SIGKILL" in err
    assert b"SIGTERM" not in err


def test_a_requeue_that_was_refused_is_none_when_a_signal_ends_the_check(bench: Bench) -> None:
    bench.master(
        'echo \'{"disposition": "requeue"}\'\necho \'{"disposition": "stop"}\'\n'
        "echo told >>$LOG\nwhile :; do sleep 0.1; done\n"
    )
    process = bench.supervised("#!/bin/sh\n", options=["--grace-s", "0.3"])
    bench.wait_for("told")
    process.send_signal(signal.SIGTERM)
    assert b"SIGTERM ended the check" in bench.finish(process)[2]


def test_master_that_is_killed_is_started_again(bench: Bench) -> None:
    bench.master(
        "echo start >>$LOG\n[ $(wc -l <$LOG) = 1 ] && kill -9 $$\n"
        'echo \'{"disposition": "proceed"}\'\n'
    )
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert bench.lines() == ["start", "start"]
    assert b"start 1 of 3 of the check: ended without a verdict (killed by SIGKILL)" in err


@pytest.mark.parametrize("death", ["kill -9 $$", "exit 70"])
def test_a_check_that_dies_before_slurm_heard_of_the_requeue_is_started_again(
    bench: Bench, death: str
) -> None:
    bench.master(
        "echo start >>$LOG\n[ $(wc -l <$LOG) = 1 ] &&"
        f' echo \'{{"disposition": "requeue"}}\' && {death}\n'
        'echo \'{"disposition": "proceed"}\'\n'
    )
    code, out, _ = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert bench.lines() == ["start", "start"]


@pytest.mark.parametrize(
    ("nodes", "said"), [("", "the script anyway: why"), ('"n1", "n3"', "the script: why")]
)
def test_a_job_that_has_left_its_bad_nodes_behind_does_not_run_anyway(
    bench: Bench, nodes: str, said: str
) -> None:
    answer = f'{{"disposition": "proceed", "exit_code": 1, "reason": "why", "nodes": [{nodes}]}}'
    bench.master(f"echo '{answer}'\n")
    code, _, err = bench.finish(bench.supervised("#!/bin/sh\n"))
    assert (code, f"slurm-health: running {said}\n".encode() in err) == (0, True)


@pytest.mark.parametrize("body", ["kill -9 $$", "exit 3", "echo no JSON", "echo '{\"x\": 1}'"])
def test_master_that_never_answers_lets_the_script_run_loudly(bench: Bench, body: str) -> None:
    bench.master(f'echo "${{1%%=*}}start" >>$LOG\n{body}\n')
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    # The last one is only to record that the others died.
    assert bench.lines() == ["start", "start", "start", "--uncheckedstart"]
    assert b"running the script anyway: UNCHECKED: the check never answered" in err


def test_a_job_that_is_not_to_run_unchecked_stops_where_the_check_never_answers(
    bench: Bench,
) -> None:
    bench.master("kill -9 $$\n")
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--unchecked-stops"])
    code, out, err = bench.finish(process)
    assert (code, out) == (4, b"")
    assert b"the job stops: UNCHECKED: the check never answered" in err


def test_a_check_that_died_is_asked_what_becomes_of_the_job(bench: Bench) -> None:
    line = json.dumps({"disposition": "stop", "exit_code": 4, "reason": "UNCHECKED: it died"})
    bench.master(f"[ $# = 0 ] && kill -9 $$\necho \"$1\" >>$LOG\necho '{line}'\nexit 4\n")
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (4, b"")
    assert bench.log.read_text() == (
        "--unchecked=the check was started 3 times, and ended without a verdict"
        " (killed by SIGKILL)\n"
    )
    assert b"the job stops: UNCHECKED: it died\n" in err


def test_master_that_cannot_be_started_lets_the_script_run_loudly(bench: Bench) -> None:
    (bench.directory / "master").unlink()
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert b"UNCHECKED" in err


def test_proceeding_without_health_says_why(bench: Bench) -> None:
    bench.answer("proceed", exit_code=3, reason="n3 is undecided")
    assert b"n3 is undecided" in bench.finish(bench.supervised("#!/bin/sh\n"))[2]


def test_master_has_no_part_in_the_streams_of_the_job(bench: Bench) -> None:
    bench.master('cat >&2; echo warned >&2; echo noise; echo \'{"disposition": "proceed"}\'\n')
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\ncat\n", stdin=b"for the script"))
    assert (code, out, err) == (0, b"for the script", b"warned\n")


MASTER_THAT_HANGS = """
trap '' TERM USR1 INT
(trap '' TERM; setsid bash -c 'trap "" TERM; while :; do sleep 0.1; done') &
while :; do sleep 0.1; [ -e $LOG ] || echo ready >>$LOG; done
"""


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGALRM],
)
def test_signal_during_the_check_leaves_no_process(bench: Bench, number: int) -> None:
    bench.master(MASTER_THAT_HANGS)
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--grace-s", "0.3"])
    bench.wait_for("ready")
    os.kill(process.pid, number)
    code, out, _ = bench.finish(process)
    assert (code, out) == (-number, b"")
    assert with_variable("LOG", str(bench.log)) == []


def test_a_check_that_slurm_ends_with_its_job_says_what_becomes_of_that(
    bench: Bench, tmp_path: Path
) -> None:
    slurm = FakeSlurm(tmp_path / "slurm")
    slurm.run_job(12, ["n1"], state="PENDING")
    bench.master(MASTER_THAT_HANGS)
    environ = {**bench.environ(), **slurm.environ(), "SLURM_JOB_ID": "12"}
    process = bench.supervised("#!/bin/sh\n", options=["--grace-s", "0.3"], environ=environ)
    bench.wait_for("ready")
    os.kill(process.pid, signal.SIGTERM)
    said = b"the job was requeued during its check, so the script did not run\n"
    assert said in bench.finish(process)[2]


@pytest.mark.parametrize(
    ("end_s", "said"),
    [
        (
            "1",
            b"the job's time limit ended the check, so the script did not run; ask for more time",
        ),
        ("9999999999", b"SIGTERM ended the check, so the script did not run\n"),
        ("", b"SIGTERM ended the check, so the script did not run; if that was for the time limit"),
    ],
    ids=["over", "not over", "not told"],
)
def test_a_signal_that_ends_the_check_is_named(bench: Bench, end_s: str, said: bytes) -> None:
    bench.master(MASTER_THAT_HANGS)
    environ = {**bench.environ(), "SLURM_JOB_END_TIME": end_s}
    options = ["--grace-s", "0.3"]
    process = bench.supervised("#!/bin/sh\n", options=options, environ=environ)
    bench.wait_for("ready")
    os.kill(process.pid, signal.SIGTERM)
    assert said in bench.finish(process)[2]


MASTER_THAT_WAITS = (
    "echo ready >>$LOG\nwhile ! [ -e $LOG.go ]; do sleep 0.02; done\n"
    'echo \'{"disposition": "proceed"}\'\n'
)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("USR1", signal.SIGUSR1),
        ("USR2", signal.SIGUSR2),
        ("HUP", signal.SIGHUP),
        ("RTMIN+3", signal.SIGRTMIN + 3),
    ],
)
def test_a_signal_for_the_script_that_meets_the_check_waits_for_its_trap(
    bench: Bench, name: str, number: int
) -> None:
    # The trap on EXIT lets bash catch everything, for as long as it takes to come to the other.
    bench.master(MASTER_THAT_WAITS)
    process = bench.supervised(
        "#!/bin/bash\necho began >>$LOG\nuntil [ -e $LOG.trap ]; do sleep 0.02; done\n"
        f"trap 'echo ended >>$LOG' EXIT\ntrap 'echo got-it >>$LOG; exit 5' {name}\n"
        "while :; do sleep 0.02; done\n"
    )
    bench.wait_for("ready")
    os.kill(process.pid, number)
    os.kill(process.pid, number)
    Path(f"{bench.log}.go").touch()
    bench.wait_for("began")
    Path(f"{bench.log}.trap").touch()
    code, _, err = bench.finish(process)
    assert (code, bench.lines()) == (5, ["ready", "began", "got-it", "ended"])
    assert b"came before train.sh started; it is sent once the script has a trap for it" in err
    assert b"ended the check" not in err


def test_a_signal_that_meets_the_check_reaches_a_script_that_blocks_it(bench: Bench) -> None:
    bench.master(MASTER_THAT_WAITS)
    process = bench.supervised(
        f"#!{sys.executable} -S\nimport signal, sys, time\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "while signal.SIGUSR1 not in signal.sigpending(): time.sleep(0.02)\n"
        "sys.exit(5)\n"
    )
    bench.wait_for("ready")
    os.kill(process.pid, signal.SIGUSR1)
    Path(f"{bench.log}.go").touch()
    assert bench.finish(process)[0] == 5


def test_a_script_that_never_traps_a_signal_that_met_the_check_ends_by_it(bench: Bench) -> None:
    bench.master(MASTER_THAT_WAITS)
    process = bench.supervised(
        "#!/bin/sh\nwhile :; do sleep 0.02; done\n", options=["--trap-wait-s", "0.5"]
    )
    bench.wait_for("ready")
    os.kill(process.pid, signal.SIGUSR1)
    Path(f"{bench.log}.go").touch()
    assert bench.finish(process)[0] == -signal.SIGUSR1


def test_the_end_of_a_job_does_not_wait_for_a_signal_that_is_kept(bench: Bench) -> None:
    bench.master(MASTER_THAT_WAITS)
    process = bench.supervised("#!/bin/sh\necho began >>$LOG\nwhile :; do sleep 0.02; done\n")
    bench.wait_for("ready")
    os.kill(process.pid, signal.SIGUSR1)
    Path(f"{bench.log}.go").touch()
    bench.wait_for("began")
    os.kill(process.pid, signal.SIGTERM)
    assert bench.finish(process)[0] == -signal.SIGTERM


def test_harmless_signals_during_the_check_change_nothing(bench: Bench) -> None:
    bench.master(MASTER_THAT_WAITS)
    process = bench.supervised("#!/bin/sh\necho ran\n")
    bench.wait_for("ready")
    for number in (signal.SIGCONT, signal.SIGWINCH, signal.SIGURG, signal.SIGCHLD):
        os.kill(process.pid, number)
    Path(f"{bench.log}.go").touch()
    assert bench.finish(process)[:2] == (0, b"ran\n")


def test_what_the_master_leaves_behind_is_gone_before_the_script_runs(bench: Bench) -> None:
    bench.master('setsid sleep 1000 >/dev/null &\necho \'{"disposition": "proceed"}\'\n')
    process = bench.supervised("#!/bin/sh\npgrep -fc '^sleep 1000$' -s 0 >/dev/null; echo ran\n")
    assert bench.finish(process)[1] == b"ran\n"
    assert with_variable("LOG", str(bench.log)) == []


# --- the journal ---------------------------------------------------------------------------------


def test_start_and_end_of_the_script_are_recorded(bench: Bench) -> None:
    run = bench.directory / "run"
    run.mkdir()
    bench.answer("proceed", run_directory=str(run))
    assert bench.finish(bench.supervised("#!/bin/sh\necho $$\nexit 4\n"))[0] == 4
    started, ended = (entry.record for entry in journal.read_all(run, journal.SUPERVISOR))
    assert isinstance(started, ScriptStarted)
    assert started.script == "train.sh"
    assert isinstance(ended, ScriptEnded)
    assert (ended.exit_code, ended.signal) == (4, 0)
    assert ended.duration_s > 0


def test_death_by_a_signal_is_recorded(bench: Bench) -> None:
    run = bench.directory / "run"
    run.mkdir()
    bench.answer("proceed", run_directory=str(run))
    bench.finish(bench.supervised("#!/bin/sh\nkill -KILL $$\n"))
    ended = journal.read_all(run, journal.SUPERVISOR)[-1].record
    assert isinstance(ended, ScriptEnded)
    assert (ended.exit_code, ended.signal) == (137, 9)


def test_journal_that_cannot_be_written_is_a_line_and_no_more(bench: Bench) -> None:
    bench.answer("proceed", run_directory="/no/such/run")
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert b"slurm-health: journal /no/such/run" in err
    assert b"Traceback" not in err


MASTER_ON_HUNG_FILESYSTEM = """
echo start >>$LOG
if [ $(wc -l <$LOG) -gt 1 ]; then
    echo '{"disposition": "proceed", "exit_code": 4, "reason": "UNCHECKED: x"}'
    exit 4
fi
setsid bash -c 'trap "echo told >>$LOG; exit" TERM; while :; do sleep 0.05; done' &
echo
exec cat RUN/master.jsonl
"""


@pytest.mark.root
def test_a_check_that_the_kernel_holds_is_given_up_and_what_it_started_is_ended(
    bench: Bench,
) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse")
    run, server = bench.directory / "run", bench.directory / "server"
    run.mkdir()
    bench.master(MASTER_ON_HUNG_FILESYSTEM.replace("RUN", str(run)))
    process = bench.supervised(
        "#!/bin/sh\necho ran >>$LOG\n",
        options=["--silence-s", "1", "--grace-s", "0.5"],
        wrapper=[sys.executable, "-c", ON_HUNG_FILESYSTEM, str(run), str(server)],
        environ={**bench.environ(), "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    try:
        code, _, err = bench.finish(process)
    finally:
        os.kill(int(server.read_text()), signal.SIGKILL)
    assert code == 0
    assert bench.lines() == ["start", "told", "start", "ran"]
    assert b"start 1 of 3 of the check: it hangs: nothing heard for 1 s" in err
    assert b"running the script anyway: UNCHECKED" in err


def test_a_check_that_gets_on_says_so_now_and_then_and_not_each_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    times_s = iter([0.0, 9.9, 10.0, 10.0, 11.0, 19.9, 35.0, 35.0, 44.9])
    beat = heartbeat(lambda: next(times_s))
    for _ in range(6):
        beat()
    assert capsys.readouterr().out == "\n\n"


def test_a_check_whose_time_is_over_is_ended_and_that_is_recorded(bench: Bench) -> None:
    bench.master(
        "echo start >>$LOG\n[ $# = 0 ] && sleep 600\n"
        'echo "$1" >>$LOG; echo \'{"disposition": "proceed"}\'\n'
    )
    options = ["--limit-s", "1", "--grace-s", "0.5"]
    code, out, _ = bench.finish(bench.supervised("#!/bin/sh\necho ran\n", options=options))
    assert (code, out) == (0, b"ran\n")
    ended = "--unchecked=the check had not ended when its time was over: it was given 1 s"
    assert bench.log.read_text() == f"start\nstart\n{ended}\n"


def test_a_check_that_has_answered_in_time_may_end_later(bench: Bench) -> None:
    bench.master(
        'echo start >>$LOG; echo \'{"disposition": "proceed"}\'\nsleep 2; echo end >>$LOG\n'
    )
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--limit-s", "1"])
    assert bench.finish(process) == (0, b"ran\n", b"")
    assert bench.lines() == ["start", "end"]


def test_a_quiet_check_adds_nothing_to_what_the_script_writes(bench: Bench) -> None:
    bench.master("echo it was checked >&2; kill -9 $$\n")
    script = "#!/bin/sh\necho ran; echo failed >&2; exit 7\n"
    loud = bench.finish(bench.supervised(script))
    quiet = bench.finish(bench.supervised(script, options=["--quiet"]))
    assert loud[2] != b"failed\n"
    assert quiet == (7, b"ran\n", b"failed\n")


def test_a_check_that_takes_long_and_says_so_is_waited_for(bench: Bench) -> None:
    bench.master(
        "echo start >>$LOG\nfor each in $(seq 20); do sleep 0.2; echo; done\n"
        'echo \'{"disposition": "proceed"}\'\n'
    )
    process = bench.supervised("#!/bin/sh\necho ran\n", options=["--silence-s", "3"])
    assert bench.finish(process) == (0, b"ran\n", b"")
    assert bench.lines() == ["start"]


@pytest.mark.root
def test_journal_that_hangs_holds_up_neither_signals_nor_the_end(bench: Bench) -> None:
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("no /dev/fuse")
    run, server = bench.directory / "run", bench.directory / "server"
    run.mkdir()
    bench.answer("proceed", run_directory=str(run))
    process = bench.supervised(
        "#!/bin/bash\ntrap 'exit 6' USR1\necho ready >>$LOG\nwhile :; do sleep 0.02; done\n",
        options=["--journal-wait-s", "0.2"],
        wrapper=[sys.executable, "-c", ON_HUNG_FILESYSTEM, str(run), str(server)],
        environ={**bench.environ(), "PYTHONPATH": str(Path(__file__).parents[3])},
    )
    try:
        bench.wait_for("ready")
        os.kill(process.pid, signal.SIGUSR1)
        code, _, err = bench.finish(process)
    finally:
        os.kill(int(server.read_text()), signal.SIGKILL)
    assert code == 6
    assert b"its filesystem does not answer" in err


def test_what_lies_in_the_place_of_the_journal_holds_up_nothing(bench: Bench) -> None:
    run = bench.directory / "run"
    run.mkdir()
    os.mkfifo(journal.path_of(run, journal.SUPERVISOR))
    bench.answer("proceed", run_directory=str(run))
    code, out, err = bench.finish(bench.supervised("#!/bin/sh\necho ran\n"))
    assert (code, out) == (0, b"ran\n")
    assert b"supervisor.jsonl is not a plain file" in err
