#!/usr/bin/python3
# SPDX-License-Identifier: Apache-2.0
"""A FUSE filesystem that answers for its root and nothing else: `hanging_filesystem.py MOUNTPOINT`.

A process that looks up a name below it is in state D, and SIGKILL does not end it, until this
process ends. Needs root, and nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_LOOKUP, _FORGET, _GETATTR, _STATFS, _INIT, _INTERRUPT, _FORGETS = 1, 2, 3, 17, 26, 36, 42
_NO_SUCH_CALL = -38
_ATTRIBUTES = struct.pack("<6Q10I", 1, 4096, 8, 0, 0, 0, 0, 0, 0, 0o40777, 2, 0, 0, 0, 4096, 0)
_ANSWERS = {
    _INIT: struct.pack("<IIIIHHII", 7, 31, 65536, 0, 12, 9, 65536, 1) + bytes(36),
    _GETATTR: struct.pack("<QII", 3600, 0, 0) + _ATTRIBUTES,
    _STATFS: bytes(80),
}


def main(where: str) -> None:
    """Mount it, and answer until this process is killed."""
    os.makedirs(where, exist_ok=True)  # noqa: PTH103 - Python of another release may run it
    fuse = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={fuse},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"hang", where.encode(), b"fuse.hang", 6, options):
        sys.exit(os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    while True:
        data = os.read(fuse, 1 << 20)
        call, unique = struct.unpack_from("<IQ", data, 4)
        if call in (_LOOKUP, _FORGET, _INTERRUPT, _FORGETS):
            continue
        body = _ANSWERS.get(call)
        head = struct.pack("<IiQ", 16 + len(body or b""), 0 if body else _NO_SUCH_CALL, unique)
        os.write(fuse, head + (body or b""))


if __name__ == "__main__":
    main(sys.argv[1])
