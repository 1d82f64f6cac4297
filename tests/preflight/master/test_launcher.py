# SPDX-License-Identifier: Apache-2.0
"""What is understood of srun's words, recorded from a real one, and agents as local processes."""

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from slurm_health.preflight.master.launcher import (
    JOB_END_S,
    Launcher,
    LocalLauncher,
    ReadGres,
    SlurmLauncher,
)
from slurm_health.records.errors import SlurmCommandMissing, SlurmError
from slurm_health.records.records import AgentsLost, LossCause
from slurm_health.system.slurm.job_gres import NodeGres, Share
from tests.support.rows import rows
from tests.support.supervised import eventually, write_executable

DATA = Path(__file__).parents[2] / "data" / "slurm-22.05"
NODES = ("n1", "n2")


def agent_command(launch: int, node: str | None) -> list[str]:
    return ["agent", f"--launch={launch}", *([f"--node={node}"] if node else [])]


class Srun:
    """A directory with an srun that says what it is told to, and launchers that use it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.launchers: list[Launcher] = []

    def launcher(self, script: str, read_gres: ReadGres = dict) -> SlurmLauncher:
        write_executable(self.directory / "srun", f"#!/bin/sh\n{script}\n")
        path = f"{self.directory}:{os.environ['PATH']}"
        environ = {"PATH": path, "SLURM_NTASKS": "9", "SLURM_GPUS": "16"}
        launcher = SlurmLauncher(12, agent_command, environ, read_gres)
        self.launchers.append(launcher)
        return launcher

    def says(self, words: str, *, stays: bool) -> SlurmLauncher:
        end = "exec sleep 100" if stays else "exit 1"
        says = f"cat {shlex.quote(str(DATA / words))}"
        if not words.endswith(".txt"):
            says = f"printf {shlex.quote(words)}; echo"
        return self.launcher(f"({says}) >&2; {end}")


@pytest.fixture
def srun(tmp_path: Path) -> Iterator[Srun]:
    srun = Srun(tmp_path)
    yield srun
    for launcher in srun.launchers:
        launcher.stop(0.0)


def losses(launcher: Launcher, nodes: Sequence[str], launch: int = 0) -> dict[str, AgentsLost]:
    """Poll until each of these nodes is said to be lost; return the first word on each."""
    found: dict[str, AgentsLost] = {}

    def all_lost() -> bool:
        for lost in launcher.poll():
            assert lost.launch == launch
            for node in lost.nodes:
                assert node not in found, f"{node} is lost twice"
                found[node] = lost
        return set(nodes) <= set(found)

    eventually(all_lost, f"the loss of {nodes}")
    return found


def test_srun_is_started_with_a_command_that_leaves_nothing_to_the_surrounding_job(
    srun: Srun, tmp_path: Path
) -> None:
    launcher = srun.launcher(f'echo "$@" > {tmp_path}/said; env >> {tmp_path}/said')

    launcher.start(3, NODES)
    losses(launcher, NODES, launch=3)

    command, *variables = (tmp_path / "said").read_text().splitlines()
    words = command.split()
    assert words[-3:] == ["agent", "--launch=3", "--gpus=0"]
    assert {*Share(nodes=NODES).options} <= {*words}
    steps = "--jobid=12 --nodelist=n[1-2] --nodes=2 --ntasks=2 --ntasks-per-node=1 --overlap"
    assert {*steps.split(), "--mem=0", "--kill-on-bad-exit=0", "--no-kill"} <= {*words}
    assert not [each for each in variables if each.startswith(("SLURM_NTASKS", "SLURM_GPUS"))]


def test_nodes_that_differ_in_their_gpus_have_a_step_each_and_are_lost_as_one_launch(
    srun: Srun, tmp_path: Path
) -> None:
    gres = {"n1": NodeGres(gpus=4, request="4"), "n2": NodeGres(gpus=1, request="1")}
    launcher = srun.launcher(f'echo "$@" >> {tmp_path}/said', lambda: gres)

    launcher.start(0, NODES)
    losses(launcher, NODES)

    said = sorted((tmp_path / "said").read_text().splitlines())
    assert len(said) == 2
    for node, count, line in (("n1", 4, said[0]), ("n2", 1, said[1])):
        assert {f"--nodelist={node}", f"--gpus={count}", "--ntasks=1"} <= set(line.split())
        assert line.endswith(f"--gpus={count}")  # the agent is told, too


def test_where_slurm_does_not_say_what_the_job_has_the_agents_are_started_all_the_same(
    srun: Srun, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def unanswered() -> dict[str, NodeGres]:
        asked.append(1)
        raise SlurmError("no answer")

    launcher = srun.launcher("exit 0", unanswered)
    launcher.start(0, NODES)
    launcher.start(1, NODES)

    assert len(asked) == 1
    assert "agents may miss GPUs, those of the job are unknown" in caplog.text


def test_without_srun_there_is_an_error_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(SlurmCommandMissing, match="srun not found"):
        SlurmLauncher(12, agent_command, {"PATH": str(tmp_path)}, dict)


@rows
def test_why_there_is_no_agent_decides_whether_another_may_be_started(
    srun: Srun, words: str, stays: bool, lost: dict[str, str]
) -> None:
    """`words` are a file of `tests/data`, or what srun says."""
    launcher = srun.says(words, stays=stays)

    launcher.start(0, NODES)

    found = losses(launcher, [*lost])
    assert found.keys() == lost.keys()
    for node, why in lost.items():
        cause, _, reason = why.partition(" ")
        assert (found[node].cause.value, reason in found[node].reason) == (cause, True), node
    assert not stays or launcher.poll() == []


def test_an_agent_that_ends_by_sigterm_is_lost_only_once_the_job_has_not_ended_with_it(
    srun: Srun,
) -> None:
    line = "srun: error: n2: task 1: Terminated"
    launcher = srun.launcher(f"echo '{line}' >&2; exec sleep 100")
    began_s = time.monotonic()

    launcher.start(0, NODES)

    lost = losses(launcher, ["n2"])
    assert time.monotonic() - began_s >= JOB_END_S
    assert lost["n2"].reason == "its agent ended: Terminated"
    assert launcher.poll() == []


def test_thousands_of_agents_that_end_with_the_launch_of_three_are_lost_in_few_records(
    srun: Srun, tmp_path: Path
) -> None:
    nodes = [f"n{number}" for number in range(1, 4097)]
    unreached, killed = nodes[6:9], [*nodes[:6], *nodes[9:]]
    words = [
        f"srun: error: Task launch for StepId=1.0 failed on node {node}: Communication connection"
        " failure"
        for node in unreached
    ]
    words += [f"srun: error: {node}: task {node[1:]}: Killed" for node in killed]
    (tmp_path / "words").write_text("\n".join(words) + "\n")
    launcher = srun.launcher(f"cat {tmp_path}/words >&2; exit 1")
    launcher.start(0, nodes)

    polls: list[list[AgentsLost]] = []

    def all_lost() -> bool:
        polls.append(launcher.poll())
        return sum(len(lost.nodes) for each in polls for lost in each) == len(nodes)

    eventually(all_lost, "the loss of all")

    assert all(len(lost) <= 2 for lost in polls)
    found = {node: lost for each in polls for lost in each for node in lost.nodes}
    assert [node for node in nodes if found[node].cause is LossCause.NOT_STARTED] == unreached
    assert {found[node].cause for node in killed} == {LossCause.ENDED}


def test_an_srun_that_does_not_leave_is_ended_and_its_agents_are_named(
    srun: Srun, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = srun.launcher("trap '' TERM; while :; do sleep 0.1; done")
    launcher.start(0, NODES)

    launcher.stop(0.1)

    assert launcher.poll() == []
    assert "killed agents that did not leave within 0.1 s: n[1-2]" in caplog.text


@pytest.mark.heavy
def test_agents_that_take_their_time_to_free_their_devices_are_waited_for(
    srun: Srun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leaves = f"sleep 5 & wait $!; echo left >> {tmp_path}/said; exit"
    launcher = srun.launcher(f"trap 'echo killed >> {tmp_path}/said; exit' TERM; {leaves}")
    launcher.start(0, NODES)

    launcher.stop()

    assert (tmp_path / "said").read_text() == "left\n"
    assert caplog.text == ""


Start = Callable[..., LocalLauncher]


@pytest.fixture
def local() -> Iterator[Start]:
    launchers: list[LocalLauncher] = []

    def launcher(script: str, **environ: str) -> LocalLauncher:
        def command(launch: int, node: str | None) -> list[str]:
            return [sys.executable, "-c", script, str(launch), str(node)]

        launchers.append(LocalLauncher(command, {**os.environ, **environ}, NODES))
        return launchers[-1]

    yield launcher
    for each in launchers:
        each.stop(0.0)


_NOTES_ITS_SHARE = """
import os, sys
names = ("SLURM_CPUS_ON_NODE", "SLURM_LAUNCH_NODE_IPADDR", "CUDA_VISIBLE_DEVICES")
with open(f"{os.environ['NOTES']}/{sys.argv[2]}.{sys.argv[1]}", "w") as file:
    file.write(" ".join(os.environ[name] for name in names))
