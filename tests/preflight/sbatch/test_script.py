# SPDX-License-Identifier: Apache-2.0

import os
import shlex
import shutil
import sys
from difflib import unified_diff
from pathlib import Path

import pytest

from slurm_health.preflight.decide.policy import OnUnchecked
from slurm_health.preflight.job_spec import JobSpec
from slurm_health.preflight.sbatch import script as batch_script
from tests.support.full_filesystem import full_filesystem, noexec_filesystem
from tests.support.rows import rows
from tests.support.supervised import MAIN, Bench, eventually, write_executable

DATA = Path(__file__).parents[2] / "data" / "batch_script"
HOSTILE = ["a_0", "a 0", 'a"=0"', "a'; echo foo", r"a\=0", r"a\=", "a\n0", "$(echo x)", "ä`id`*"]

PLAIN = b"#!/bin/bash\n#SBATCH -N 2\n#SBATCH --time=1:00:00\n\nsrun python train.py\n"
FOREIGN = b"""#!/bin/sh
#PBS -l nodes=2
#SBATCH -N 2

# A comment of the user's.
  # Another, indented.
#HEALTH --max-requeues=2
set -e
#SBATCH --not-read-here
echo trained
"""
LATIN_1 = b"#!/bin/sh\n# caf\xe9\necho 'd\xe9j\xe0 vu'"
SHELLS = [shell for shell in ("dash", "bash", "busybox sh") if shutil.which(shell.split()[0])]


def render(
    script: bytes,
    *,
    python: str = "/opt/slurm-health/bin/python",
    spec: JobSpec | None = None,
    name: str = "train.sh",
    is_wrap: bool = False,
) -> bytes:
    return batch_script.render(
        script,
        template=batch_script.read_template(),
        python=python,
        flags=["-E", "-P"],
        spec=spec or JobSpec(check="standard"),
        name=name,
        is_wrap=is_wrap,
    )


# --- the text --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("plain", render(PLAIN)),
        ("foreign-lines", render(FOREIGN, spec=JobSpec(check="standard", max_requeues=2))),
        (
            "settings",
            render(
                PLAIN,
                python="/opt/my env/bin/python",
                spec=JobSpec(check="standard", journal="/scratch/it's", python="python3"),
                name="my train.sh",
            ),
        ),
        ("wrap", render(batch_script.wrapped(b"hostname; date"), name="wrap", is_wrap=True)),
        ("latin-1-no-newline", render(LATIN_1)),
    ],
)
def test_text_is_as_recorded(name: str, text: bytes, tmp_path: Path) -> None:
    path = DATA / f"{name}.sbatch"
    expected = path.read_bytes() if path.exists() else b""
    if text == expected:
        return
    new = tmp_path / path.name
    new.write_bytes(text)
    old, now = (each.decode("latin-1").splitlines() for each in (expected, text))
    diff = unified_diff(old, now, str(path), "what the code says now", lineterm="")
    accept = shlex.join(["cp", str(new), str(path)])
    pytest.fail("\n".join([*diff, "", "to accept it:", accept]), pytrace=False)


# --- the text, run ---------------------------------------------------------------------------

SHOWS_ITSELF = b"""#!/usr/bin/env bash
#SBATCH -N 2
cat "$0"
basename "$0"
printf '<%s>' "$@"
[ -n "$BASH_VERSION" ] || exit 1
exit 23
# d\xe9j\xe0 vu, and no newline at the end"""


