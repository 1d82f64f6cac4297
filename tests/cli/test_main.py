# SPDX-License-Identifier: Apache-2.0
"""The command line as its users meet it: real processes, no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from pathlib import Path

import click
import pytest

from slurm_health import __version__
from slurm_health.cli.main import SHORT_HELP, commands
from slurm_health.preflight.supervisor.check_process import BEAT_S, SILENCE_S
from tests.support.command_line import COMMAND, finish, slurm_health, start
from tests.support.journals import write_healthy_run, write_requeued_job
from tests.support.supervised import descendants, eventually

FAKE_WORKER = str(Path(__file__).parents[1] / "support" / "fake_worker.py")
# Those whose words are another program's too have a help of their own.
PASS_ON = {"sbatch", "run"}
CONTEXT = click.Context(commands)
COMMANDS = {
    name: command
    for name in commands.list_commands(CONTEXT)
    if (command := commands.get_command(CONTEXT, name))
}
VISIBLE = [name for name, command in COMMANDS.items() if not command.hidden]
OUR_OWN = [name for name in VISIBLE if name not in PASS_ON]


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "workers"
    directory.mkdir()
    monkeypatch.setenv("FAKE_WORKER_DIR", str(directory))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return directory


def one_line(text: str) -> str:
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


def test_the_help_of_all_says_of_each_command_what_its_own_does() -> None:
    own = {
        name: "" if command.hidden else command.get_short_help_str(200)
        for name, command in COMMANDS.items()
    }
    assert own == SHORT_HELP


def test_the_help_of_all_loads_no_command() -> None:
    code = (
        "import sys; from slurm_health.cli.main import commands\n"
        "commands.main(['--help'], prog_name='slurm-health', standalone_mode=False)\n"
        "print(*sorted(name for name in sys.modules if name.startswith('slurm_health')))"
    )
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)

    loaded = set(done.stdout.splitlines()[-1].split())
    expected = ("aliases", "cli", "cli.main", "records", "records.errors")
    assert loaded == {"slurm_health", *(f"slurm_health.{name}" for name in expected)}


# --- help and mistakes -------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_the_help_names_every_command_in_a_whole_line(word: str) -> None:
    done = slurm_health(word)

    assert done.code == 0
    assert done.stderr == ""
    for name in VISIBLE:
        (line,) = [x for x in done.stdout.splitlines() if x.startswith(f"  {name} ")]
        assert not line.endswith("..."), line
    assert "Exit codes:" in done.stdout


def test_the_help_hides_what_only_slurm_health_itself_calls() -> None:
    hidden = {name for name, command in COMMANDS.items() if command.hidden}

    assert not hidden & set(slurm_health("--help").stdout.split())


@pytest.mark.parametrize("name", OUR_OWN)
def test_the_help_of_a_command_names_and_explains_each_of_its_options(name: str) -> None:
    done = slurm_health(name, "--help")

    assert done.code == 0
    assert done.stderr == ""
    assert max(len(line) for line in done.stdout.splitlines()) <= 100
    for parameter in COMMANDS[name].params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, parameter.name
            assert parameter.help.rstrip().endswith((".", "]")), parameter.help
            assert all(option in done.stdout for option in parameter.opts)


def test_the_version_is_the_packages() -> None:
    assert slurm_health("--version").stdout == f"slurm-health {__version__}\n"


def test_without_any_word_the_help_is_shown_and_the_code_says_that_nothing_was_done() -> None:
    done = slurm_health()

    assert done.code == 2
    assert "Usage: slurm-health" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chek"], "check"),
        (["check", "--jurnal", "x"], "--journal"),
        (["report", "12", "--jsn"], "--json"),
        (["report", "--csv"], "JOBID"),
        (["report", "12", "--csv", "--json"], "choose one"),
        (["report", "12", "--json", "--verbose"], "--raw"),
        (["report", "--last", "0"], "--last"),
        (["check", "--local", "two"], "--local"),
        (["check", "--local", "0"], "--local"),
        (["check", "--on-straggler", "shoot"], "exclude"),
        (["check", "--network-floor", "8%"], "0.08 for 8 %"),
        (["check", "--min-round", "3"], "--min-rounds"),
        (["check", "--local", "2", "--act"], "--local"),
        (["report", "12", "--raw"], "--json"),
        (["check", "surplus"], "surplus"),
        (["report", "--last", "x"], "'x' is not a whole number. (see slurm-health report --help)"),
        (["report", "--last", "0"], "0 must be at least 1."),
        (["check", "--local", "99"], "99 must be at least 1 and at most 64."),
        (["sweep", "--share", "0"], "must be above 0 and at most 0.5."),
    ],
)
def test_a_mistake_is_one_line_that_names_it_or_what_was_meant(words: list[str], said: str) -> None:
    done = slurm_health(*words)

    assert done.code == 2
    assert done.stdout == ""
    line = one_line(done.stderr)
    assert line.startswith("slurm-health: ")
    assert said in line
    assert "--help" in line


# --- report ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("slurm-health rep", ["plain,report"]),
        ("slurm-health report --j", ["plain,--journal", "plain,--json"]),
        ("slurm-health sbatch --spar", ["plain,--spares"]),
        ("slurm-health sbatch train", ["file,train"]),
        ("slurm-health run --network-c", ["plain,--network-check"]),
    ],
)
def test_a_shell_completes_commands_options_and_files(line: str, completed: list[str]) -> None:
    words = line.split()
    asked = {"_SLURM_HEALTH_COMPLETE": "bash_complete"}
    asked |= {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    # By its own name: that of the variable follows from it.
    script = [sys.executable, "-c", "from slurm_health.cli.main import main; main()"]
    ran = subprocess.run(
        script, env={**os.environ, **asked}, capture_output=True, text=True, check=True, timeout=60
    )
    assert ran.stdout.split() == completed


def test_a_report_of_an_unknown_job_says_where_it_looked_and_what_to_do(tmp_path: Path) -> None:
    done = slurm_health("report", "4711", f"--journal={tmp_path}")

    assert (done.code, done.stdout) == (4, "")
    line = one_line(done.stderr)
    assert f"no journal of job 4711 under {tmp_path}" in line
    assert "slurm-health sbatch" in line
    assert "--journal DIR" in line


def test_a_report_of_something_that_is_no_job_is_no_traceback(tmp_path: Path) -> None:
    for word in ("..", "a/b", "", "12_", "\udcff"):
        assert slurm_health("report", f"--journal={tmp_path}", "--", word).code in {2, 4}


def test_a_report_of_an_array_lists_its_tasks(tmp_path: Path) -> None:
    for job, task in ((13, 1), (14, 2)):
        write_healthy_run(tmp_path, job=job, array=f"12_{task}")
    done = slurm_health("report", "12", f"--journal={tmp_path}")
    assert done.code == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[:2]] == ["12_1", "12_2"]
    whole = slurm_health("report", "12_[2-9]", "--json", f"--journal={tmp_path}")
    assert [task["job"] for task in json.loads(whole.stdout)["tasks"]] == ["12_2"]


def test_without_a_job_the_latest_ones_are_listed(tmp_path: Path) -> None:
    write_healthy_run(tmp_path, job=13)
    environ = {"PATH": "/nonexistent"}

    listed = slurm_health("report", f"--journal={tmp_path}", environ=environ)
    exported = slurm_health("report", "--json", f"--journal={tmp_path}", environ=environ)

    assert (listed.code, listed.stderr) == (0, "")
    assert listed.stdout.splitlines()[1].startswith("13")
    assert [job["job"] for job in json.loads(exported.stdout)["jobs"]] == ["13"]


def test_a_report_is_a_line_of_csv_for_each_node_and_round(tmp_path: Path) -> None:
    write_healthy_run(tmp_path, job=13, array="12_3")

    done = slurm_health("report", "12", "--csv", f"--journal={tmp_path}")

    assert done.code == 0
    assert len(done.stdout.splitlines()) == 1 + 2 * 4


def on_a_terminal(words: list[str], environ: Mapping[str, str], columns: int = 60) -> str:
    """Return what a command shows on a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        [*COMMAND, *words], env={**os.environ, **environ}, stdout=theirs, stderr=subprocess.PIPE
    ) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # how the end of the other side is told
            while piece := os.read(ours, 65536):
                shown += piece
        assert process.wait(60) == 0
    os.close(ours)
    return shown.decode("utf-8").replace("\r\n", "\n")


