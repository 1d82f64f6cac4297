# SPDX-License-Identifier: Apache-2.0
"""Failures as users report them in public threads, each with what is known to be true of it.

The truth was established by the people in the threads. A node that is named wrongly, or a job that
is started again in vain, is worse than an honest doubt: where the truth allows a doubt, the table
does too.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurm_health.records.errors import UsageError
from slurm_health.training.monitor.explain import explain

CASES = Path(__file__).parents[1] / "data/cases"


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What is right for a case: any of the causes and blames, exactly these nodes and ranks."""

    causes: set[str]
    blames: set[str]
    accused: tuple[str, ...] = ()
    ranks: tuple[int, ...] | None = None
    never: tuple[str, ...] = ("leave",)  # actions that would harm
    nodes: tuple[str, ...] = ()


WAITED = {"collective-timed-out", "never-entered", "rank-out-of-step"}
TRUTHS: dict[str, Truth] = {
    # A subnet manager restarted: the events say nothing of an adapter.
    "02-ib-event-harmless/out.txt": Truth(causes=WAITED, blames={"undecided", "user"}),
    # Rank 0 ran out of data.
    "03-uneven-iterable/out.txt": Truth(causes=WAITED, blames={"undecided", "user"}),
    # Rank 7 never joined work 183, by a bug of the library.
    "04-desync-snapshot/out.txt": Truth(causes=WAITED, blames={"undecided"}, ranks=(7,)),
    # Ranks 12 and 13 are ahead, and named only because they are the fewer.
    "05-ras-who-is-behind/ras.txt": Truth(causes={"no-progress"}, blames={"undecided"}, ranks=()),
    # munge on one node does not agree with the others.
    "06-invalid-job-credential/out.txt": Truth(
        causes={"launch-refused"},
        blames={"node"},
        accused=("n-c122",),
        nodes=("n-c72", "n-c122"),
        never=("restart", "stop"),
    ),
    # The clocks differ: the node that is named need not be the wrong one.
    "07-job-credential-expired/out.txt": Truth(
        causes={"clocks-differ"},
        blames={"undecided", "outside"},
        nodes=("compute-0-0", "compute-0-1"),
        never=("leave", "restart"),
    ),
    # MASTER_ADDR names the host from which the job was submitted.
    "08-master-is-the-login-node/out.txt": Truth(
        causes={"wrong-master-address"},
        blames={"user"},
        nodes=("compute-1", "compute-2"),
        never=("leave", "restart", "check"),
    ),
    # The framework cut the node list wrongly.
    "10-node-list-cut-wrong/out.txt": Truth(
        causes={"same-error-everywhere"},
        blames={"user"},
        nodes=("jz-ia810", "jz-ia811"),
        never=("leave", "restart", "check"),
    ),
    # Another job has the port.
    "11-port-of-another-job/out.txt": Truth(
        causes={"port-in-use"}, blames={"transient", "user"}, nodes=("gra1", "gra2")
    ),
    # The job requeued itself before its time limit.
    "12-requeued-by-itself/out.txt": Truth(
        causes={"requeued"}, blames={"outside"}, nodes=("gpu7",), never=("leave", "restart")
    ),
    # A race of the launcher on a shared filesystem, after all ranks had finished.
    "13-launcher-barrier-removed/out.txt": Truth(
        causes={"program-error"},
        blames={"user"},
        nodes=tuple(f"node-{number}" for number in range(12)),
    ),
    # One GPU of a rack failed; all others report what it did to their links.
    "14-xid-of-a-neighbour": Truth(
        causes={"gpu-broken"}, blames={"node"}, accused=("culprit",), never=("restart", "stop")
    ),
    "14-xid-of-a-neighbour/neighbour_fatal.txt": Truth(
        causes={"script-failed"}, blames={"undecided"}
    ),
    "14-xid-of-a-neighbour/neighbour_nonfatal.txt": Truth(
        causes={"script-failed"}, blames={"undecided"}
    ),
    # One GPU is unusable until it is reset, without any Xid.
    "15-reset-required-without-xid/kernel.txt": Truth(
        causes={"gpu-broken"},
        blames={"node"},
        accused=("n1",),
        nodes=("n1",),
        never=("restart", "stop"),
    ),
    "15-reset-required-without-xid/out.txt": Truth(
        causes={"no-gpu"}, blames={"undecided"}, never=("leave", "stop")
    ),
    # Rank 0 raised an exception of the program; rank 1 only waited for it.
    "16-local-error-behind-a-hang/out.txt": Truth(
        causes={"program-error"}, blames={"user"}, ranks=(0,)
    ),
    # Memory was used up while a checkpoint was written.
    "17-oom-at-the-checkpoint": Truth(causes={"killed-for-memory"}, blames={"user"}),
    # The launcher passes a child's SIGKILL on as -9.
    "25-deepspeed-minus-nine/out.txt": Truth(causes={"killed"}, blames={"undecided", "user"}),
    # Some servers of the filesystem are full.
    "26-one-server-of-a-filesystem-full/out.txt": Truth(
        causes={"disk-full"},
        blames={"user", "outside"},
        ranks=(1, 3, 6),
        never=("leave", "restart", "check"),
    ),
    "28-step-out-of-time/out.txt": Truth(
        causes={"ended-from-outside"}, blames={"outside"}, never=("leave", "restart", "check")
    ),
    # A process that another user left has most of the GPU's memory.
    "32-left-by-another-job-on-the-gpu/out.txt": Truth(
        causes={"gpu-occupied"}, blames={"undecided", "node"}, never=("restart", "stop")
    ),
    # A program's stack overflow: "hardware" is the name of the stack.
    "33-hardware-stack-error/out.txt": Truth(
        causes={"illegal-access"}, blames={"undecided", "user"}, nodes=("n1", "n2")
    ),
}


