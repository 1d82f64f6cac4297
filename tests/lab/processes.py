# SPDX-License-Identifier: Apache-2.0
"""Reads /proc: which process is whose."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Process:
    pid: int
    name: str
    argv: tuple[str, ...]


def namespace(pid: int, kind: str) -> str | None:
    """Which namespace of a kind (pid, uts, net, mnt) a process is in; None if it is gone."""
    try:
        return str((PROC / str(pid) / "ns" / kind).readlink())
    except OSError:
        return None


def in_namespace_of(holder: int, kind: str) -> Iterator[int]:
    """All processes that share the holder's namespace of this kind."""
    wanted = namespace(holder, kind)
    if wanted is None:
        return
    for entry in PROC.iterdir():
        if entry.name.isdigit() and namespace(int(entry.name), kind) == wanted:
            yield int(entry.name)


def host_pids(init_pid: int) -> dict[int, int]:
    """Number inside the lab → number outside, for every process of the lab."""
    found = {}
    for pid in in_namespace_of(init_pid, "pid"):
        for line in _read(pid, "status").splitlines():
            if line.startswith("NSpid:"):
                found[int(line.split()[-1])] = pid
    return found


def state(pid: int) -> str | None:
    """The process's state (R, S, D, T, Z, ...); None if it is gone."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return fields[0] if fields else None


def on_node(holder: int) -> Iterator[Process]:
    """The live processes of one node, its holder excepted."""
    for pid in in_namespace_of(holder, "uts"):
        if pid != holder and state(pid) not in (None, "Z"):
            name = _read(pid, "stat").partition("(")[2].rpartition(")")[0]
            argv = tuple(_read(pid, "cmdline").split("\0")[:-1])
            yield Process(pid=pid, name=name, argv=argv)


def _read(pid: int, name: str) -> str:
    try:
        return (PROC / str(pid) / name).read_text(errors="replace")
    except OSError:
        return ""