TERMINAL = {"TERM": "xterm", "NO_COLOR": "", "LC_ALL": "C.UTF-8", "COLUMNS": ""}


def test_a_terminal_gets_colours_and_its_width_is_kept_to(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)
    shown = on_a_terminal(["report", "12", f"--journal={tmp_path}"], TERMINAL)

    assert "\x1b[1;31mfaulty\x1b[0m" in shown
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, plain.splitlines())) <= 60


@pytest.mark.parametrize("environ", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": ""}])
def test_there_is_no_colour_where_nobody_wants_it(
    tmp_path: Path, environ: Mapping[str, str]
) -> None:
    write_requeued_job(tmp_path)
    words = ["report", "12", f"--journal={tmp_path}"]

    assert "\x1b" not in on_a_terminal(words, {**TERMINAL, **environ})
    assert "\x1b" not in slurm_health(*words, environ=TERMINAL).stdout


def test_a_terminal_without_utf_8_gets_ascii(tmp_path: Path) -> None:
    write_requeued_job(tmp_path)
    environ = {**TERMINAL, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}

    assert on_a_terminal(["report", "12", f"--journal={tmp_path}"], environ).isascii()


def test_a_report_needs_no_place_to_write(tmp_path: Path) -> None:
    """As on a login node whose homes are mounted read-only."""
    home = tmp_path / "home"
    write_healthy_run(home / ".slurm-health" / "journal")
    before = sorted(home.rglob("*"))
    for path in (home, *home.rglob("*")):
        path.chmod(path.stat().st_mode & ~0o222)

    environ = {"HOME": str(home), "SLURM_HEALTH_JOURNAL": "", "TMPDIR": "/nonexistent"}
    done = slurm_health("report", "12", environ=environ)

    assert (done.code, "all healthy" in done.stdout) == (0, True), done
    assert sorted(home.rglob("*")) == before


def test_a_report_is_a_table_or_json(tmp_path: Path) -> None:
    write_requeued_job(tmp_path, job=12)

    table = slurm_health("report", "12", f"--journal={tmp_path}")
    exported = slurm_health("report", "12", "--json", f"--journal={tmp_path}")

    assert (table.code, exported.code) == (0, 0)
    assert "n3" in table.stdout
    assert json.loads(exported.stdout)


@pytest.mark.parametrize(
    "words",
    [
        ["report"],
        ["report", "12"],
        ["report", "12", "--json"],
        ["report", "12", "--csv"],
        ["report", "12", "--verbose"],
    ],
)
def test_a_reader_that_has_had_enough_changes_nothing(tmp_path: Path, words: list[str]) -> None:
    write_healthy_run(tmp_path, job=12)
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [*COMMAND, *words, f"--journal={tmp_path}"],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )

    assert (done.returncode, done.stderr) == (0, b"")