@pytest.mark.parametrize("case", TRUTHS)
def test_a_reported_failure_is_explained_by_its_truth(case: str) -> None:
    truth = TRUTHS[case]

    _, found = explain([CASES / case], nodes=truth.nodes)

    assert found.cause in truth.causes, found
    assert found.blame in truth.blames, found
    assert tuple(found.accused) == truth.accused, found
    assert truth.ranks is None or tuple(found.ranks) == truth.ranks, found
    assert found.action not in truth.never, found


def test_lines_of_a_subnet_manager_change_nothing(tmp_path: Path) -> None:
    lines = (CASES / "02-ib-event-harmless/out.txt").read_text().splitlines(keepends=True)
    without = [line for line in lines if "NET/IB" not in line]
    path = tmp_path / "out.txt"
    path.write_text("".join(without))

    assert explain([path])[1] == explain([CASES / "02-ib-event-harmless/out.txt"])[1]


# What srun --kill-on-bad-exit=1 left of the output of a script whose rank 1 on n2 raised.
CUT_OFF = [
    'Traceback (most recent call last):\n  File "/home/alice/train.py", line 4, in <module>\n',
    "Traceback (most recent call last):\n",
]


@pytest.mark.parametrize("written", CUT_OFF)
def test_an_exception_whose_words_were_cut_off_is_still_one(tmp_path: Path, written: str) -> None:
    output = tmp_path / "slurm-8.out"
    output.write_text(
        written + "srun: error: n2: task 1: Exited with exit code 1\n"
        "srun: Terminating StepId=8.0\n"
        "slurmstepd-n1: error: *** STEP 8.0 ON n1 CANCELLED AT 2026-11-28T01:38:30 ***\n"
        "srun: error: n1: task 0: Terminated\n"
    )

    _, found = explain([output], nodes=("n1", "n2"))

    assert (found.cause, found.nodes, found.ranks) == ("exception-cut-off", ["n2"], [1])
    assert not found.accused


NODE, USER, UNDECIDED = "node", "user", "undecided"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/home/a/train.py", line 9, in main\n    f()\n'
)
BOTH = "".join(f"srun: error: n{n + 1}: task {n}: Exited with exit code 1\n" for n in (0, 1))


def behind(prefix: str, error: str = "KeyError: 1") -> str:
    """Return an exception whose lines all have a prefix."""
    return "".join(f"{prefix}{line}\n" for line in (TRACEBACK + error).splitlines())


def of_both(error: str) -> str:
    """Return what two ranks wrote that met the same."""
    return behind("[rank0]: ", error) + behind("[rank1]: ", error) + BOTH


