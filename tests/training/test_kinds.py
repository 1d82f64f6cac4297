# SPDX-License-Identifier: Apache-2.0
"""Situations of the kinds that public threads report, in words of our own: what is right for each.

A row has what the files of a job of n1 to n4 hold; the cause, whose it is, the nodes at fault, and
what would follow. A node that is named wrongly, or a job that is started again in vain, is worse
than an honest doubt.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_health.training.monitor.explain import explain

NODES = ("n1", "n2", "n3", "n4")
USER, UNDECIDED, NODE = "user", "undecided", "node"
TRACEBACK = (
    'Traceback (most recent call last):\n  File "/home/a/train.py", line 9, in main\n    f()\n'
)
IN_A_LIBRARY = f'{TRACEBACK}  File "/v/lib/python3.11/site-packages/x.py", line 3, in f\n    g()\n'
NCCL = "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1970,"
PYXIS = "slurmstepd: error: pyxis: "
SCRIPT = "/var/spool/slurmd/job00812/slurm_script"
ADAPTER = "n3:10:20 [2] transport/net_ib.cc:1295 NCCL WARN NET/IB : "


def behind(prefix: str, error: str = "KeyError: 1") -> str:
    """Return an exception of the script whose lines all have a prefix."""
    return "".join(f"{prefix}{line}\n" for line in (TRACEBACK + error).splitlines())


def of(rank: int, error: str) -> str:
    """Return what a rank wrote that met an error in a library, on the node of its number."""
    text = "".join(f"[rank{rank}]: {line}\n" for line in (IN_A_LIBRARY + error).splitlines())
    return f"{text}srun: error: n{rank + 1}: task {rank}: Exited with exit code 1\n"


def of_all(error: str) -> str:
    """Return what all ranks wrote that met the same, one on each node."""
    return "".join(of(rank, error) for rank in range(4))


def quoted(text: str, node: str = "n2", task: int = 1, how: str = "Exited with exit code 1") -> str:
    """Return what people quote of an output, and how srun reported the end."""
    return f"{text}\nsrun: error: {node}: task {task}: {how}\n"


def kernel(node: str, *lines: str) -> str:
    """Return the log of a node's kernel."""
    return "".join(f"Nov  2 10:00:00 {node} kernel: {line}\n" for line in lines)


def xid(number: int, text: str) -> str:
    return f"NVRM: Xid (PCI:0000:3b:00): {number}, pid=77, name=python, {text}"


def watchdog(rank: int, number: int, what: str) -> str:
    return (
        f"[rank{rank}]:[E1102 10:11:12.345 ProcessGroupNCCL.cpp:616] [Rank {rank}] Watchdog caught"
        f" collective operation timeout: WorkNCCL(SeqNum={number}, OpType={what}, NumelIn=8,"
        " NumelOut=8, Timeout(ms)=600000) ran for 600071 milliseconds before timing out.\n"
    )


