# SPDX-License-Identifier: Apache-2.0
"""From words to causes: the rows for exceptions.

The first row that fits counts. Sources are the texts of PyTorch, CUDA and NCCL, and NVIDIA's guide
of Xid errors for lost GPUs and uncorrectable memory errors.
"""

from __future__ import annotations

import re

from slurm_health.training.diagnosis.rows import OF_THE_PLACE, On, Row, kind_of
from slurm_health.training.diagnosis.words_of_devices import DEVICES, FIX
from slurm_health.training.framework import Attribution, Sureness

_USER, _NODE, _UNDECIDED = Attribution.USER, Attribution.NODE, Attribution.UNDECIDED


# What stands in front of an exception of `torch.load`, or about a file in a cache of kernels.
_LOADING, _CACHE = "torch.load: ", "in a cache: "


def _of_the_place(error: str) -> bool:
    """Return whether an exception is about a file or a module: figures do not cause it."""
    return kind_of(error) in OF_THE_PLACE


ADAPTER_ERRORS = Row(
    "adapter-errors",
    r"Transport retry count exceeded on",  # UCX, which then aborts
    "an adapter of InfiniBand or RoCE gave up sending, or reported errors: a port, a cable or a"
    " switch failed, or a peer had ended",
    "look at the state and the counters of the adapters (ibstat, rdma statistic), and which rank"
    " ended first; the check before the script tests the connections",
    on=On.LAST_WORDS | On.CRASH,
)
EXCEPTIONS: tuple[Row, ...] = (
    *DEVICES,
    Row(
        "image-not-found",
        r"returned error code: 40[134]\b|manifest (?:unknown|for .{1,120} not found)"
        r"|FATAL: .{0,40}could not open image .{1,300}no such file"
        r"|No such file or directory: \S{1,200}\.(?:sqsh|squashfs|sif)\b",
        "the image of the job's container does not exist under this name, or its registry refused"
        " the user's credentials",
        "correct the image's name, or log in to its registry (enroot's .credentials, apptainer"
        " registry login); starting it again as it is fails again",
        _USER,
        on=On.LAST_WORDS,
    ),
    Row(
        "container-runtime",
        r"nvidia-container-cli: .{0,40}(?:driver not loaded|nvml error|driver rpc error"
        r"|device error|driver/library)",
        "the container could not use the node's GPUs: their driver does not answer there",
        "look at nvidia-smi on that node, and tell your administrator; other nodes may do",
        on=On.LAST_WORDS,
    ),
    Row(
        "container-not-started",
        r"slurmstepd\S*: error: pyxis: |spank_pyxis\.so: task_init\(\) failed"
        r"|FATAL: .{0,40}container creation failed",
        "the container of the job could not be started: its image does not fit the site's"
        " hooks or is broken, a path may not be mounted, or the node lacks something: space, a"
        " helper program, the user's account",
        "read the container's own lines; if other nodes start it, tell your administrator which"
        " node does not",
        on=On.LAST_WORDS,
    ),
    Row(
        "device-mismatch",
        r"Expected all tensors to be on the same device"
        r"|Tensor on device \S{1,20} is not on the expected device",
        "tensors of one operation are on different devices",
        "move them to one device (.to(device)); " + FIX,
        _USER,
    ),
    Row(
        "checkpoint-broken",
        # The first: torch.load, of a file that is shorter than its beginning promises.
        rf"^{_LOADING}.*(?:\[Errno 22\]|EOFError)|PytorchStreamReader failed"
        r"|failed finding central directory|pickle data was truncated"
        r"|[Ii]nvalid magic number; corrupt|unpickling stack underflow|SafetensorError"
        r"|InvalidHeaderDeserialization|Ran out of input|\bUnpicklingError"
        r"|mmap can only be used with files saved with|No data left in file",
        "a file cannot be decoded: it was not written to its end, is of another kind, or holds"
        " objects that torch loads only on request (weights_only)",
        "go on from an earlier checkpoint; " + FIX,
        _USER,
    ),
    Row(
        "mismatched-collective",
        r"[Dd]etected mismatch between collectives|[Mm]ismatch between collective"
        r"|[Cc]ollectives? .{0,40}mismatch|op\.preamble\.length",
        "ranks called different collectives, or the same one with different sizes",
        "have all ranks call the same collectives in the same order; " + FIX,
        _USER,
        Sureness.CERTAIN,
    ),
    Row(
        "wrong-type",
        r"\b(?:to|must) have (?:the )?same dtype|expected scalar type \w+ but found"
        r"|Input type \(.{1,60}\) and (?:weight|bias) type",
        "tensors of one operation have different types of numbers",
        "bring them to one type (.to(dtype), torch.autocast); " + FIX,
        _USER,
    ),
    Row(
        "wrong-shape",
        r"shapes cannot be multiplied|size mismatch|must match the size of tensor"
        r"|mat1 and mat2|Expected (?!param)[^/]{0,60}(size|shape|dimension)|shape '.*' is invalid"
        r"|Sizes of tensors must match|stack expects each tensor|inconsistent tensor size"
        r"|resize storage that is not resizable",
        "a tensor has the wrong shape",
        "look at the batch of this rank, and at the model's sizes; " + FIX,
        _USER,
        unless=_of_the_place,
    ),
    Row(
        "missing-key",
        r"Error\(s\) in loading state_dict|[Cc]heckpoint.{0,80}world[ _]size",
        "a checkpoint does not fit the model, or the number of ranks",
        "load a checkpoint of this model, or convert it for this many ranks; " + FIX,
        _USER,
    ),
    Row(
        "shared-memory-full",  # of NCCL's, whose reason is that a disk is full
        r"shared memory segment .{0,160}No space left on device"
        # Older releases give no reason; for memory there is hardly another.
        r"|posix_fallocate failed : No space left"
        r"|failed to extend /dev/shm/\S{1,80} to \d+ bytes(?!, error: (?!No space))",
        "the shared memory of the node has no room for the exchange between its ranks: in a"
        " container it often has 64 MB; elsewhere leftover files may fill it",
        "give the container more (docker --shm-size or --ipc=host), or look for leftover files"
        " (df, ls); starting it again as it is fails again",
        _USER,
        on=On.LAST_WORDS,
    ),
    Row(
        "shared-memory-removed",
        r"(?:unlink shared memory|attaching to shared memory segment) /dev/shm/nccl-.{0,80}"
        r"No such file",
        "a file of NCCL's is not in the node's shared memory: systemd removes such files when a"
        " user's last session ends, unless logind.conf has RemoveIPC=no; or ranks run in containers"
        " with a /dev/shm of their own",
        "tell your administrator which node it is (RemoveIPC in logind.conf); give the ranks of a"
        " node one /dev/shm",
        on=On.LAST_WORDS,
    ),
    Row(
        "disk-full",
        r"Disk quota exceeded|\[Errno 122\]",
        "the quota of a filesystem that the script writes to is used up",
        "free space or ask for a larger quota; starting it again as it is fails again",
        _USER,
        Sureness.CERTAIN,
        on=On.LAST_WORDS,
    ),
    Row(
        "disk-full",
        r"No space left on device|\[Errno 28\]",
        "a filesystem that the script writes to is full",
        "free space or ask for more where the script writes; if that is the node's own"
        " disk, tell your administrator which node it is",
        sureness=Sureness.CERTAIN,
        on=On.LAST_WORDS | On.SHARED,
    ),
    Row(
        "disk-full",
        # torch.save's words for ENOSPC: the reason itself is lost in them.
        r"basic_ios::clear: iostream error|PytorchStreamWriter failed writing"
        r"|inline_container\.cc.*unexpected pos",
        "torch could not write a file to its end: most likely its filesystem is full, or a"
        " quota is used up",
        "look at the space where checkpoints go, on this node (df); if that is the node's own"
        " disk, tell your administrator which node it is",
        on=On.SHARED,
    ),
    Row(
        "directory-missing",
        r"Parent directory .{1,200} does not exist",
        "the directory that a file was to be written to does not exist",
        "create it before the ranks write there; starting it again as it is fails again",
        _USER,
    ),
    Row(
        "directory-missing",
        r"couldn't chdir to ",  # slurmstepd, which goes on in /tmp
        "the directory that the job was submitted from does not exist on the node: a filesystem is"
        " not mounted there, or nodes do not share it",
        "look whether the node has it mounted (findmnt -T DIR); else submit from a directory that"
        " all nodes share (--chdir)",
        on=On.LAST_WORDS | On.SHARED,
    ),
    Row(
        "cache-raced",
        rf"^{_CACHE}",
        "ranks or jobs that compile the same kernel removed each other's files in a cache that they"
        " share, most often in the home directory",
        "give every job and node a cache of its own, below /tmp: TRITON_CACHE_DIR,"
        " TORCHINDUCTOR_CACHE_DIR, TORCH_EXTENSIONS_DIR",
        Attribution.TRANSIENT,
        Sureness.POSSIBLE,
    ),
    Row(
        "filesystem-failed",
        r"Input/output error|Stale file handle|Transport endpoint is not connected"
        r"|transport endpoint shutdown|Read-only file system|Remote I/O"
        r"|\[Errno (5|30|107|108|116|121)\]|\[Errno 110\][^:]* of a file",
        "a filesystem failed while the script used it",
        "check whether the path can be read on other nodes, and have the node checked",
        unless=lambda error: re.search(r"OFI|UCX|ibv_|NCCL", error) is not None,  # of a network
        on=On.LAST_WORDS,
    ),
    Row(
        "shared-memory-full",
        r"insufficient shared memory|DataLoader worker.*Bus error",
        "the shared memory of the node is too small for the data loader",
        "use fewer data loader workers, or have /dev/shm enlarged",
        _USER,
        on=On.LAST_WORDS | On.CRASH,
    ),
    Row(
        "locked-memory-limit",  # whose reason is that there is no memory
        r"cannot create cq|(?:ibv|mlx5dv)_(?:reg|create)_\w{1,20}(?:\(.{0,30}\))? failed.{0,80}"
        r"Cannot allocate memory",
        "an adapter of InfiniBand or RoCE could not lock memory: most often the limit of the"
        " job's processes is low (ulimit -l)",
        "look at `ulimit -l` in a step on that node: it should be unlimited; slurmd's own limit"
        " and PropagateResourceLimitsExcept=MEMLOCK decide that",
        on=On.LAST_WORDS,
    ),
    Row(
        "host-out-of-memory",
        r"DataLoader worker .*is killed by signal: Killed",
        "a process of the data loader was killed from outside, most often because the job's"
        " memory on this node was used up",
        "ask for more memory (--mem), or use fewer data loader workers",
        _USER,
        Sureness.POSSIBLE,
    ),
    Row(
        "library-too-old",
        r"version [`'\"]GLIBC(?:XX)?_[\d.]+['\"]? not found",
        "a library of the node is older than the one that the program, or an extension of it, was"
        " built with",
        "use an environment or a container with its own libraries; if only one node fails so,"
        " tell your administrator which",
        on=On.LAST_WORDS | On.SHARED,
    ),
    Row(
        "extension-mismatch",
        r"undefined symbol: ",
        "an extension was built for other versions of its libraries than are installed there",
        "install one that was built for this PyTorch, and look for another copy of the library"
        " (LD_LIBRARY_PATH, pip list); if only one node fails so, have it checked",
        on=On.LAST_WORDS | On.SHARED,
    ),
    Row(
        "account-unknown",
        r"(?:getpwuid|getpwnam|getgrgid)\(\): \w+ not found|srun: fatal: Invalid user id",
        "the node does not know the job's user: its accounts (sssd, LDAP) did not answer, or a"
        " container has no entry for it",
        "look on the node: getent passwd USER; in a container, give it the user (/etc/passwd)",
        on=On.LAST_WORDS | On.SHARED,
    ),
    Row(
        "too-many-open-files",
        r"Too many open files|\[Errno 24\]|received 0 items of ancdata"
        # Older releases of PyTorch give no reason.
        r"|unable to open shared memory object \S{1,80} in read-write mode(?!: )",
        "the process reached its limit of open files",
        "raise the limit (ulimit -n), close files, or set"
        " torch.multiprocessing.set_sharing_strategy('file_system')",
        _USER,
    ),
    Row(
        "file-locked",
        r"[Uu]nable to lock file|No locks available",
        "a file could not be locked: another process has it open, or its filesystem has no locks",
        "open it for writing in one process only; HDF5_USE_FILE_LOCKING=FALSE does without locks",
    ),
    Row(
        "process-limit",
        r"can't start new thread|pthread_create failed|fork: (?:retry: )?Resource temporarily"
        r"|kind: WouldBlock, message: .Resource temporarily"
        r"|\[Errno 11\] Resource temporarily unavailable",
        "the node started no more threads or processes for the job: a limit of the user or of its"
        " cgroup is reached, by this job or by leftover processes",
        "look at `ulimit -u` and at the user's processes on the node (ps -LU USER | wc -l); use"
        " fewer threads (OMP_NUM_THREADS) and data loader workers",
        on=On.LAST_WORDS | On.CRASH,
    ),
    Row(
        "unused-parameters",
        r"Expected to have finished reduction in the prior iteration",
        "parameters of the model were not used in a step, and DDP waits for their gradients",
        "let all parameters take part in the loss, or set find_unused_parameters=True; " + FIX,
        _USER,
    ),
    Row(
        "models-differ",
        r"appears not to match (?:sizes|strides) of the same param"
        r"|DDP expects same model across all ranks, but Rank \d+ has \d+ params, while .{0,40}"
        r"inconsistent [1-9]",
        "ranks built models with different parameters",
        "build the model from the same configuration on all ranks; " + FIX,
        _USER,
    ),
    Row(
        "kernel-not-compiled",
        r"BackendCompilerFailed|InductorError|`ptxas` failed|CompilationError: at \d+:",
        "torch.compile or Triton could not compile a kernel",
        "read its own message; run once without torch.compile (TORCHDYNAMO_DISABLE=1); if only one"
        " node fails so, compare its environment with others'",
        _USER,
    ),
    Row(
        "kernel-too-large",
        r"OutOfResources: out of resource|too many resources requested for launch",
        "a GPU kernel asks for more shared memory or registers than the GPU has",
        "use smaller blocks or fewer stages in that kernel; " + FIX,
        _USER,
    ),
    Row(
        "model-files-missing",
        r"404 Client Error|RepositoryNotFoundError|EntryNotFoundError"
        r"|does not appear to have a file named|is not a valid model identifier"
        r"|Can't load (?:the )?(?:tokenizer|model|configuration|image processor) for",
        "a model or data set has no files under this name: the path is wrong, or nothing was"
        " downloaded there",
        "correct the path or the name; starting it again as it is fails again",
        _USER,
    ),
    Row(
        "loader-worker-ended",
        r"DataLoader worker .*exited unexpectedly",
        "a process of the data loader ended: killed, most often for memory, or by a crash of its"
        " own",
        "see how much memory the job used on the node (sacct --format=JobID,MaxRSS,State), and run"
        " once with num_workers=0, which shows the loader's exception",
    ),
    Row(
        "loader-timed-out",
        r"DataLoader timed out after",
        "the data loader gave no batch within the script's timeout: storage or a worker is slow or"
        " stuck",
        "look at its files, and at their filesystem on this node; see the workers' stacks (py-spy"
        " dump) when it happens again",
    ),
    Row(
        "peer-lost",
        r"tasks (?:are unhealthy|have crashed)|task:\d+ heartbeat timeout"
        r"|MPI communication peer process has unexpectedly disconnected",
        "JAX or MPI lost a process of the job: it or its node ended, or the network to it, or it"
        " was too busy to answer",
        "look at the last lines of the process that it names, and at its node",
        on=On.LAST_WORDS | On.CRASH,
    ),
    Row(
        "adapter-not-connected",
        r"(?:ibv|mlx5dv)_\w{1,30}(?:\(.{0,30}\))? failed|[Ff]ailed to modify QP"
        r"|NET/OFI .{0,200}(?i:error|failed)",
        "an adapter of InfiniBand, RoCE or EFA refused a call, or could not connect to a peer's: a"
        " port, a cable or a switch failed, the ports are of different networks or rails"
        " (NCCL_CROSS_NIC), NCCL_IB_GID_INDEX is wrong, or its driver or a limit does not fit",
        "look at the state of the adapters on both nodes (ibstat, show_gids, fi_info) and at"
        " `ulimit -l`; the check before the script tests the connections of the nodes",
        on=On.LAST_WORDS,
    ),
    ADAPTER_ERRORS,
    Row(
        "address-unreachable",
        r"[Cc]onnect(?:ion)? to \S{1,80} (?:failed|returned|timed).{0,20}(?:No route|unreachable"
        r"|timed out)|no active messages transport to",  # UCX
        "a rank could not reach the address that another one listens at: an interface that the"
        " nodes do not share, such as a container's, a firewall, or a node without network",
        "name the interface of the network that all nodes share (NCCL_SOCKET_IFNAME,"
        " GLOO_SOCKET_IFNAME); the check before the script tests the connections of the nodes",
        on=On.LAST_WORDS,
    ),
    Row(
        "host-out-of-memory",
        rf"^(?:{_LOADING})?(?:[\w.]*\._?\w*)?MemoryError|[Cc]annot allocate memory"
        r"|bad_alloc|\[Errno 12\]|due to the node running low on memory",
        "the process got no more memory from its node",
        "ask for more memory (--mem), or use less of it per node",
        _USER,
    ),
    Row(
        "port-in-use",
        r"[Aa]ddress already in use|EADDRINUSE|on port .{1,20}another process is",
        "the rendezvous port was in use",
        "start again; choose MASTER_PORT by the job's id",
        Attribution.TRANSIENT,
        on=On.LAST_WORDS,
    ),
    Row(
        "launch-failed",
        r"execve\(\): \S*/slurm_script: No such file|container_[gp]_join\b",
        "slurmd could not start the job's script: its copy of the script, or the job's own"
        " directory on the node, is gone",
        "try another node and tell your administrator (SlurmdSpoolDir, slurmd's log there)",
        on=On.LAST_WORDS,
    ),
    Row(
        "munge-silent",
        r"[Mm]unge encode failed|error: .{0,40}Protocol authentication error",
        "munge gave no credential for a command of Slurm: its daemon does not run on that node",
        "tell your administrator which node it is (systemctl status munge)",
        on=On.LAST_WORDS,
    ),
    Row(
        "slurm-silent",
        r"Unable to contact slurm controller|Socket timed out on send/recv"
        r"|Could not establish a configuration source",
        "Slurm's controller did not answer a command of the script",
        "start again when it answers (scontrol ping)",
        Attribution.TRANSIENT,
        on=On.LAST_WORDS,
    ),
    Row(
        "access-refused",
        r"40[13] Client Error|[Gg]ated repo|(?:HTTP|Error) (?:code )?40[13]\b|GatedRepoError"
        r"|Invalid user token|api_key not configured|AccessDenied|Unable to locate credentials",
        "a service on the network refused the program's credentials, or required some",
        "give the job its token or login (HF_TOKEN, WANDB_API_KEY, ...); starting it again as it is"
        " fails again",
        _USER,
    ),
    Row(
        "service-failed",
        r"(?:50[0234]|429) (?:Client|Server) Error|Max retries exceeded with url"
        r"|Temporary failure in name resolution|HfHubHTTPError|SlowDown\b|endpoint URL: "
        r"|^wandb\.|HTTPSConnectionPool|We couldn't connect to|LocalEntryNotFoundError",
        "a service on the network, or the way to it, did not answer the program",
        "check whether the service answers from a node; keep downloads in a local cache"
        " (HF_HUB_OFFLINE=1)",
        unless=lambda error: "network addresses of (" in error,  # of the rendezvous
        on=On.LAST_WORDS,
    ),
    Row(
        "clock-wrong",
        r"CERTIFICATE_VERIFY_FAILED.{0,80}(?:not yet valid|has expired)",
        "a certificate is out of date: it has expired, or the clock of the node is wrong",
        "compare the clock of the node with others (chronyc tracking), then the certificate",
    ),
    Row(
        "network-plugin-missing",
        r"(?:(?<!\w)Error: |WARN )network .{1,60} not found\.?",
        "no plugin that NCCL loaded provides the network of NCCL_NET",
        "load the plugin's module or container hook, or correct NCCL_NET and"
        " NCCL_NET_PLUGIN; NCCL_DEBUG=INFO lists the plugins that it tried",
        _USER,
        on=On.LAST_WORDS,
    ),
    Row(
        "network-plugin-missing",  # or, since 2.27, the adapters of a plugin that is built in
        r"Failed to initialize any NET plugin",
        "NCCL cannot use the network of NCCL_NET: no plugin that it loaded has that name, or the"
        " node has no adapter for it",
        "load the plugin's module or container hook, or correct NCCL_NET and"
        " NCCL_NET_PLUGIN; if only one node fails so, have its adapters checked",
        on=On.LAST_WORDS,
    ),
    Row(
        "network-interface-missing",
        r"no socket interface found|Socket creation failed : |with family \d+ is neither AF_INET"
        r"|Unable to find address for: |Unable to find interface for: ",
        "NCCL or gloo has no network interface for the rendezvous: NCCL_SOCKET_IFNAME or"
        " GLOO_SOCKET_IFNAME names one that does not exist or is down, or there is none",
        "correct NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME), or leave it out; if only one node fails"
        " so, look at its interfaces (ip -br address)",
        on=On.LAST_WORDS | On.SHARED,
    ),
    Row(
        "message-truncated",
        r"[Mm]essage truncated",
        "a rank received more than it had room for: ranks called collectives of different sizes,"
        " or have different settings of NCCL (NCCL_PROTO, NCCL_ALGO)",
        "check that all ranks call the same collectives with the same sizes, and that their nodes"
        " have the same variables of NCCL",
        on=On.LAST_WORDS,
    ),
    Row(
        "duplicate-gpu",
        r"Duplicate GPU detected|ncclInvalidUsage|invalid usage",
        "ranks were given the same GPU, or NCCL was called wrongly",
        "give every rank a GPU of its own (torch.cuda.set_device(LOCAL_RANK)); " + FIX,
        _USER,
        on=On.LAST_WORDS,
    ),
    Row(
        "barrier-not-passed",
        r"failed to pass monitoredBarrier|monitoredBarrier .{0,80}(?:timed out|timeout)"
        r"|DEADLINE_EXCEEDED: Barrier timed out(?!.*(?:PjRT_Client|register))"
        r"|\[missing ranks: \d",  # Horovod
        "a rank did not reach a barrier within its timeout; the words name it",
        "look at what that rank did last: its output, or its stack (py-spy dump) at the next hang",
        sureness=Sureness.POSSIBLE,
        on=On.LAST_WORDS,
    ),
    Row(
        "compiler-missing",
        r"CUDA_HOME environment variable is not set|CUDA_HOME does not exist"
        r"|Ninja is required to load C\+\+ extensions|Could not find (?:nvcc|a C\+\+ compiler)"
        r"|Failed to find C compiler",
        "an extension is compiled when the program starts, and its compiler is not on the node",
        "load the module with CUDA's compiler (CUDA_HOME), or install the extension compiled;"
        " starting it again as it is fails again",
        _USER,
    ),
    Row(
        "nccl-releases-differ",
        r"Mismatched NCCL version detected",
        "ranks loaded different releases of NCCL",
        "give all nodes one environment or container; see which nodes differ"
        " (torch.cuda.nccl.version()), and what LD_LIBRARY_PATH has there",
        on=On.LAST_WORDS,
    ),
    Row(
        "launcher-failed",
        r"ORTE daemon has unexpectedly failed|ORTE was unable to reliably start"
        r"|PRTE .{0,40}(?:daemon|lost communication)|A daemon .{0,60}died unexpectedly"
        r"|[Uu]nable to launch .{0,40}bstrap_proxy|HYD\w+ .{0,80}(?:failed|error)"
        r"|error (?:occurred )?in P?MPI_Init|abort before MPI_INIT",
        "MPI could not start, or its launcher lost a daemon: a node, the network between them, or"
        " an MPI that does not fit this Slurm",
        "start the ranks by srun (--mpi=pmix); if mpirun is needed, try srun hostname on the nodes"
        " first",
        sureness=Sureness.POSSIBLE,
        on=On.LAST_WORDS,
    ),
    Row(
        "mpi-call-failed",
        # MPICH: Fatal error in PMPI_Isend: …; Open MPI: *** An error occurred in MPI_Recv
        r"Fatal error in (?:internal_)?P?MPI_\w+: |\*\*\* An error occurred in MPI_\w",
        "a call of MPI failed: its arguments are wrong, a peer had ended, or MPI met an error of"
        " the GPU or the network below it",
        "read the lines below it: they name the call and its arguments; if it fails on one node"
        " only, have that node checked",
        sureness=Sureness.POSSIBLE,
        on=On.LAST_WORDS | On.CRASH,
    ),
    Row(
        "ssh-failed",
        r"ssh exited with exit code|Host key verification failed|^(?:\S+: )?ssh: connect to host",
        "the launcher could not reach a node by ssh",
        "start the ranks by srun, which needs no ssh; else try ssh NODE hostname from the first"
        " node",
        on=On.LAST_WORDS,
    ),
    Row(
        "step-too-late",
        r"Unable to create step for job \d+: Job/step already completing",
        "the job was ending when a step was to start: its time limit, a cancellation, or a prolog"
        " that failed on a node",
        "look at the job's end and its nodes: sacct --format=JobID,State,ExitCode,NodeList;"
        " sinfo -R",
        on=On.LAST_WORDS,
    ),
    Row(
        "worker-ended",
        r"worker (?:died|crashed) or was killed|[Aa]ctor died unexpectedly|ActorDiedError"
        r"|WorkerCrashedError|Worker unexpectedly exits|node .{0,200}has been marked dead",
        "Ray lost a worker or its node: killed, most often for memory, by a crash of its own, or"
        " too busy to answer",
        "read the worker's own log (session_latest/logs), and see how much memory the job used on"
        " its node (sacct --format=JobID,MaxRSS,State)",
        on=On.LAST_WORDS,
    ),
    Row(
        "not-a-number",
        # No part of a path or of a host's name, unlike `NaN/Inf`, `-inf` and the end of a sentence.
        r"(?<![/\w.-])[-+]?(?:Na[Nn]|nan|Inf|inf)(?:/(?:Na[Nn]|nan|Inf|inf))?(?![/\w-]|\.\w|:\d)"
        r"|\bNaN-[a-z]|\b(?:non-finite|not finite)\b|Minimum loss scale reached"
        r"|loss scale already at minimum",
        "the training computed NaN or infinity, and the script noticed",
        "look at the data, the learning rate and the loss scale; go on from a checkpoint before it",
        _USER,
        unless=_of_the_place,
    ),
)

# The file that Python names behind an error of the system: its name may be anything.
_FILE = re.compile(r"""(\[Errno \d+\] [^:'"]+): (?:'[^']*'|"[^"]*")""")
_OF_A_CACHE = re.compile(
    r"(?=.*(?:\.triton/|triton_cache|torch_extensions|torchinductor|inductor_cache))"
    r".*(?:No such file or directory: |File exists: |Resource busy: |Stale file handle)"
)
_FILE_TIMED_OUT = re.compile(r"""(\[Errno 110\] [^:'"]+): (?:'/[^']*'|"/[^"]*")""")


def known(error: str, *, loading: bool = False) -> Row | None:
    """Return the row of an exception, None if no row fits; `loading`: `torch.load` raised it."""
    # That a connection timed out is no filesystem's; that a file did, is.
    text = _FILE_TIMED_OUT.sub(r"\1 of a file", error)
    text = (_LOADING if loading else "") + _FILE.sub(r"\1", text)
    text = (_CACHE if _OF_A_CACHE.match(error) else "") + text
    return next((row for row in EXCEPTIONS if row.fits(text)), None)