# What a job of n1 to n4 wrote: the cause, whose it is, the nodes at fault, what would follow.
SITUATIONS: list[tuple[str, str, str, list[str], str]] = [
    # -- a collector of logs, mpirun or Ray stands before each line
    (behind("2024-05-01T10:00:00.12Z stderr F "), "program-error", USER, [], "stop"),
    (behind("[1,3]<stderr>:"), "program-error", USER, [], "stop"),
    (behind("(Trainer pid=7, ip=10.0.0.3) "), "program-error", USER, [], "stop"),
    # -- launchers
    (
        "E1 api: [ERROR] failed (exitcode: -9) local_rank: 2 (pid: 12) of binary: python",
        *("killed", UNDECIDED, [], "check"),
    ),
    (
        "HNP daemon: [[3,0],0] on node n1\n  Remote daemon: [[3,0],2] on node n3",
        *("node-silent", UNDECIDED, [], "check"),
    ),
    (
        "/var/spool/slurmd/job00812/slurm_script: line 14: torchrun: command not found",
        *("command-not-found", USER, [], "stop"),
    ),
    (
        "n3:4:5 [1] socket.h:403 NCCL WARN Connect to 10.1.3.2<56821> failed : Connection refused",
        *("connections-broke", "transient", [], "restart"),
    ),
    (
        f"{TRACEBACK}RuntimeError: Timed out initializing process group in store based barrier",
        *("rendezvous-never-formed", UNDECIDED, [], "check"),
    ),
    ("Process 1 exit with status code 137.", "killed", UNDECIDED, [], "check"),
    (
        behind("", "KeyError: 1\n")
        + behind("", "subprocess.CalledProcessError: Command '[]' failed"),
        *("program-error", USER, [], "stop"),
    ),
    # -- before a line of the script ran
    (
        "srun: error: Task launch for StepId=8.0 failed on node n3: Job prolog failed",
        *("launch-failed", NODE, ["n3"], "leave"),
    ),
    (
        "srun: error: Task launch for 8.0 failed on node n3: Communication connection failure",
        *("node-silent", UNDECIDED, [], "check"),
    ),
    (
        "   JobState=PENDING Reason=launch_failed_requeued_held Dependency=(null)",
        *("launch-failed", NODE, [], "check"),
    ),
    (
        "srun: error: Unable to allocate resources: Invalid account or account/partition",
        *("step-refused", USER, [], "stop"),
    ),
    (
        "srun: error: Unable to allocate resources: Unable to contact slurm controller",
        *("slurm-silent", "transient", [], "restart"),
    ),
    # -- what all nodes lack is the script's environment; what one lacks may be that node's
    (of_both("RuntimeError: No CUDA GPUs are available"), "no-gpu", USER, [], "stop"),
    (
        "0: " + f"{TRACEBACK}RuntimeError: No CUDA GPUs are available".replace("\n", "\n0: ") + "\n"
        "srun: error: n1: task 0: Exited with exit code 1",
        *("no-gpu", UNDECIDED, [], "check"),
    ),
    (
        of_both("RuntimeError: ifa != nullptr. Unable to find address for: ibp1"),
        *("network-interface-missing", USER, [], "stop"),
    ),
    (
        of_both("RuntimeError: Distributed package doesn't have NCCL built in"),
        *("no-nccl", USER, [], "stop"),
    ),
    (
        f"{TRACEBACK}RuntimeError: CUDA error: invalid device ordinal",
        *("no-such-gpu", USER, [], "stop"),
    ),
    # -- hopeless restarts
    (
        f"{TRACEBACK}OSError: [Errno 122] Disk quota exceeded: '/home/a/x'",
        *("disk-full", USER, [], "stop"),
    ),
    (
        f"{TRACEBACK}OSError: [Errno 28] No space left on device: '/tmp/x'",
        *("disk-full", UNDECIDED, [], "check"),
    ),
    (
        f"{TRACEBACK}RuntimeError: Parent directory /scratch/a does not exist.",
        *("directory-missing", USER, [], "stop"),
    ),
    (
        f"{TRACEBACK}requests.HTTPError: 401 Client Error: Unauthorized for url",
        *("access-refused", USER, [], "stop"),
    ),
    # -- words with an owner elsewhere
    (
        f"{TRACEBACK}requests.HTTPError: 503 Server Error: Service Unavailable",
        *("service-failed", UNDECIDED, [], "check"),
    ),
    (
        f"{TRACEBACK}ssl.SSLError: CERTIFICATE_VERIFY_FAILED: certificate is not yet valid",
        *("clock-wrong", UNDECIDED, [], "check"),
    ),
    ("812  train  gpu  abc  16 OUT_OF_ME+  0:125", "killed-for-memory", USER, [], "stop"),
    # -- drivers' words without a number
    (
        "[Mon Nov  2 10:00:00 2026] NVRM: GPU 0000:c1:00.0: RmInitAdapter failed! (0x62:0x40:2351)",
        *("gpu-broken", NODE, [], "check"),
    ),
    (
        "Nov  2 10:00:00 n2 kernel: NVRM: GPU 0000:c1:00.0: RmInitAdapter failed! (0x62:0x40:2351)",
        *("gpu-broken", NODE, ["n2"], "leave"),
    ),
]


