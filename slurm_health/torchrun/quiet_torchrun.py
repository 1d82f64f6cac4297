# SPDX-License-Identifier: Apache-2.0
"""torchrun, arguments and all, without a traceback from inside it when workers fail.

It leaves no worker behind: torchrun itself leaves one that is stopped, if its store is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    del sys.path[0]  # the modules beside this one must not hide others of the same name
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
    except ImportError as err:
        sys.exit(f"slurm-health: --python: {sys.executable}: cannot load torchrun: {err}")

    try:
        run.main(sys.argv[1:])
    except SignalException as err:
        sys.exit(128 + err.sigval)
    except (ChildFailedError, RendezvousError) as err:
        sys.exit(f"{type(err).__module__}.{type(err).__name__}: {err}")
    finally:
        with contextlib.suppress(OSError):  # it has ended, or the kernel lists no children
            for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