def submitted(bench: Bench, text: bytes) -> Path:
    """Write a batch script where slurmd would."""
    spool = bench.directory / "spool job00012"
    spool.mkdir(exist_ok=True)
    path = spool / "slurm_script"
    path.write_bytes(text)
    path.chmod(0o700)
    return path


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("hostile", HOSTILE)
def test_supervisor_is_started_with_these_words(bench: Bench, shell: str, hostile: str) -> None:
    python = bench.directory / hostile / "python"
    python.parent.mkdir()
    write_executable(
        python, '#!/bin/sh\n[ "$3" = -c ] && exit 0\nfor word; do printf "%s\\0" "$word"; done\n'
    )
    spec = JobSpec(journal=f"/j/{hostile}")
    text = render(PLAIN, python=str(python), spec=spec, name=hostile)
    path = submitted(bench, text)
    code, out, err = bench.finish(bench.start([*shell.split(), str(path), "", hostile, "--x"]))
    words = [os.fsdecode(word) for word in out.split(b"\0")[:-1]]
    line = int(words[6].removeprefix("--script-line="))
    assert (code, err) == (0, b"")
    assert words == [
        "-E",
        "-P",
        "-m",
        "slurm_health",
        "supervise",
        f"--spec={spec.encoded()}",
        f"--script-line={line}",
        f"--script-name={hostile}",
        "--environ-fd=9",
        "--",
        str(path),
        "",
        hostile,
        "--x",
    ]
    assert b"".join(text.splitlines(keepends=True)[line - 1 :]) == PLAIN


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    ("python", "said"), [("missing", b"/missing: "), ("broken", b"ImportError: no such thing")]
)
def test_script_runs_unchecked_where_we_are_not(
    bench: Bench, shell: str, python: str, said: bytes
) -> None:
    broken = "#!/bin/sh\necho Traceback >&2\necho 'ImportError: no such thing' >&2\nexit 1\n"
    write_executable(bench.directory / "broken", broken)
    path = submitted(bench, render(SHOWS_ITSELF, python=str(bench.directory / python)))
    words = ["", "a b", "$(x)"]
    code, out, err = bench.finish(bench.start([*shell.split(), str(path), *words]))
    assert code == 23
    assert out == SHOWS_ITSELF + b"slurm_script\n<><a b><$(x)>"
    assert said in err
    assert b"slurm-health: running the script anyway: UNCHECKED: slurm-health cannot run on " in err
    assert b"; install it at the same path on every node\n" in err
    assert b"Traceback" not in err


@pytest.mark.parametrize("shell", SHELLS)
def test_an_interpreter_that_hangs_holds_nothing_up_and_is_not_left_behind(
    bench: Bench, shell: str
) -> None:
    hangs = f"#!/bin/sh\ntrap '' TERM\necho $$ >{bench.directory}/pid\nsleep 1000\nsleep 1000\n"
    text = render(SHOWS_ITSELF, python=str(write_executable(bench.directory / "hangs", hangs)))
    assert text.count(b"timeout -s KILL 90 ") == 1  # with squeue and scontrol less than two minutes
    path = submitted(bench, text.replace(b"timeout -s KILL 90 ", b"timeout -s KILL 2 "))
    code, _, err = bench.finish(bench.start([*shell.split(), str(path)]))
    assert code == 23
    assert b"running the script anyway: UNCHECKED: slurm-health cannot run on " in err
    assert b": its interpreter did not answer within 90 s; install it" in err
    command = Path("/proc", (bench.directory / "pid").read_text().strip(), "cmdline")
    eventually(lambda: not command.exists() or not command.read_bytes(), "its end")


# Stands for squeue and scontrol: notes what it is called with, and knows one comment, which a
# squeue that is told of some partitions only does not show.
SLURM = """#!/bin/sh
printf '%s|' "${0##*/}" "$@" >>"$LOG"
echo >>"$LOG"
[ "${0##*/}" = scontrol ] || [ -n "$SQUEUE_PARTITION$SQUEUE_USERS" ] || printf '%s\\n' "$COMMENT"
"""


@pytest.mark.parametrize("shell", SHELLS)
@rows
def test_where_we_are_not_the_comment_says_so_and_keeps_the_jobs_own(
    bench: Bench, shell: str, choice: str, comment: str, code: int, note: str
) -> None:
    tools = bench.directory / "tools"
    tools.mkdir()
    for name in ("squeue", "scontrol"):
        write_executable(tools / name, SLURM)
    write_executable(bench.directory / "broken", "#!/bin/sh\necho 'No module \"x=y\"'\nexit 1\n")
    spec = JobSpec(on_unchecked=OnUnchecked(choice))
    script = b"#!/bin/sh\necho ran for $SQUEUE_USERS\n"
    broken = str(bench.directory / "broken")
    path = submitted(bench, render(script, python=broken, spec=spec))
    environ = {
        **bench.environ(),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "COMMENT": comment,
        "SQUEUE_PARTITION": "main",
        "SQUEUE_USERS": "bob",
        "SLURM_JOB_ID": "9",
        "SLURM_ARRAY_JOB_ID": "7",
        "SLURM_ARRAY_TASK_ID": "2",
    }
    ended = bench.finish(bench.start([*shell.split(), str(path)], environ=environ))
    assert ended[:2] == (code, b"ran for bob\n" if code == 0 else b"")
    here = os.uname().nodename
    why = f"slurm-health cannot run on {here}: No module 'x y'"
    why += "; install it at the same path on every node"
    asked, set_to = bench.log.read_text().splitlines()
    assert asked == "squeue|--all|--noheader|--states=all|--jobs=7_2|--format=%k|"
    assert set_to == f"scontrol|update|JobId=7_2|Comment=slurm-health: {note.format(why=why)}|"
    assert (f"(--on-unchecked={choice})".encode() in ended[2]) is (code != 0)