Right = tuple[str, str, list[str], str]
Row = tuple[str | list[str], Right]
Follows = tuple[str, list[str], str]
CHECK: Follows = (UNDECIDED, [], "check")
STOP: Follows = (USER, [], "stop")
RESTART: Follows = ("transient", [], "restart")
OUTSIDE: Follows = ("outside", [], "stop")
# (a) Nothing that a program or a peer does is a node's.
BLAMES_NO_NODE: dict[str, Row] = {
    "a fault of the program that the driver logs": (
        [
            of(1, "RuntimeError: CUDA error: an illegal memory access was encountered"),
            kernel("n2", xid(31, "MMU Fault: ENGINE GRAPHICS faulted")),
        ],
        ("illegal-access", *CHECK),
    ),
    "an assertion in a kernel": (
        [
            of(1, "RuntimeError: CUDA error: device-side assert triggered"),
            kernel("n2", xid(13, "Graphics SM Warp Exception on (GPC 0, TPC 1)")),
        ],
        ("device-assert", *STOP),
    ),
    "a channel that the driver cleaned up": (
        [
            of(1, "RuntimeError: CUDA error: unspecified launch failure"),
            kernel("n2", xid(43, "Ch 00000010"), xid(45, "Ch 00000010")),
        ],
        ("launch-failure", *CHECK),
    ),
    "what the program says of ECC": (
        of(1, "RuntimeError: CUDA error: uncorrectable ECC error encountered"),
        ("gpu-broken", NODE, [], "check"),
    ),
    "an adapter that gave up sending": (
        quoted(
            f"{ADAPTER}Got completion from peer 10.0.0.4<53212> with status=12\n[rank1]: {NCCL}"
            " remote process exited or there was a network error\n[rank1]: ncclRemoteError: no"
        ),
        ("adapter-errors", *CHECK),
    ),
    "a GPU fault reported by AMD's runtime": (
        quoted("Memory access fault by GPU node-2 on address 0x7f.", how="Aborted (core dumped)"),
        ("illegal-access", *CHECK),
    ),
    "one GPU of a domain whose links report its fault": (
        [
            "step 3\n",
            *(kernel(n, xid(74, "NVLink: fatal error on link 4")) for n in NODES[:3]),
            kernel("n4", xid(79, "GPU has fallen off the bus.")),
        ],
        ("gpu-broken", NODE, ["n4"], "leave"),
    ),
}
# (b) What others left on a node is no mistake of the user.
LEFTOVERS: dict[str, Row] = {
    "memory that another process has": (
        quoted(
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
            " Process 48213 has 40.21 GiB memory in use. Including non-PyTorch memory, this"
            " process has 37.80 GiB memory in use."
        ),
        ("gpu-occupied", *CHECK),
    ),
    "memory that this program has, by XLA": (
        of(
            1, "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 3 bytes"
        ),
        ("gpu-out-of-memory", *STOP),
    ),
    "a directory of another user's": (
        of(1, "PermissionError: [Errno 13] Permission denied: '/tmp/torchinductor_root/cache'"),
        ("permission-denied", *CHECK),
    ),
    "a GPU that is busy": (
        of(1, "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable"),
        ("no-gpu", *CHECK),
    ),
    "processes that fill the user's limit": (
        of(1, "RuntimeError: can't start new thread"),
        ("process-limit", *CHECK),
    ),
    "the same, by a library that crashes then": (
        quoted(
            "OpenBLAS blas_thread_init: pthread_create failed for thread 63 of 64: Resource"
            " temporarily unavailable",
            how="Segmentation fault (core dumped)",
        ),
        ("process-limit", *CHECK),
    ),
}
FULL = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB"
LEFTOVERS |= {
    "most of the memory with a process that the container hides": (
        of(
            2,
            f"{FULL}. GPU 0 has a total capacity of 79.15 GiB of which 1.00 GiB is free. Including"
            " non-PyTorch memory, this process has 5.00 GiB memory in use.",
        ),
        ("gpu-occupied", *CHECK),
    ),
    "the same, by an older PyTorch": (
        of(
            2,
            f"{FULL} (GPU 0; 79.15 GiB total capacity; 4.00 GiB already allocated; 1.00 GiB free;"
            " 5.00 GiB reserved in total by PyTorch)",
        ),
        ("gpu-occupied", *CHECK),
    ),
    "one GPU fewer than the other nodes have": (
        of(2, "AssertionError: Expected 8 GPUs but found 7"),
        ("gpus-missing", *CHECK),
    ),
    "one GPU fewer, on all nodes": (
        of_all("AssertionError: Expected 8 GPUs but found 4"),
        ("gpus-missing", *STOP),
    ),
}
# (c) The same again fails again.
HOPELESS: dict[str, Row] = {
    "an image that the registry does not give": (
        quoted(
            f"{PYXIS}child 12 failed with error code: 1\n"
            f"{PYXIS}    [ERROR] URL https://images.example/v2/x returned error code: 401"
            f"\n{PYXIS}couldn't start container"
        ),
        ("image-not-found", *CHECK),
    ),
    "an image that does not exist": (
        "FATAL:   could not open image /home/a/x.sif: lstat /home/a/x.sif: no such file",
        ("image-not-found", *STOP),
    ),
    "no compiler for an extension": (
        of_all("OSError: CUDA_HOME environment variable is not set."),
        ("compiler-missing", *STOP),
    ),
    "a kernel that does not compile": (
        of_all("RuntimeError: `ptxas` failed with error code 255"),
        ("kernel-not-compiled", *STOP),
    ),
    "models that differ": (
        of(1, "RuntimeError: [1]: params[0] appears not to match sizes of the same param"),
        ("models-differ", *STOP),
    ),
    "memory, by slurmstepd": (
        "slurmstepd: error: StepId=8.0 exceeded memory limit (100 > 50), being killed",
        ("killed-for-memory", *STOP),
    ),
    "CPUs that the allocation lacks": (
        (
            "srun: error: Task launch for StepId=8.0 failed on node n1: Unable to satisfy cpu bind"
            " request"
        ),
        ("step-refused", *STOP),
    ),
    "a rendezvous that never formed": (
        f"{TRACEBACK}RuntimeError: Timed out initializing process group in store based barrier",
        ("rendezvous-never-formed", *CHECK),
    ),
    "a store that waited for clients": (
        of(1, "torch.distributed.DistStoreError: Timed out after 901 seconds waiting for clients."),
        ("rendezvous-never-formed", *CHECK),
    ),
    "gloo that did not connect": (
        of_all("RuntimeError: Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:144]"),
        ("rendezvous-never-formed", *CHECK),
    ),
    "a coordinator of JAX that waited": (
        of_all("XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: PjRT_Client_Connect"),
        ("rendezvous-never-formed", *CHECK),
    ),
    "an exception without words": (
        quoted("torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError"),
        ("rendezvous-never-formed", *CHECK),
    ),
    "an address that no name server knows": (
        of_all(
            "DistNetworkError: The IPv6 network addresses of (node-0, 29500) cannot be retrieved"
            " (gai error: -2 - Name or service not known)."
        ),
        ("wrong-master-address", *STOP),
    ),
    "an address of a host without the job": (
        quoted(
            "[rank1]: torch.distributed.DistNetworkError: The client socket has timed out after"
            " 600000ms while trying to connect to (login1, 29500)."
        ),
        ("wrong-master-address", *STOP),
    ),
    "connections that broke": (
        f"{ADAPTER.replace('NET/IB : ', '')}Connect to 10.1.3.2<56821> failed : Connection refused",
        ("connections-broke", *RESTART),
    ),
    "the last error of NCCL is of the network": (
        quoted(
            "terminate called after throwing an instance of 'c10::DistBackendError'\n"
            "  what():  NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled system error\n"
            "ncclSystemError: System call or external library call failed.\nLast error:\n"
            "socketPollConnect: Connect to 10.0.3.7<41235> returned 113(No route to host)",
            how="Aborted",
        ),
        ("connections-broke", *RESTART),
    ),
    "a quota": (of(1, "OSError: [Errno 122] Disk quota exceeded: '/h/x'"), ("disk-full", *STOP)),
    "a disk": (of(1, "OSError: [Errno 28] No space left on device: '/t'"), ("disk-full", *CHECK)),
    "a directory": (
        of(1, "RuntimeError: Parent directory /scratch/a does not exist."),
        ("directory-missing", *STOP),
    ),
    "credentials": (
        of(1, "requests.HTTPError: 401 Client Error: Unauthorized for url"),
        ("access-refused", *STOP),
    ),
    "a model that is not there": (
        quoted("[rank1]: OSError: /data/llama does not appear to have a file named config.json."),
        ("model-files-missing", *STOP),
    ),
    "a repository that is not there": (
        of(1, "huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error. Not Found"),
        ("model-files-missing", *STOP),
    ),
    "open files": (
        of(1, "OSError: [Errno 24] Too many open files"),
        ("too-many-open-files", *STOP),
    ),
    "parameters that no loss uses": (
        of(1, "RuntimeError: Expected to have finished reduction in the prior iteration before"),
        ("unused-parameters", *STOP),
    ),
    "more slots than there are": (
        "There are not enough slots available in the system to satisfy the 16\n",
        ("step-refused", *STOP),
    ),
    "Ctrl-C": (f"{TRACEBACK}KeyboardInterrupt\n", ("interrupted", *OUTSIDE)),
    "preemption": (
        "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026 DUE TO PREEMPTION ***\n",
        ("ended-from-outside", *OUTSIDE),
    ),
    "ranks that did not come to the store": (
        of_all("DistStoreError: wait timeout after 600000ms, keys: /default_pg/0//worker_count"),
        ("rendezvous-never-formed", *CHECK),
    ),
    "NCCL that cannot use CUDA": (
        of(1, f"{NCCL} unhandled cuda error, NCCL version 2.21.5"),
        ("gpu-unknown-error", *CHECK),
    ),
    "an error within NCCL": (
        of_all(f"{NCCL} internal error - please report this issue to the NCCL developers"),
        ("same-error-everywhere", *CHECK),
    ),
    "a signal that somebody sent": (
        "srun: error: n2: task 3: Exited with exit code 143\n",
        ("killed", *CHECK),
    ),
}
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
