# SPDX-License-Identifier: Apache-2.0
"""Situations of the kinds that public threads report, in words of our own: blame and restarts.

A row has what the files of a job of n1 to n4 hold; the cause, whose it is, the nodes at fault, and
what would follow. A node that is named wrongly, or a job that is started again in vain, is worse
than an honest doubt.
"""

from __future__ import annotations

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
    "an adapter that gave up, by an older NCCL": (
        f"{ADAPTER}Got completion with error 12, opcode 1, len 0, vendor err 129",
        ("adapter-errors", *CHECK),
    ),
    "an adapter that gave up, by UCX": (
        quoted(
            "[n2:77:0:77] ib_mlx5_log.c:139  Transport retry count exceeded on mlx5_0:1/IB",
            how="Aborted (core dumped)",
        ),
        ("adapter-errors", *CHECK),
    ),
    "a GPU that hangs, by AMD's runtime": (
        quoted("HW Exception by GPU node-3 (Agent handle: 0x55) reason :GPU Hang", how="Aborted"),
        ("gpu-unknown-error", *CHECK),
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
    "kernels that several ranks compiled in one cache": (
        of(2, "FileExistsError: [Errno 17] File exists: '/tmp/torch_extensions/ops'"),
        ("cache-raced", *RESTART),
    ),
    "a kernel that another job removed from the cache": (
        of(2, "ImportError: /home/a/.triton/cache/1/x.so: cannot stat: Stale file handle"),
        ("cache-raced", *RESTART),
    ),
    "a warning of NCCL without a known reason": (
        "n1:9:14 [1] misc/shmutils.cc:103 NCCL WARN Cuda failure 'invalid argument'",
        ("script-failed", *CHECK),
    ),
    "shared memory that is not the same for all ranks": (
        (
            "n1:9:14 [0] NCCL WARN Error while attaching to shared memory segment /dev/shm/nccl-x"
            " (size 192), error: No such file or directory (2)"
        ),
        ("shared-memory-removed", *CHECK),
    ),
    "a GPU that NVML has lost": (
        "Unable to determine the device handle for GPU 0000:1C:00.0: Unknown Error",
        ("gpu-broken", *CHECK),
    ),
    "processes that no signal ends": (
        (
            "slurmstepd: error: *** STEP 8.0 STEPD TERMINATED ON n2 AT 2026-11-02T10:00:00 DUE TO"
            " JOB NOT ENDING WITH SIGNALS ***"
        ),
        ("processes-unkillable", *CHECK),
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
        ("address-unreachable", *CHECK),
    ),
    "the reason in a warning of NCCL, not in the exception": (
        (
            "n1:9:14 [0] ibvwrap.cc:2 NCCL WARN Call to ibv_modify_qp failed with 110 Connection"
            f" timed out\n{quoted(f'[rank1]: {NCCL} unhandled system error')}"
        ),
        ("adapter-not-connected", *CHECK),
    ),
    "an address of a network that the nodes do not share": (
        f"{ADAPTER.replace('NET/IB : ', '')}Connect to fe80::1%v0<4> failed : Connection timed out",
        ("address-unreachable", *CHECK),
    ),
    "a store that broke before the ranks met": (
        (
            f"{TRACEBACK}torch.distributed.DistNetworkError: Connection reset by peer\n\nThe above"
            f" exception was the direct cause of the following exception:\n\n{TRACEBACK}"
            "api.RendezvousConnectionError: The connection to the store has failed."
        ),
        ("rendezvous-never-formed", *CHECK),
    ),
    "a port in use of which torch only warned": (
        (
            "[W] [c10d] The server socket has failed to bind to [::]:12211 (errno: 98 - Address"
            f" already in use).\n{of(1, f'{NCCL} unhandled system error')}"
        ),
        ("port-in-use", *RESTART),
    ),
    "an address that is none, in the log of torch": (
        (
            "[W] [c10d] The IPv6 network addresses of (/home/a/env.sh, 45458) cannot be retrieved"
            " (gai error: -3 - Temporary failure in name resolution)."
        ),
        ("wrong-master-address", *STOP),
    ),
    "a registration with JAX that some tasks missed": (
        "Stopping the service as cluster registration failed: some tasks were never scheduled",
        ("rendezvous-never-formed", *CHECK),
    ),
    "a barrier of JAX": (
        of_all("XlaRuntimeError: DEADLINE_EXCEEDED: Barrier timed out. Id: save. Late: task:3"),
        ("barrier-not-passed", *CHECK),
    ),
    "a port that one job opened more than once": (
        "".join(
            f"[rank{rank}]: {line}\n"
            for rank in (1, 2)
            for line in f"{IN_A_LIBRARY}RuntimeError: The server socket has failed to bind to"
            " [::]:29500 (errno: 98 - Address already in use).".splitlines()
        ),
        ("port-in-use", *STOP),
    ),
    "shared memory that is full, by an older NCCL": (
        (
            "n1:9:14 [0] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left"
            " on device"
        ),
        ("shared-memory-full", *STOP),
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