@pytest.mark.root
@pytest.mark.parametrize("shell", SHELLS)
def test_neither_script_nor_environment_is_lost_where_the_temporary_directory_is_full(
    bench: Bench, tmp_path: Path, shell: str
) -> None:
    padded = b"#!/bin/sh\necho ran\n" + b"# padding\n" * 1000
    lists = "[ \"$3\" = -c ] && exit 0\ntr '\\0' '\\n' <&9 | grep -c pad\n"
    python = write_executable(bench.directory / "python", f"#!/bin/sh\n{lists}")
    with full_filesystem(tmp_path / "full") as full:
        environ = {**bench.environ(), "TMPDIR": str(full), "LONG": "pad\n" * 2000}
        for interpreter, said in ((python, b"2000\n"), (bench.directory / "missing", b"ran\n")):
            path = submitted(bench, render(padded, python=str(interpreter)))
            code, out, _ = bench.finish(bench.start([*shell.split(), str(path)], environ=environ))
            assert (code, out) == (0, said)
        assert list(full.iterdir()) == []


@pytest.mark.root
@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize(
    "line", ["#!/bin/sh", "#! /bin/sh -e", "#!\t/usr/bin/env\tsh", "#!/bin/sh -e "]
)
def test_a_script_runs_from_a_temporary_directory_from_which_nothing_can_be_executed(
    bench: Bench, tmp_path: Path, shell: str, line: str
) -> None:
    script = f'{line}\n[ -n "$1" ] && echo "$- <$1><$2>"\nfalse\nexit 5\n'.encode()
    alone = bench.finish(bench.alone(script, "a b", "$(x)"))
    path = submitted(bench, render(script, python=str(bench.directory / "missing")))
    with noexec_filesystem(tmp_path / "noexec") as noexec:
        environ = {**bench.environ(), "TMPDIR": str(noexec)}
        words = [*shell.split(), str(path), "a b", "$(x)"]
        code, out, _ = bench.finish(bench.start(words, environ=environ))
    assert (code, out) == alone[:2]
    assert code == (1 if "-e" in line else 5)


@pytest.mark.parametrize("shell", SHELLS)
def test_script_gets_its_own_environment_through_any_shell(bench: Bench, shell: str) -> None:
    """A shell in between drops exported functions, or adds PWD, SHLVL and _."""
    python = write_executable(
        bench.directory / "python",
        f'#!/bin/sh\n[ "$3" = -c ] && exit 0\nshift 4\nexec {sys.executable} -P {MAIN} "$@"\n',
    )
    dump = f"#!{sys.executable} -S\nprint(open('/proc/self/environ', 'rb').read())\n".encode()
    spec = JobSpec(python=str(bench.directory / "master"))
    path = submitted(bench, render(dump, python=str(python), spec=spec))
    environ = bench.environ() | {"BASH_FUNC_module%%": "() {  :\n}", "x.y": "1", "B": "\udcff"}
    alone = bench.finish(bench.alone(dump, environ=environ))
    ours = bench.finish(bench.start([*shell.split(), str(path)], environ=environ))
    assert ours == alone
    assert b"BASH_FUNC_module%%" in ours[1]


def options_sbatch_reads(text: bytes) -> list[bytes]:
    """Return the #SBATCH lines: sbatch stops at the first line that is no comment."""
    found = []
    for line in text.split(b"\n"):
        if line.strip() and not line.lstrip().startswith(b"#"):
            break
        if line.startswith(b"#SBATCH"):
            found.append(line)
    return found


@pytest.mark.parametrize(
    "script",
    [
        PLAIN,
        FOREIGN,
        LATIN_1,
        b"#!/bin/sh\n#SBATCH -N2",
        b"#!/bin/sh\n \t\n#SBATCH -N2\n\x0b\n#SBATCH -n4\nx\n#SBATCH -n8\n",
    ],
)
def test_sbatch_reads_the_same_options_once(script: bytes) -> None:
    assert options_sbatch_reads(render(script)) == options_sbatch_reads(script)