def test_a_site_file_with_a_mistake_is_a_usage_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('jornal = "/x"\n')

    done = slurm_health(
        "report", "12", environ={"SLURM_HEALTH_CONFIG": str(tmp_path / "config.toml")}
    )

    assert done.code == 2
    assert "did you mean journal?" in one_line(done.stderr)


# --- check -------------------------------------------------------------------------------------


def local(tmp_path: Path, *words: str) -> list[str]:
    return ["check", "--local=3", f"--python={FAKE_WORKER}", f"--journal={tmp_path}/j", *words]


def test_a_check_outside_a_job_says_what_to_do_instead(tmp_path: Path) -> None:
    done = slurm_health("check", f"--journal={tmp_path}")

    assert (done.code, done.stdout) == (4, "")
    line = one_line(done.stderr)
    assert "salloc or sbatch" in line
    assert "--local" in line


def test_a_check_of_one_machine_prints_its_nodes_and_leaves_with_their_verdict(
    tmp_path: Path, workers: Path
) -> None:
    done = slurm_health(*local(tmp_path))

    assert done.code == 0
    assert "local[0-2]" in done.stdout
    assert "healthy" in done.stdout
    assert workers.is_dir()


def test_a_bad_node_is_exit_code_1_whoever_reads_the_output(tmp_path: Path, workers: Path) -> None:
    (workers / "local1").write_text("raises")
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        done = subprocess.run(
            [*COMMAND, *local(tmp_path)],
            stdout=closed,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )

    assert done.returncode == 1
    assert b"Traceback" not in done.stderr