"""


def test_a_local_agent_is_told_its_share_of_the_machine_and_keeps_it_when_started_again(
    local: Start, tmp_path: Path
) -> None:
    devices = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c,GPU-d,GPU-e"}
    launcher = local(_NOTES_ITS_SHARE, NOTES=str(tmp_path), **devices)

    launcher.start(0, NODES)
    losses(launcher, NODES)
    launcher.start(1, ["n2"])
    losses(launcher, ["n2"], launch=1)

    cpus = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "n1.0": f"{cpus} 127.0.0.1 GPU-a,GPU-b",
        "n2.0": f"{cpus} 127.0.0.1 GPU-c,GPU-d",
        "n2.1": f"{cpus} 127.0.0.1 GPU-c,GPU-d",
    }


@rows
def test_a_local_agent_that_ends_is_lost_with_its_last_words(
    local: Start, end: int | str, cause: LossCause, reason: str
) -> None:
    launcher = local(f"import sys; print('first\\nlast', file=sys.stderr); sys.exit({end!r})")

    launcher.start(0, ["n1"])

    lost = losses(launcher, ["n1"])["n1"]
    assert (lost.cause, lost.reason) == (cause, reason)


def test_an_agent_that_prints_without_end_holds_nobody_up(local: Start) -> None:
    launcher = local("import os\nwhile True: os.write(1, b'y' * 4096)")
    launcher.start(0, ["n1"])
    for _ in range(3):
        assert launcher.wait(0.5, 0.2) == []
    assert launcher.poll() == []


def test_agents_that_print_much_as_they_leave_are_not_killed(
    local: Start, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = local("import os\nfor _ in range(600): os.write(1, b'y' * 4096)")
    launcher.start(0, ["n1"])
    launcher.stop(20.0)
    assert caplog.text == ""
