# SPDX-License-Identifier: Apache-2.0
"""A FUSE filesystem that never answers: `hung_mount.py DIRECTORY`, as root, until it is killed.

Whoever looks below the directory waits in the kernel, as on a file server that is gone.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.lab import kernel


def main(directory: Path) -> None:
    """Mount, say so, and wait for the end."""
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    kernel.mount_fresh("fuse", directory, options)
    print("mounted", flush=True)
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
