# SPDX-License-Identifier: Apache-2.0
"""Situations of known kinds (see `kinds`), and the test of all: what is right for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.training.monitor.explain import explain
from tests.training.kinds import (
    ADAPTER,
    BLAMES_NO_NODE,
    CHECK,
    HOPELESS,
    LEFTOVERS,
    NCCL,
    NODE,
    NODES,
    PYXIS,
    RESTART,
    SCRIPT,
    STOP,
    Row,
    behind,
    kernel,
    of,
    of_all,
    quoted,
    watchdog,
    xid,
)

# (d) The evidence stands behind a prefix, in a box, or behind the lines of those that waited.
HIDDEN: dict[str, Row] = {
    "a collector of logs": (behind("2024-05-01T10:00:00.12Z stderr F "), ("program-error", *STOP)),
    "mpirun": (behind("[1,3]<stderr>:"), ("program-error", *STOP)),
    "Ray": (behind("(Trainer pid=7, ip=10.0.0.3) "), ("program-error", *STOP)),
    "a box": (
        quoted(
            "╭─── Traceback (most recent call last) ───╮\n│ 41 │ loss = step(batch) │\n"
            "RuntimeError: mat1 and mat2 shapes cannot be multiplied (4x8 and 9x4)"
        ),
        ("wrong-shape", *STOP),
    ),
    "a group of exceptions": (
        (
            "  + Exception Group Traceback (most recent call last):\n"
            "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
            f"{behind('    | ')}"
        ),
        ("program-error", *STOP),
    ),
    "one rank failed, another's watchdog wrote first": (
        watchdog(1, 7, "ALLREDUCE") + of(0, "ValueError: bad shard"),
        ("program-error", *STOP),
    ),
    "one rank in another collective": (
        quoted(
            "".join(watchdog(rank, 1042, "ALLREDUCE") for rank in (1, 2, 3))
            + watchdog(0, 1041, "BROADCAST"),
            "n1",
            0,
            "Aborted (core dumped)",
        ),
        ("collective-timed-out", *CHECK),
    ),
    "an exception of NCCL with its last error, but without a traceback": (
        (
            f"{NCCL} unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\n"
            "Last error:\nCuda failure 'an illegal memory access was encountered'"
        ),
        ("illegal-access", *CHECK),
    ),
    "a logger of vLLM": (
        behind("(Worker pid=7, ip=10.0.0.3) ERROR 08-26 22:44:30 worker_base.py:382] "),
        ("program-error", *STOP),
    ),
    "a lost GPU in three lines of a kernel's log": (
        kernel(
            "n2",
            "[ 1843.308] NVRM: The NVIDIA GPU 0000:b3:00.0",
            "               NVRM: (PCI ID: 10de:26b5) installed in this system has",
            "               NVRM: fallen off the bus and is not responding to commands.",
        ),
        ("gpu-broken", NODE, ["n2"], "leave"),
    ),
    "a rank of Horovod that only saw it": (
        behind("[1,0]<stderr>:", "AbortedError: Horovod has been shut down. This was caused by")
        + behind("[1,1]<stderr>:"),
        ("program-error", *STOP),
    ),
    "the last error of NCCL is the program's": (
        quoted(
            f"[rank1]: {NCCL} unhandled cuda error\n[rank1]: ncclUnhandledCudaError: Call to"
            " CUDA function failed.\n[rank1]: Last error:\n[rank1]: Cuda failure 'an illegal"
            " memory access was encountered'"
        ),
        ("illegal-access", *CHECK),
    ),
    "a crash whose library says why": (
        quoted(
            "ERROR: Unexpected bus error encountered in worker. This might be caused by"
            " insufficient shared memory (shm).",
            how="Bus error (core dumped)",
        ),
        ("shared-memory-full", *CHECK),
    ),
    "an exception among lines of its rank": (
        quoted(
            "[rank0]:[W] Loss is odd at step 1204\nFloatingPointError: Minimum loss scale"
            " reached (0.0001).",
            "n1",
            0,
        ),
        ("not-a-number", *STOP),
    ),
    "an exception that the program got over": (
        quoted(
            "ValueError: no config for this host, taking the default\nloaded 4 shards\n"
            "FATAL: cannot open the license server",
            "n1",
            0,
        ),
        ("rank-failed", *CHECK),
    ),
    "a command that failed behind another exception": (
        behind("", "KeyError: 1\n") + behind("", "subprocess.CalledProcessError: Command failed"),
        ("program-error", *STOP),
    ),
    "the exception of a process that was spawned": (
        behind("", "spawn.ProcessRaisedException: \n\n-- Process 2 terminated with an error:\n")
        + behind("", "KeyError: 'x'"),
        ("program-error", *STOP),
    ),
    "a data loader's worker that ended": (
        quoted("[rank1]: RuntimeError: DataLoader worker (pid(s) 12345) exited unexpectedly"),
        ("loader-worker-ended", *CHECK),
    ),
}
# (e) Nothing failed by these.
NORMAL: dict[str, Row] = {
    "rows remapped and a port that is up": (
        [
            f"{ADAPTER}mlx5_0:1 Got async event : port active\n{of(1, 'ValueError: bad')}",
            kernel("n3", xid(63, "Row Remapper: New row (0x1) marked for remapping")),
        ],
        ("program-error", *STOP),
    ),
    "errors that were corrected": (
        [
            "step 3\n",
            kernel(
                "n3",
                "mce: [Hardware Error]: Machine check events logged",
                "CPU0: Core temperature above threshold, cpu clock throttled",
            ),
        ],
        ("script-failed", *CHECK),
    ),
}
# (f) How launchers and frameworks report SIGKILL.
KILLS = {
    "torchrun": "E1 api: [ERROR] failed (exitcode: -9) local_rank: 2 (pid: 12) of binary: python",
    "srun": "srun: error: n2: task 3: Exited with exit code 137",
    "Python": "srun: error: n2: task 3: Exited with exit code 247",
    "Horovod": "Process 1 exit with status code 137.",
    "mpirun": "mpirun noticed that rank 3 with PID 7 on node n2 exited on signal 9",
    "mpirun's code": "  Process name: [[18173,1],3]\n  Exit code:    137",
    "Hydra": "=   RANK 3 PID 42 RUNNING AT n2\n=   KILLED BY SIGNAL: 9 (Killed)",
    "MPICH": "=   PID 42 RUNNING AT n2\n=   EXIT CODE: 9\n"
    "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)",
    "MPICH's code": "=   EXIT CODE: 137",
    "spawn": "spawn.ProcessExitedException: process 3 terminated with signal SIGKILL",
    "Lightning": "[rank: 1] Child process with PID 123 terminated with code -9. Forcefully",
    "bash": f"{SCRIPT}: line 12: 12345 Killed                  python train.py",
}
# (g) Before a line of the script ran.
LAUNCHES: dict[str, Row] = {
    "a prolog on one node": (
        "srun: error: Task launch for StepId=8.0 failed on node n3: Job prolog failed",
        ("launch-failed", NODE, ["n3"], "leave"),
    ),
    "a prolog on all nodes": (
        "".join(
            f"srun: error: Task launch for 8.0 failed on node {n}: Job prolog failed\n"
            for n in NODES
        ),
        ("launch-failed", *CHECK),
    ),
    "a batch directory, by slurmctld": (
        "error: slurmd error running JobId=12 on node(s)=n3: Slurmd could not create a batch dir",
        ("launch-failed", NODE, ["n3"], "leave"),
    ),
    "a clock, by munge": (
        "slurmd: error: Munge decode failed: Rewound credential",
        ("clocks-differ", *CHECK),
    ),
    "a daemon that does not answer": (
        "srun: error: Task launch for 8.0 failed on node n3: Communication connection failure",
        ("node-silent", *CHECK),
    ),
    "a daemon of an MPI": (
        "HNP daemon: [[3,0],0] on node n1\n  Remote daemon: [[3,0],2] on node n3",
        ("node-silent", *CHECK),
    ),
    "a job that was put back and is held": (
        "   JobState=PENDING Reason=launch_failed_requeued_held Dependency=(null)",
        ("launch-failed", NODE, [], "check"),
    ),
    "an account": (
        "srun: error: Unable to allocate resources: Invalid account or account/partition",
        ("step-refused", *STOP),
    ),
    "memory of a step": (
        "srun: error: Unable to create step for job 8: Memory required by task is not available",
        ("step-refused", *STOP),
    ),
    "a controller that is silent": (
        "srun: error: Unable to allocate resources: Unable to contact slurm controller",
        ("slurm-silent", *RESTART),
    ),
    "a container": (
        quoted(f"{PYXIS}child 12 failed with error code: 1\n{PYXIS}    [ERROR] No such file"),
        ("container-not-started", *CHECK),
    ),
    "a container that has no room, on all nodes": (
        "".join(
            quoted(f"{PYXIS}    Write failed because No space left on device", node, task)
            for task, node in enumerate(NODES)
        ),
        ("container-not-started", *CHECK),
    ),
    "a directory that the node lacks": (
        quoted(
            "slurmstepd: error: couldn't chdir to `/home/a': No such file: going to /tmp instead"
        ),
        ("directory-missing", *CHECK),
    ),
    "a script whose copy is gone": (
        f"slurmstepd: error: execve(): {SCRIPT}: No such file or directory",
        ("launch-failed", *CHECK),
    ),
    "the job's own directory": (
        "slurmstepd: error: container_p_join: open failed /scratch/8/.active: No such file",
        ("launch-failed", *CHECK),
    ),
    "a configuration that Slurm's commands do not find": (
        "squeue: fatal: Could not establish a configuration source",
        ("slurm-silent", *RESTART),
    ),
    "munge, on the node that submits": (
        "sbatch: error: Munge encode failed: Failed to access the socket: No such file",
        ("munge-silent", *CHECK),
    ),
    "a user that the node does not know": (
        "srun: fatal: Invalid user id: 20123\n",
        ("account-unknown", *CHECK),
    ),
    "a command": (f"{SCRIPT}: line 14: torchrun: command not found", ("command-not-found", *STOP)),
    "line ends of another system": (
        f"{SCRIPT}: line 3: $'\\r': command not found",
        ("command-not-found", *STOP),
    ),
}
# (h) A driver's words without a number; what all nodes lack is the script's environment.
DRIVERS: dict[str, Row] = {
    "the fabric manager, in a warning before the exception": (
        (
            "UserWarning: CUDA initialization: Unexpected error from cudaGetDeviceCount(). Error"
            f" 802: system not yet initialized\n{of(1, 'RuntimeError: No CUDA GPUs are available')}"
        ),
        ("gpu-fabric", NODE, [], "check"),
    ),
    "the fabric manager, by JAX": (
        of(1, "RuntimeError: no supported devices found: CUDA_ERROR_SYSTEM_NOT_READY"),
        ("gpu-fabric", NODE, [], "check"),
    ),
    "a driver that was replaced below the job": (
        "Failed to initialize NVML: Driver/library version mismatch\n"
        + of(1, "RuntimeError: No CUDA GPUs are available"),
        ("driver-mismatch", *CHECK),
    ),
    "a container without the driver": (
        quoted(f"{PYXIS}    nvidia-container-cli: initialization error: driver not loaded"),
        ("container-runtime", *CHECK),
    ),
    "GPUs that cannot reach each other": (
        of(1, f"{NCCL} unhandled cuda error, Cuda failure 217 'peer access is not supported'"),
        ("peer-access", *CHECK),
    ),
    "a fault of the program that only the driver logs": (
        kernel("n2", xid(31, "MMU Fault: ENGINE GRAPHICS faulted")),
        ("script-failed", *CHECK),
    ),
    "a GPU that is lost": (
        kernel("n3", "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."),
        ("gpu-broken", NODE, ["n3"], "leave"),
    ),
    "a GPU that does not start": (
        kernel("n2", "NVRM: GPU 0000:c1:00.0: RmInitAdapter failed! (0x62:0x40:2351)"),
        ("gpu-broken", NODE, ["n2"], "leave"),
    ),
    "the same on a node that no line names": (
        "[Mon Nov  2 10:00:00 2026] NVRM: GPU 0000:c1:00.0: RmInitAdapter failed! (0x62:0x40:2351)",
        ("gpu-broken", NODE, [], "check"),
    ),
    "a driver that does not answer": (
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n",
        ("no-gpu", *CHECK),
    ),
    "NVML in a container": ("Failed to initialize NVML: Unknown Error\n", ("no-gpu", *CHECK)),
    "NVML of another version": (
        "Failed to initialize NVML: Driver/library version mismatch\n",
        ("driver-mismatch", *CHECK),
    ),
    "no GPU on one node": (of(0, "RuntimeError: No CUDA GPUs are available"), ("no-gpu", *CHECK)),
    "no GPU on all": (of_all("RuntimeError: No CUDA GPUs are available"), ("no-gpu", *STOP)),
    "no such GPU": (
        of(1, "RuntimeError: CUDA error: invalid device ordinal"),
        ("no-such-gpu", *STOP),
    ),
    "no interface": (
        of_all("RuntimeError: ifa != nullptr. Unable to find address for: ibp1"),
        ("network-interface-missing", *STOP),
    ),
    "no NCCL": (
        of_all("RuntimeError: Distributed package doesn't have NCCL built in"),
        ("no-nccl", *STOP),
    ),
    "an extension of another version": (
        of(1, "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E"),
        ("extension-mismatch", *CHECK),
    ),
    "a library of the node that is too old": (
        quoted("RuntimeError: libstdc++.so.6: version `GLIBCXX_3.4.30' not found"),
        ("library-too-old", *CHECK),
    ),
    "an adapter that found no peer": (
        quoted("n1:9:14 [0] misc/ibvwrap.cc:160 NCCL WARN Call to ibv_modify_qp failed with error"),
        ("adapter-not-connected", *CHECK),
    ),
}
# (i) The owner is elsewhere.
ELSEWHERE: dict[str, Row] = {
    "a hub that nodes cannot reach": (
        of(1, "OSError: We couldn't connect to 'https://hub.example' to load the files"),
        ("service-failed", *CHECK),
    ),
    "a limit of a hub, in a line of a log": (
        "10:00 CRITICAL [rank=6] Uncaught HfHubHTTPError: 429 Client Error: Too Many Requests",
        ("service-failed", *CHECK),
    ),
    "a node that Ray gave up": (
        (
            "The node with node id: 1a and node name: 10.0.3.1 has been marked dead because the"
            " detector has missed too many heartbeats from it."
        ),
        ("worker-ended", *CHECK),
    ),
    "a process that MPI lost": (
        "An MPI communication peer process has unexpectedly disconnected.  This",
        ("peer-lost", *CHECK),
    ),
    "memory that UCX could not lock": (
        quoted("ib_iface.c:9 UCX  ERROR ibv_create_cq(cqe=4096) failed: Cannot allocate memory"),
        ("locked-memory-limit", *CHECK),
    ),
    "a barrier of gloo, in the log of a rank": (
        "[E ProcessGroupGloo.cpp:138] [Rank 0]: Rank 2 failed to pass monitoredBarrier in 30000 ms",
        ("barrier-not-passed", *CHECK),
    ),
    "a barrier that one rank did not reach": (
        of(0, "RuntimeError: Rank 3 failed to pass monitoredBarrier in 1800000 ms"),
        ("barrier-not-passed", *CHECK),
    ),
    "NCCL of another release on one node": (
        "n3:9:14 [0] init.cc:1000 NCCL WARN Mismatched NCCL version detected : rank 0 version 2",
        ("nccl-releases-differ", *CHECK),
    ),
    "a node that ssh does not reach": (
        (
            "n3: ssh: connect to host n3 port 22: Connection refused\n"
            "pdsh@n1: n3: ssh exited with exit code 255"
        ),
        ("ssh-failed", *CHECK),
    ),
    "an MPI that does not fit the launcher": (
        quoted("*** An error occurred in MPI_Init_thread\n*** on a NULL communicator"),
        ("launcher-failed", *CHECK),
    ),
    "a kernel of a library, in the log of a service": (
        "10:00 [E:onnxruntime] CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0",
        ("gpu-library-failed", *CHECK),
    ),
    "a filesystem, by a command": (
        "cp: cannot stat '/scratch/a': Stale file handle\n",
        ("filesystem-failed", *CHECK),
    ),
    "daemons of an MPI that did not start": (
        "An ORTE daemon has unexpectedly failed after launch and before\ncommunicating back",
        ("launcher-failed", *CHECK),
    ),
    "a worker that Ray lost": (
        (
            "(raylet, ip=10.0.0.7) A worker died or was killed while executing a task by an"
            " unexpected system error."
        ),
        ("worker-ended", *CHECK),
    ),
    "a job that was ending": (
        "srun: error: Unable to create step for job 8: Job/step already completing or completed",
        ("step-too-late", *CHECK),
    ),
    "a crash that only Python reports": (
        "Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f:",
        ("crashed", *CHECK),
    ),
    "a service": (of(1, "requests.HTTPError: 503 Server Error"), ("service-failed", *CHECK)),
    "a service that timed out": (
        of(1, "wandb.errors.errors.CommError: Run initialization has timed out after 90.0 sec."),
        ("service-failed", *CHECK),
    ),
    "a name server": (
        of(1, "socket.gaierror: [Errno -3] Temporary failure in name resolution"),
        ("service-failed", *CHECK),
    ),
    "a clock": (
        of(1, "ssl.SSLError: CERTIFICATE_VERIFY_FAILED: certificate is not yet valid"),
        ("clock-wrong", *CHECK),
    ),
    "accounts that one node does not know": (
        of(1, "KeyError: 'getpwuid(): uid not found: 20123'"),
        ("account-unknown", *CHECK),
    ),
    "a filesystem": (
        of(1, "OSError: [Errno 108] Cannot send after transport endpoint shutdown: '/lustre/x'"),
        ("filesystem-failed", *CHECK),
    ),
    "a stale handle": (
        quoted("OSError: [Errno 116] Stale file handle: '/scratch/ckpt/step_1000.pt'"),
        ("filesystem-failed", *CHECK),
    ),
    "a filesystem, on all nodes": (
        of_all("OSError: [Errno 121] Remote I/O error: '/gpfs/x'"),
        ("filesystem-failed", *CHECK),
    ),
    "storage that a data loader waited for": (
        of(1, "RuntimeError: DataLoader timed out after 120 seconds"),
        ("loader-timed-out", *CHECK),
    ),
    "a task that JAX lost": (
        of(1, "XlaRuntimeError: UNAVAILABLE: The tasks have crashed: /job:jax_worker/task:2"),
        ("peer-lost", *CHECK),
    ),
    "the job's memory, by sacct": (
        "812  train  gpu  abc  16 OUT_OF_ME+  0:125",
        ("killed-for-memory", *STOP),
    ),
}
KINDS: dict[str, dict[str, Row]] = {
    "blames no node": BLAMES_NO_NODE,
    "leftovers": LEFTOVERS,
    "hopeless": HOPELESS,
    "hidden": HIDDEN,
    "normal": NORMAL,
    "kill": {name: (f"step 10\n{text}", ("killed", *CHECK)) for name, text in KILLS.items()},
    "launch": LAUNCHES,
    "driver": DRIVERS,
    "elsewhere": ELSEWHERE,
}
ROWS = {f"{kind}: {name}": row for kind, rows in KINDS.items() for name, row in rows.items()}


@pytest.mark.parametrize("name", ROWS)
def test_a_situation_of_a_known_kind_is_explained(tmp_path: Path, name: str) -> None:
    texts, right = ROWS[name]
    for number, text in enumerate([texts] if isinstance(texts, str) else texts):
        (tmp_path / f"file{number}").write_text(text)

    _, found = explain([tmp_path], nodes=NODES)

    assert (found.cause, found.blame, found.accused, found.action) == right, found