def test_json_of_a_check_is_json_and_its_logs_go_elsewhere(tmp_path: Path, workers: Path) -> None:
    (workers / "local2").write_text("broken-torch")

    done = slurm_health(*local(tmp_path, "--json"))

    assert done.code == 3
    verdicts = {node["node"]: node["level"] for node in json.loads(done.stdout)["nodes"]}
    assert verdicts == {"local0": "healthy", "local1": "healthy", "local2": "inconclusive"}
    assert done.stderr != ""


@pytest.mark.parametrize(
    ("words", "site", "pairs"),
    [([], "", 1), (["--min-rounds=4"], "", 4), ([], "3", 3), (["--min-rounds=4"], "3", 4)],
    ids=["nobody", "option", "site", "option before site"],
)
def test_a_check_takes_as_many_rounds_as_it_is_told(
    tmp_path: Path, workers: Path, words: list[str], site: str, pairs: int
) -> None:
    file = tmp_path / "config.toml"
    file.write_text(f"[localize]\nmin_rounds = {site}\n" if site else "")

    done = slurm_health(
        *local(tmp_path, "--local=2", "--check=allgather", "--json", *words),
        environ={"SLURM_HEALTH_CONFIG": str(file)},
    )

    assert done.code == 0
    assert json.loads(done.stdout)["rounds"] == pairs


def test_nodes_that_are_all_slow_are_found_by_what_hardware_should_take_above_the_floor(
    tmp_path: Path, workers: Path
) -> None:
    known = local(tmp_path, "--local=2", "--check=quick", "--expected-ms=matmul=1", "--json")

    found = [slurm_health(*known, f"--compute-floor={floor}") for floor in ("0.1", "3")]

    levels = [{node["level"] for node in json.loads(done.stdout)["nodes"]} for done in found]
    assert levels == [{"slow"}, {"healthy"}]


def test_an_interpreter_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    done = slurm_health("check", "--local=2", "--python=nothing-here", f"--journal={tmp_path}")

    assert (done.code, done.stdout) == (2, "")
    assert "nothing-here: no such executable" in one_line(done.stderr)


def test_a_journal_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    nowhere = [f"--python={FAKE_WORKER}", "--journal=/proc/nowhere"]

    done = slurm_health("check", "--local=2", *nowhere)

    assert (done.code, done.stdout) == (4, "")
    assert "--journal DIR" in one_line(done.stderr)


def test_a_file_in_the_place_of_the_journal_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "j").touch()

    done = slurm_health(*local(tmp_path))

    assert (done.code, done.stdout) == (4, "")
    assert f"{tmp_path}/j" in one_line(done.stderr)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGINT, "interrupted (Ctrl-C, SIGINT) before"),
        (signal.SIGTERM, "stopped by SIGTERM before"),
    ],
)
def test_a_check_that_is_interrupted_leaves_no_process_behind(
    tmp_path: Path, workers: Path, number: int, words: str
) -> None:
    for node in ("local0", "local1", "local2"):
        (workers / node).write_text("deaf")
    process = start(*local(tmp_path))
    eventually(lambda: len(descendants(process.pid)) == 6, "three agents with their workers")
    below = descendants(process.pid)

    os.killpg(process.pid, number)

    done = finish(process)
    # By the signal itself where it came while a dataclass was made: Python remembers an interrupt
    # of exec(). A shell shows both as the same.
    assert done.code in (128 + number, -number)
    assert "Traceback" not in done.stderr
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "their end")
    (job,) = (tmp_path / "j" / "local").iterdir()
    said = slurm_health("report", "--journal", str(tmp_path / "j"), job.name).stdout
    # Before the first round or in one: that depends on how soon all processes were seen.
    assert words in said


