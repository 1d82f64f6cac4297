# SPDX-License-Identifier: Apache-2.0
"""From words to causes: the rows for shells, Slurm and ranks that only waited.

Sources are the texts of CPython, argparse, click, absl, bash, dash, Slurm (`slurm_errno.h`), and of
PyTorch for peers that do not answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurm_health.records.script_records import LAUNCH_FAILED_ADVICE, LAUNCH_FAILED_TEXT
from slurm_health.training.diagnosis.collected import UNKNOWN_CODE
from slurm_health.training.diagnosis.rows import On, Row
from slurm_health.training.diagnosis.words import known
from slurm_health.training.framework import Attribution, Sureness

# The words of gloo, NCCL, torch's stores and rendezvous for a peer that no longer answers.
_OF_A_PEER = re.compile(
    r"[Cc]onnection (reset|closed|refused|was closed)|Broken pipe|Socket ?[Cc]losed"
    r"|Timed out (?:waiting|initializing process group)|Socket Timeout|wait timeout"
    r"|timeout after|timed out after"
    r"|collective operation timeout|failed to recv, got 0 bytes|Failed to recv"
    r"|ncclRemoteError|remote process exited|ncclSystemError|unhandled system error"
    r"|communicator was aborted|ProcessGroupNCCL.*(watchdog|[Hh]eartbeat)"
    r"|\bDist(Backend|Store|Network)Error\b|\bRendezvous\w*Error\b|SignalException|ChildFailedError"
    r"|NCCL operations have failed or timed out"
    # DDP, after an exchange of sizes that timed out; a rank without parameters raises earlier.
    r"|DDP expects same model .{0,80} inconsistent 0 params"
    # gloo that connects all ranks, and the coordination service of JAX
    r"|connectFullMesh failed|DEADLINE_EXCEEDED|waiting for clients"
    r"|Horovod has been shut down|No route to host|network addresses of \(|client socket has "
    r"|cluster registration failed|failed to connect to all addresses"
    # A signal that a launcher or a user sends to all ranks.
    r"|^KeyboardInterrupt\b"
)
# The same exceptions with a cause of their own that no row has.
_OF_ITSELF = re.compile(
    r"[Mm]ismatch|nccl(?:Invalid|Internal)|internal error - |CUDA error|[Cc](?:UDA|uda) failure|ECC"
    r"|shared memory"
)
# Causes of the network between ranks: they count if no rank has one of its own.
_OF_THE_WAY = frozenset({"adapter-not-connected", "address-unreachable", "barrier-not-passed"})


def is_consequence(error: str) -> bool:
    """Return whether an exception only reports the failure of another rank or its network."""
    if not _OF_A_PEER.search(error) or _OF_ITSELF.search(error):
        return False
    row = known(error)
    return row is None or row.name in _OF_THE_WAY


# The last words of a failure without an exception. Other errors of a file, such as a stale handle
# or one of input and output, are no user's mistake.
_GONE = r"No such file or directory|Permission denied|Is a directory|Not a directory"
CORRECT = "correct the submission; started again as it is, it fails again"


def _mistake(
    name: str, pattern: str, says: str, on: On = On.EXCEPTION, codes: Iterable[int] = ()
) -> Row:
    """Return a row for a mistake in the submission."""
    return Row(
        name,
        pattern,
        says,
        CORRECT,
        Attribution.USER,
        Sureness.CERTAIN,
        on=on,
        codes=frozenset(codes),
    )


MISTAKES: tuple[Row, ...] = (
    _mistake(
        "script-not-found",
        r"can't open file '.+': \[Errno (?:2|13|20|21)\]",
        "Python cannot open the file that it should run",
        On.ONE_NODE,
    ),
    _mistake(
        "wrong-arguments",
        r"^\S.*: error: (?:unrecognized arguments|the following arguments are required"
        r"|argument \S+.*: |ambiguous option|one of the arguments )"
        r"|^Error: (?:No such option|Missing (?:option|argument|parameter)|Invalid value"
        r"|Got unexpected extra argument)|FATAL Flags parsing error|^Could not override '",
        "the program does not take these arguments, or its configuration has no such entry",
    ),
    _mistake(
        "command-not-found",
        # Of the batch script itself it may be that the node has lost slurmd's copy.
        rf"error: execve\(\): (?!\S*/slurm_script:).+: (?:{_GONE}|Exec format error)$",
        "srun cannot start the program",
        On.ONE_NODE,
    ),
    _mistake(
        "shell-syntax",
        r": line \d+: (?:syntax error|unexpected EOF while looking for matching)"
        r"|: \d+: Syntax error: ",
        "the shell cannot read the script",
    ),
    _mistake(
        "python-syntax",
        r"^(?:SyntaxError|IndentationError|TabError): ",
        "Python cannot read the program",
    ),
    _mistake(
        "command-not-found",
        rf": command not found$|: \d+: \S+: not found$|: line \d+: .+: (?:{_GONE})$",
        "a command of the script does not exist, or may not be run",
        On.ONE_NODE,
        (126, 127),
    ),
    _mistake(
        "module-not-found",
        r"^\S*python[\d.]*: (?:No module named |Error while finding module)",
        "Python cannot find the module that it should run",
        On.ONE_NODE,
    ),
    _mistake(
        "step-refused",
        r"^There are not enough slots available in the system"  # of mpirun
        r"|OMPI was not built with SLURM's PMI support"
        r"|^srun: error: Unable to create step for job \d+: (?:More processors requested"
        r"|Requested node configuration|Invalid generic resource|Memory required by task"
        r"|Invalid (?:node|partition|account|qos))|^srun: (?:unrecognized|invalid) option"
        r"|^srun: fatal: .+(?:mutually exclusive|by two different environment variables)"
        r"|^srun: error: .*(?i:invalid MPI type)"
        r"|error: (?:Unable to allocate resources|Batch job submission failed): (?:Requested node"
        r"|Requested partition|Invalid |Job violates|Memory specification|More processors)",
        "the job asks for resources that it does not have or may not have, or with options that are"
        " unknown or contradict each other",
    ),
)

# The rendezvous port, if several ranks of one node open it.
SEVERAL_LISTEN = Row(
    "port-in-use",
    "",
    "several ranks opened the rendezvous port: they take themselves for rank 0, or torchrun was"
    " started more than once on a node",
    "take RANK from SLURM_PROCID, or start torchrun once a node (srun --ntasks-per-node=1);"
    " starting it again as it is fails again",
    Attribution.USER,
)

# Rows about nodes, for Slurm and MPI's launchers. `{nodes}` are those, `{node}` is the first of
# them, `{leave}` starts the job without them.
_LEAVE = "{leave} and tell your administrator"
NODE_LOST = Row("node-lost", "", "Slurm lost {nodes} while the job ran", _LEAVE, Attribution.NODE)
A_NODE_LOST = Row(
    "node-lost",
    "",
    "Slurm lost a node of the job, which is not named here",
    "start again: Slurm allocates no node that it has lost; `sinfo -R` and slurmctld's log name it",
    Attribution.NODE,
)
HELD = Row("launch-failed", "", LAUNCH_FAILED_TEXT, LAUNCH_FAILED_ADVICE, Attribution.NODE)
BY_FACT = {
    "memory-broken": Row(
        "memory-broken",
        "",
        "the memory of {nodes} had an error that it could not correct",
        _LEAVE,
        Attribution.NODE,
    ),
    "unkillable": Row(
        "processes-unkillable",
        "",
        "processes of the job on {nodes} did not end by SIGKILL: they wait in the kernel, most"
        " often for a filesystem or a device",
        "look at what they wait for (ps -eo pid,state,wchan,cmd), and whether Slurm has drained"
        " the node (sinfo -R)",
    ),
    "daemon-lost": Row(
        "node-silent",
        "",
        "the launcher lost its daemon on {nodes}: the node, or the network to it",
        "check whether Slurm still reaches it: scontrol show node {node}",
    ),
}
# Why Slurm did not launch a step.
REFUSALS: tuple[Row, ...] = (
    Row(
        "clocks-differ",
        r"[Jj]ob credential expired|(?:Rewound|Expired) credential",
        "the credential of a step had expired when {nodes} read it: the clocks of the"
        " nodes and of slurmctld's host differ, or the launch took minutes",
        "tell your administrator: compare the clocks (chronyc tracking) of these nodes and"
        " of the host of slurmctld; the wrong clock may be on either",
    ),
    Row(
        "launch-refused",
        r"[Ii]nvalid job credential|authentication|[Mm]unge|MUNGE",
        "{nodes} did not accept the credential of a step: munge there, its key or its"
        " daemon, does not agree with the others",
        "{leave} and tell your administrator: munge -n | ssh {node} unmunge",
        Attribution.NODE,
    ),
    Row(
        "launch-failed",
        r"[Cc]ould not (?:create|make)|No space left|[Rr]ead-only|User not found|could not set up"
        r"|[Ii]nvalid user|slurmd internal error|[Pp]rolog",
        "{nodes} could not launch a step: its spool directory, disk, accounts or prolog",
        "{leave} and tell your administrator (SlurmdSpoolDir, slurmd's log there)",
        Attribution.NODE,
    ),
    Row(
        "node-silent",
        r"[Cc]onnection failure|[Cc]onnection refused|[Nn]o route|timed out|Zero Bytes",
        "slurmd on {nodes} did not answer the launch of a step: the daemon, the node, or the"
        " network to it",
        "check whether Slurm still reaches it: scontrol show node {node}",
    ),
    Row(
        "step-refused",
        r"cpu bind request|layout tasks|[Ii]nvalid (?:cpu|mem)\w* |MPI plugin",
        "the job asks Slurm for a step that its allocation does not allow: {why}",
        CORRECT,
        Attribution.USER,
    ),
    Row(
        "launch-failed",
        r"",
        "Slurm could not launch a step: {why}",
        "read slurmd's log there; check the nodes before the next start",
    ),
)

# The exceptions of ranks that only waited, if all ranks raise one of them. Their words do not lead
# from broken connections to a cause.
_AGAIN_WITH_RECORDER = "start again with --flight-recorder=on"
WAITS: tuple[Row, ...] = (
    Row(
        "rendezvous-never-formed",
        r"Timed out initializing process group|Rendezvous(?:Connection|Timeout|Closed)Error"
        r"|waiting for clients|wait timeout after \d+ms, keys: /default_pg|connectFullMesh failed"
        r"|\(gai error: "
        r"|DEADLINE_EXCEEDED: (?:Barrier timed out.{0,40}(?:PjRT_Client_Connect|to_register)"
        r"|.*RegisterTask)|cluster registration failed"
        r"|client socket has (?:timed out|failed to connect)|while trying to connect to",
        "the ranks never met{where}: a rank did not start, listened elsewhere, or the way there is"
        " closed",
        "check that all nodes start their ranks with one address and port; the check before the"
        " script tests the connections of the nodes",
    ),
    Row(
        "interrupted",
        r"^KeyboardInterrupt\b",
        "the ranks were interrupted (SIGINT): by Ctrl-C, by scancel --signal=INT, or by a program"
        " of the job",
        "",
        Attribution.OUTSIDE,
    ),
    Row(
        "watchdog-stuck",
        r"watchdog (?:got stuck|hang)",
        "PyTorch ended ranks because NCCL's watchdog got stuck: a call of CUDA or NCCL did not"
        " return, or a thread of the program held Python's lock (the GIL)",
        f"{_AGAIN_WITH_RECORDER}; if it happens again, look at the stacks of all threads before"
        " the ranks end (py-spy dump --native)",
        sureness=Sureness.POSSIBLE,
    ),
    Row(
        "collective-timed-out",
        # NCCL's watchdog of a work that took too long, and DDP of sizes that never came.
        r"collective operation timeout|NCCL operations have failed or timed out"
        r"|inconsistent 0 params",
        "ranks waited in a collective until NCCL's watchdog ended them; the collected data does not"
        " show which rank never entered it, or which connection carried no data",
        f"{_AGAIN_WITH_RECORDER}, which shows it at the next hang; the check before the script"
        " tests these nodes' connections",
        sureness=Sureness.POSSIBLE,
    ),
    Row(
        "connections-broke",
        r"",
        "connections between ranks broke or timed out; the collected data does not show which node"
        " was the cause",
        "start again; the check before the script tests these nodes' connections",
        Attribution.TRANSIENT,
        Sureness.POSSIBLE,
    ),
)


def mistake(text: str, code: int) -> Row | None:
    """Return the mistake in the last words of a process with this exit code."""
    fitting = (row for row in MISTAKES if row.fits(text))
    return next(
        (row for row in fitting if not row.codes or code in {*row.codes, UNKNOWN_CODE}), None
    )


def common(rows: Iterable[Row], texts: Iterable[str]) -> Row:
    """Return the first row that fits all texts; the last one fits any."""
    all_texts = list(texts)
    return next(row for row in rows if all(map(row.fits, all_texts)))