@pytest.mark.parametrize(("text", "cause", "blame", "accused", "action"), SITUATIONS)
def test_a_situation_is_explained(
    tmp_path: Path, text: str, cause: str, blame: str, accused: list[str], action: str
) -> None:
    output = tmp_path / "slurm-9.out"
    output.write_text(f"step 10 loss 2.0\n{text}\n" if "NVRM" not in text else text)

    _, found = explain([output], nodes=("n1", "n2", "n3", "n4"))

    assert (found.cause, found.blame) == (cause, blame), found
    assert (found.accused, found.action) == (accused, action), found


def kernel_of(directory: Path, node: str, *numbers: int) -> None:
    texts = {48: "DBE (double bit error)", 79: "GPU has fallen off the bus.", 155: "NVLINK: SW"}
    lines = (
        f"Nov  2 10:00:00 {node} kernel: NVRM: Xid (PCI:0000:3b:00): {n}, pid=1, {texts[n]}\n"
        for n in numbers
    )
    (directory / f"kernel.{node}").write_text("".join(lines))


def test_of_nodes_that_report_alike_none_counts_beside_another_one(tmp_path: Path) -> None:
    for node in ("n1", "n2", "n3"):
        kernel_of(tmp_path, node, 155)
    domain = explain([tmp_path], nodes=("n1", "n2", "n3", "n4"))[1]
    kernel_of(tmp_path, "n4", 79)
    one = explain([tmp_path], nodes=("n1", "n2", "n3", "n4"))[1]

    assert (domain.cause, domain.blame, domain.accused) == ("gpu-broken", "undecided", [])
    assert "n[1-3] report such errors alike" in domain.says
    assert (one.blame, one.accused) == ("node", ["n4"])


def test_words_that_differ_only_by_a_name_keep_their_place(tmp_path: Path) -> None:
    output = tmp_path / "out"
    syntax = "SyntaxError: '(' was never closed"
    output.write_text(f'  File "/home/a/train.py", line 12\n    foo(\n       ^\n{syntax}\n')
    says = explain([output])[1].says
    output.write_text(
        "[c10d] The server socket has failed to listen on any local network address. port: 29500,"
        f" name: EADDRINUSE, message: address already in use\n{TRACEBACK}torch.distributed."
        "DistNetworkError: The server socket has failed to listen on any local network address."
        " port: 29500, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use"
    )

    assert says.endswith("SyntaxError: '(' was never closed (train.py:12)")
    assert explain([output])[1].says.startswith("port 29500, where the ranks were to meet")


def test_what_torchrun_records_of_an_exception_is_read(tmp_path: Path) -> None:
    stack = {"py_callstack": f"{TRACEBACK}KeyError: 'lr'\n", "timestamp": "1"}
    record = {"message": {"message": "KeyError: 'lr'", "extraInfo": stack}}
    (tmp_path / "error.json").write_text(json.dumps(record))

    assert explain([tmp_path])[1].says == "KeyError: 'lr' (a process, train.py:9)"


def test_a_file_that_is_no_text_is_named_and_passed_over_in_a_directory(tmp_path: Path) -> None:
    (tmp_path / "core").write_bytes(b"\x7fELF" + bytes(4096))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "out").write_text(f"{TRACEBACK}KeyError: 1\n")

    assert explain([tmp_path])[1].cause == "program-error"
    with pytest.raises(UsageError, match="is no text"):
        explain([tmp_path / "core"])
    with pytest.raises(UsageError, match="cannot be read"):
        explain([tmp_path / "pipe"])


@pytest.mark.parametrize(
    "line",
    [
        "mpirun noticed that process rank 3 with PID 77 on node n2 exited on signal 9 (Killed).",
        "spawn.ProcessExitedException: process 3 terminated with signal SIGKILL",
        "=   EXIT CODE: 137",
        "srun: error: n2: task 3: Exited with exit code 137",
        "srun: error: n2: task 3: Exited with exit code 247",
    ],
)
def test_a_launchers_word_for_sigkill_is_understood(tmp_path: Path, line: str) -> None:
    output = tmp_path / "slurm-9.out"
    output.write_text(f"step 10 loss 2.0\n{line}\n")

    _, found = explain([output], nodes=("n1", "n2"))

    assert (found.cause, found.blame, found.accused) == ("killed", "undecided", [])


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to read"):
        explain([tmp_path])
    with pytest.raises(UsageError, match="cannot be read"):
        explain([tmp_path / "missing.txt"])


def test_an_exit_code_that_nobody_gave_is_not_told(tmp_path: Path) -> None:
    output = tmp_path / "slurm-9.out"
    output.write_text("all is well so far\n")

    assert "exit code" not in explain([output])[1].says
    assert "exit code 7" in explain([output], exit_code=7)[1].says