def test_a_signal_that_comes_when_a_check_has_ended_changes_nothing(tmp_path: Path) -> None:
    """As Slurm sends it to every process of a job that is requeued."""
    code = (
        "import atexit, os, signal, sys\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGTERM)\n"
        "from slurm_health.cli.main import main\n"
        f"sys.argv = ['slurm-health', 'check', '--journal={tmp_path}']\n"
        "main()\n"
    )

    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stdout) == (4, "")
    one_line(done.stderr)


def test_a_second_signal_does_not_stop_a_check_from_ending_its_agents(
    tmp_path: Path, workers: Path
) -> None:
    (workers / "local0").write_text("deaf")
    process = start("check", "--local=1", f"--python={FAKE_WORKER}", f"--journal={tmp_path}/j")
    eventually(lambda: len(descendants(process.pid)) == 2, "an agent with its worker")
    below = descendants(process.pid)

    process.send_signal(signal.SIGTERM)
    while process.poll() is None:  # all the time that it ends
        process.send_signal(signal.SIGTERM)

    done = finish(process)
    assert (done.code, "Exception" in done.stderr) == (128 + signal.SIGTERM, False)
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), "their end")


def test_for_the_supervisor_everything_ends_in_one_line_of_json(tmp_path: Path) -> None:
    done = slurm_health("check", "--for-supervisor", "r", f"--journal={tmp_path}")

    answer: Mapping[str, object] = json.loads(one_line(done.stdout))
    assert answer["disposition"] == "proceed"
    assert answer["exit_code"] == done.code == 4
    assert str(answer["reason"]).startswith("UNCHECKED: SLURM_JOB_ID")


def test_a_check_that_takes_long_lets_its_supervisor_know_that_it_gets_on(tmp_path: Path) -> None:
    (tmp_path / "local0").write_text("never-ready")
    words = ("check", "--local=1", "--for-supervisor=r", f"--journal={tmp_path}/j")
    environ = {"FAKE_WORKER_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    process = start(*words, f"--python={FAKE_WORKER}", environ=environ)
    assert process.stdout is not None
    began_s = time.monotonic()
    said = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert (said, done.code) == ("\n", 128 + signal.SIGTERM), done.stderr
    assert BEAT_S / 2 < time.monotonic() - began_s < SILENCE_S / 3


def test_the_help_of_all_is_grouped_by_who_needs_it() -> None:
    told = slurm_health("--help").stdout
    titles = ["For a job:", "To look at what happened:", "For administrators:", "Other commands:"]

    places = [told.index(title) for title in titles]
    assert places == sorted(places)
    assert places[0] < told.index("  sbatch") < places[1] < told.index("  report") < places[2]
    assert all(f"\n  {name} " in told for name in VISIBLE)


def test_an_option_without_its_value_is_told_what_that_would_be() -> None:
    done = slurm_health("report", "12", "--html")

    assert done.code == 2
    assert "--html FILE. Write the report as one page of HTML" in one_line(done.stderr)


def test_an_option_behind_the_word_that_it_goes_before_is_told_its_place() -> None:
    done = slurm_health("nodes", "release", "n1", "--config", "/x")
    unknown = slurm_health("nodes", "release", "n1", "--confg", "/x")

    told = "--config goes before release: slurm-health nodes --config FILE release"
    assert (done.code, told in one_line(done.stderr)) == (2, True), done
    assert "No such option '--confg'" in one_line(unknown.stderr)
