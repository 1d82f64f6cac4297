# SPDX-License-Identifier: Apache-2.0
"""How slurm-health starts itself in another process or on another node."""

from __future__ import annotations

import sys


def own_command(*arguments: str) -> tuple[str, ...]:
    """Return a command line of this slurm-health, for another process or node.

    `-P` keeps the working directory off the module path: it may hold a `click.py` of the user's.
    """
    return own_module("slurm_health", *arguments)


def own_module(module: str, *arguments: str) -> tuple[str, ...]:
    """Return a command line that runs a module of ours with this interpreter."""
    # Where we were started without PYTHONPATH and PYTHONHOME, they belong to another Python.
    flags = ("-E", "-P") if sys.flags.ignore_environment else ("-P",)
    return (sys.executable, *flags, "-m", module, *arguments)
