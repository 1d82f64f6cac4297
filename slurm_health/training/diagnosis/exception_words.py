# SPDX-License-Identifier: Apache-2.0
"""What the words of an exception say of it: its kind, whose it is, what it is a consequence of."""

from __future__ import annotations

import re

_END_OF_NAME = re.compile(r"(?<!:):(?!:)")  # two colons are C++'s, within the name
# Exceptions that Python raises for a program's own mistakes, whatever their words.
OF_THE_PROGRAM = frozenset(
    {
        "AssertionError",
        "AttributeError",
        "IndentationError",
        "IndexError",
        "KeyError",
        "NameError",
        "NotImplementedError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
        "ValueError",
        "ZeroDivisionError",
    }
)
# Exceptions that what is on the node, or is not there, may cause.
OF_THE_PLACE = frozenset(
    {
        "FileNotFoundError",
        "ImportError",
        "IsADirectoryError",
        "ModuleNotFoundError",
        "NotADirectoryError",
        "OSError",
        "PermissionError",
    }
)
# The words of gloo, NCCL, torch's stores and rendezvous for a peer that does not answer any more.
_OF_A_PEER = re.compile(
    r"[Cc]onnection (reset|closed|refused|was closed)|Broken pipe|Socket ?[Cc]losed"
    r"|Timed out waiting|Socket Timeout|wait timeout|timeout after|timed out after"
    r"|collective operation timeout|failed to recv, got 0 bytes|Failed to recv"
    r"|ncclRemoteError|remote process exited|ncclSystemError|unhandled system error"
    r"|communicator was aborted|ProcessGroupNCCL.*(watchdog|[Hh]eartbeat)"
    r"|\bDist(Backend|Store|Network)Error\b|\bRendezvous\w*Error\b|SignalException|ChildFailedError"
    r"|NCCL operations have failed or timed out"
    # DDP compares sizes that an exchange which timed out did not bring; a rank that has none raises
    # something else before.
    r"|DDP expects same model .{0,80} inconsistent 0 params"
)
# The same exceptions with a cause of their own.
_OF_ITSELF = re.compile(
    r"[Mm]ismatch|Duplicate GPU|invalid usage|ncclInvalid|CUDA error|[Cc](?:UDA|uda) failure|ECC"
    r"|out of memory|OutOfMemory|[Aa]ddress already in use|EADDRINUSE|No space left"
    r"|shared memory|no socket interface found|is neither AF_INET|Call to ibv_reg_"
)


def kind_of(error: str) -> str:
    """Return the name of an exception without its module or namespace: `KeyError`."""
    name = _END_OF_NAME.split(error, maxsplit=1)[0]
    return name.rpartition(".")[2].rpartition("::")[2].strip()


def alike(error: str) -> str:
    """Return an exception without what differs from rank to rank: figures and addresses."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", error)


def is_consequence(error: str) -> bool:
    """Tell whether an exception only says that another rank, or the way to it, has failed."""
    return bool(_OF_A_PEER.search(error)) and not _OF_ITSELF.search(error)
