# SPDX-License-Identifier: Apache-2.0
"""What ranks report when another one has failed: they are victims, and the first failure wins."""

from __future__ import annotations

import re

# The words of gloo, NCCL, torch's stores and rendezvous for a peer that does not answer any more.
_OF_A_PEER = re.compile(
    r"[Cc]onnection (reset|closed|refused|was closed)|Broken pipe|Socket ?[Cc]losed"
    r"|Timed out waiting|Socket Timeout|wait timeout|timeout after|timed out after"
    r"|collective operation timeout|failed to recv, got 0 bytes|Failed to recv"
    r"|ncclRemoteError|remote process exited|ncclSystemError|unhandled system error"
    r"|communicator was aborted|ProcessGroupNCCL.*(watchdog|[Hh]eartbeat)"
    r"|\bDist(Backend|Store|Network)Error\b|\bRendezvous\w*Error\b|SignalException|ChildFailedError"
    r"|NCCL operations have failed or timed out"
)
# The same exceptions with a cause of their own.
_OF_ITSELF = re.compile(
    r"[Mm]ismatch|Duplicate GPU|invalid usage|ncclInvalid|CUDA error|CUDA failure|ECC"
    r"|out of memory|OutOfMemory|[Aa]ddress already in use|EADDRINUSE|No space left"
)


def is_consequence(error: str) -> bool:
    """Tell whether an exception only says that another rank, or the way to it, has failed."""
    return bool(_OF_A_PEER.search(error)) and not _OF_ITSELF.search(error)
