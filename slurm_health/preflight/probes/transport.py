# SPDX-License-Identifier: Apache-2.0
"""By which way data goes between nodes: what NCCL says of itself, or the interface of gloo.

NCCL has no call for it, but logs it for each connection. It writes its log into memory, from which
it is read here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path

_OWN_LOG = "/proc/self/fd/"
# n1:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA
# By way of a neighbour (PXN) the rank of that follows: NET/IB/3(2)/GDRDMA
_WAY = re.compile(r" via (NET/\w+)/\d+(?:\(\d+\))?(/GDRDMA)?")


def record(environ: MutableMapping[str, str]) -> None:
    """Have NCCL write of its network into memory, unless the user wants its log elsewhere."""
    if "NCCL_DEBUG" in environ or "NCCL_DEBUG_FILE" in environ:
        return
    environ["NCCL_DEBUG"] = "INFO"
    environ["NCCL_DEBUG_SUBSYS"] = "NET"
    environ["NCCL_DEBUG_FILE"] = f"{_OWN_LOG}{os.memfd_create('nccl-log')}"


def used(environ: Mapping[str, str], *, on_cuda: bool) -> str:
    """Return the ways by which data has gone so far, empty where that is not known."""
    if not on_cuda:
        return environ.get("GLOO_SOCKET_IFNAME", "")
    log = environ.get("NCCL_DEBUG_FILE", "")
    if not log.startswith(_OWN_LOG):
        return ""
    found = _WAY.findall(Path(log).read_text(errors="replace"))
    ways = (way + (" with GPUDirect RDMA" if direct else "") for way, direct in found)
    return " and ".join(sorted(set(ways)))
