# SPDX-License-Identifier: Apache-2.0
"""A FUSE filesystem with a root and nothing else: `failing_filesystem.py MOUNTPOINT ERROR`.

Every lookup fails with that error, and so does making something; with `hang` it is never answered:
who asks waits in state D, and no SIGKILL ends that, until this process ends. With `EDQUOT` lookups
find nothing.
"""

import ctypes
import errno
import os
import struct
import sys

# Of linux/fuse.h.
_LOOKUP, _FORGET, _GETATTR, _STATFS, _INIT, _INTERRUPT, _BATCH_FORGET = 1, 2, 3, 17, 26, 36, 42
_HEAD = struct.Struct("<IIQQIIII")
_NOSUID_NODEV = 6
_BUFFER = 1 << 20
# The root: a directory that anyone may write.
_ROOT = struct.pack("<6Q10I", 1, 4096, 8, 0, 0, 0, 0, 0, 0, 0o40777, 2, 0, 0, 0, 4096, 0)


def main(point: str, error: str) -> None:
    """Serve until this process is ended."""
    device = os.open("/dev/fuse", os.O_RDWR)
    libc = ctypes.CDLL(None, use_errno=True)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    kind = f"fuse.{error.lower()}"
    if libc.mount(b"played", point.encode(), kind.encode(), _NOSUID_NODEV, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), point)
    print("mounted", flush=True)
    number = getattr(errno, error, 0)
    while True:
        data = os.read(device, _BUFFER)
        _, operation, unique, node, *_ = _HEAD.unpack_from(data)
        body, failure = b"", number or errno.ENOSYS
        if operation == _INIT:
            body = struct.pack("<IIIIHHII", 7, 31, 65536, 0, 12, 9, 65536, 1) + bytes(36)
        elif operation == _GETATTR and node == 1:
            body = struct.pack("<QII", 3600, 0, 0) + _ROOT
        elif operation == _STATFS:
            body = bytes(80)
        elif operation in (_FORGET, _INTERRUPT, _BATCH_FORGET):
            continue  # these want no answer
        elif operation == _LOOKUP and not number:
            continue  # read, and not answered
        elif operation == _LOOKUP and number == errno.EDQUOT:
            failure = errno.ENOENT
        head = struct.pack("<IiQ", 16 + len(body), 0 if body else -failure, unique)
        os.write(device, head + body)


if __name__ == "__main__":
    main(*sys.argv[1:])
