# SPDX-License-Identifier: Apache-2.0
"""A filesystem that the kernel's automounter mounts when somebody asks, and a check that asks.

    python -m tests.node.checks.automounter DIRECTORY mounts|fails

In a mount namespace of its own. Prints one line of JSON: status and text of the check.
"""

import fcntl
import json
import os
import struct
import sys
from pathlib import Path

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.filesystem import Filesystem
from slurm_health.node.run import run_checks
from tests.lab import kernel
from tests.node.checks.conftest import planned

# linux/auto_fs.h: what an automount daemon answers, and where a request has its token.
_READY, _FAIL = 0x9360, 0x9361
_TOKEN_AT = 8


def main(directory: Path, mounts: bool) -> None:
    """Mount the automounter's trigger, and serve it beside the check."""
    kernel.unshare(kernel.NEW_MOUNT)
    kernel.keep_mounts_private()
    os.setpgrp()  # whoever is in this group may enter without mounting anything
    requests, kernels_end = os.pipe()
    options = f"fd={kernels_end},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
    kernel.mount_fresh("autofs", directory, options)
    trigger = os.open(directory, os.O_RDONLY)
    daemon = os.fork()
    if daemon == 0:
        serve(requests, trigger, directory, mounts)
    try:
        print(json.dumps(check(directory)), flush=True)
    finally:
        os.kill(daemon, 9)
        os.waitpid(daemon, 0)


def serve(requests: int, trigger: int, directory: Path, mounts: bool) -> None:
    """Be the automount daemon: mount at the first request, or say that it cannot be done."""
    while True:
        (token,) = struct.unpack_from("<I", os.read(requests, 4096), _TOKEN_AT)
        if mounts:
            kernel.mount_fresh("tmpfs", directory)
        fcntl.ioctl(trigger, _READY if mounts else _FAIL, token)


def check(directory: Path) -> tuple[str, str]:
    """Run the check as the hooks do, in a child of another group."""
    mounted = Filesystem(path=str(directory), fstype="tmpfs")
    (result,) = run_checks([planned(mounted)], CheckContext())
    return result.status.value, result.finding.text


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "mounts")
