# SPDX-License-Identifier: Apache-2.0
"""How fast two nodes write to each other through each adapter, by perftest where it is installed.

Without NCCL in between: all adapters at once, one direction after the other. Nothing here is held
against a node but a time: a tool that is absent, or fails, leaves an adapter out. It needs no torch
but to find the GPU next to an adapter: light workers run it between the memories of hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union

from slurm_health.preflight.probes import adapters
from slurm_health.preflight.probes.context import Board, NotMeasured, ProbeContext, Sample

# For the runs of one direction, and for those who serve them to be there.
DEADLINE_S, LISTENS_S = 30.0, 10.0
POLL_S = 0.02
# With it, the kernel lets adapters reach the memory of GPUs.
_GPUDIRECT = "module/nvidia_peermem"
_ANY_PORT = 9  # no packet is sent: connecting a datagram socket only chooses a route

Said = Union[float, str]  # noqa: UP007 - Gbit/s, or why not; read by older Pythons too
TOOL = "ib_write_bw"
# 17 GB: a third of a second at 400 Gbit/s, 14 s at 10.
MESSAGE_BYTES, MESSAGES = 8 << 20, 2000
FEW_MESSAGES = 200  # where a check is to take a second: five times what the tool writes by itself
_HELP_S = 5.0
_LISTEN = "0A"
_TABLES = ("net/tcp", "net/tcp6")
# bytes, iterations, peak and average Gbit/s, messages per microsecond
_ROW = re.compile(rf"^\s*{MESSAGE_BYTES}\s+\d+\s+[\d.]+\s+([\d.]+)\s", re.M)


def measure(context: ProbeContext) -> list[Sample]:
    """Measure each adapter that both nodes of a pair use, on the first worker of each.

    Returns:
        One sample for each adapter, of quantity `mlx5_0` or, from and to a GPU's memory,
        `mlx5_0 GPUDirect`: the time of a message in the slower direction. What is left out has no
        times, and its figure `left_out` says why.
    """
    if context.local_rank or context.board is None or context.world_size != 2 * context.local_size:
        return []
    mine = own_end(context, context.board, os.environ, adapters.SYS)
    return between(context.board, context.rank // context.local_size, mine, os.environ)


def own_end(
    context: ProbeContext, board: Board, environ: Mapping[str, str], sys: Path
) -> dict[str, Any]:
    """Return what the other node must know of this one.

    `lacks` is why nothing can be measured, `gpus` the nearest GPU of each adapter, -1 without
    GPUDirect, `address` where this node is reached, and `messages` how many are written.
    """
    end: dict[str, Any] = {
        "lacks": "",
        "gpus": {},
        "address": _address(context, board),
        "messages": MESSAGES if context.on_cuda else FEW_MESSAGES,
    }
    tool = shutil.which(TOOL, path=environ.get("PATH"))
    if tool is None:
        return {**end, "lacks": f"{TOOL} (perftest) is not installed"}
    try:
        found = adapters.used(environ, sys)
    except NotMeasured as err:
        return {**end, "lacks": str(err)}
    if not found:
        return {**end, "lacks": "there is no adapter that NCCL would use"}
    nearest = dict.fromkeys((each.name for each in found), -1)
    if context.on_cuda and (sys / _GPUDIRECT).is_dir() and takes_gpus(tool, environ):
        from slurm_health.preflight.probes import nic_loopback  # with torch

        places = nic_loopback.places(context.local_size)
        nearest = {each.adapter: each.devices[0] for each in nic_loopback.lanes(found, places)}
    return {**end, "gpus": nearest}


def _address(context: ProbeContext, board: Board) -> str:
    """Return where the other node reaches this one: the first is where the group meets."""
    if context.rank == 0:
        return board.address
    family = socket.AF_INET6 if ":" in board.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((board.address, _ANY_PORT))
        return str(probe.getsockname()[0])


def between(
    board: Board, place: int, mine: dict[str, Any], environ: Mapping[str, str]
) -> list[Sample]:
    """Measure between the two nodes of a group, of which this one has such a place: 0 or 1."""
    board.tell(f"end/{place}", json.dumps(mine))
    theirs = json.loads(board.hear(f"end/{1 - place}"))
    lacks = mine["lacks"] or (theirs["lacks"] and f"the other node: {theirs['lacks']}")
    both = [adapter for adapter in mine["gpus"] if adapter in theirs["gpus"]]
    if lacks or not both:
        return [_left_out(lacks or "the adapters of the other node have other names")]
    by_gpu = min(*mine["gpus"].values(), *theirs["gpus"].values()) >= 0
    gpus = {adapter: mine["gpus"][adapter] if by_gpu else -1 for adapter in both}
    messages = min(mine["messages"], theirs["messages"])
    places = [RunEnd(each, gpu=gpu, messages=messages) for each, gpu in gpus.items()]
    found = [
        _serve(board, way, places, environ)
        if place == way
        else _write(board, way, places, theirs["address"], environ)
        for way in (0, 1)
    ]
    return [_sample(adapter, [said[adapter] for said in found], by_gpu=by_gpu) for adapter in both]


def _left_out(why: str, adapter: str = "") -> Sample:
    return Sample(quantity=adapter, figures={"left_out": why})


def _sample(adapter: str, said: list[Said], *, by_gpu: bool) -> Sample:
    quantity = f"{adapter} GPUDirect" if by_gpu else adapter
    rates = [each for each in said if isinstance(each, float) and each > 0]
    if len(rates) < len(said):
        return _left_out(next(str(each) for each in said if each not in rates), quantity)
    slower_ms = MESSAGE_BYTES * 8 / min(rates) / 1e6
    return Sample(
        iteration_ms=[slower_ms],
        quantity=quantity,
        shared=True,
        total_bytes=MESSAGE_BYTES,
        figures={"gbit_per_s_to_first": rates[0], "gbit_per_s_to_second": rates[1]},
    )


def _serve(
    board: Board, way: int, ends_of: Sequence[RunEnd], environ: Mapping[str, str]
) -> dict[str, Said]:
    """Be written to; return what the other node has measured of each adapter."""
    with contextlib.ExitStack() as ends:
        places = [replace(each, port=_free_port()) for each in ends_of]
        runs = {place: ends.enter_context(_run(place, "", environ)) for place in places}

        def is_there(place: RunEnd) -> bool:
            return runs[place].has_ended() or is_listening(place.port)

        _wait(board, lambda: all(map(is_there, places)), LISTENS_S)
        failed = {each.adapter: run.said() for each, run in runs.items() if run.has_ended()}
        ports = {each.adapter: each.port for each in places}
        board.tell(f"ports/{way}", json.dumps({**ports, **failed}))
        found: dict[str, Said] = json.loads(board.hear(f"rates/{way}"))
        return found


def _write(
    board: Board,
    way: int,
    ends_of: Sequence[RunEnd],
    server: str,
    environ: Mapping[str, str],
) -> dict[str, Said]:
    """Write to the other node; tell it what that came to."""
    told = json.loads(board.hear(f"ports/{way}"))
    found: dict[str, Said] = {each: why for each, why in told.items() if isinstance(why, str)}
    with contextlib.ExitStack() as ends:
        runs = {
            each.adapter: ends.enter_context(
                _run(replace(each, port=told[each.adapter]), server, environ)
            )
            for each in ends_of
            if each.adapter not in found
        }
        _wait(board, lambda: all(run.has_ended() for run in runs.values()), DEADLINE_S)
        found.update((adapter, run.said()) for adapter, run in runs.items())
    board.tell(f"rates/{way}", json.dumps(found))
    return found


def _run(place: RunEnd, server: str, environ: Mapping[str, str]) -> OneEnd:
    tool = shutil.which(TOOL, path=environ.get("PATH")) or TOOL
    return OneEnd(command(tool, place, server, environ), environ)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return int(one.getsockname()[1])


def _wait(board: Board, has_come: Callable[[], bool], most_s: float) -> None:
    """Return once something has come, or after a time; raise once the round was stopped."""
    end_s = time.monotonic() + most_s
    while not has_come() and time.monotonic() < end_s:
        board.check()
        time.sleep(POLL_S)


@dataclass(frozen=True)
class RunEnd:
    """One end of a run: an adapter, a TCP port for its two ends to meet, and a GPU (-1: none).

    With a GPU the data comes from its memory, or goes there, by GPUDirect.
    """

    adapter: str
    port: int = 0
    gpu: int = -1
    messages: int = MESSAGES


def command(tool: str, place: RunEnd, server: str, environ: Mapping[str, str]) -> list[str]:
    """Return the command line of one end; that of the serving one has no `server`.

    RoCE needs the number of an address: the one that NCCL is given is taken.
    """
    gid = environ.get("NCCL_IB_GID_INDEX", "")
    return [
        *(tool, "-d", place.adapter, "-p", str(place.port), "-F", "--report_gbits"),
        *("-s", str(MESSAGE_BYTES), "-n", str(place.messages)),
        *(("-x", gid) if gid.isdecimal() else ()),
        *((f"--use_cuda={place.gpu}",) if place.gpu >= 0 else ()),
        *((server,) if server else ()),
    ]


def takes_gpus(tool: str, environ: Mapping[str, str]) -> bool:
    """Tell whether it was built with GPUDirect: most distributions' is not."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        said = subprocess.run(
            [tool, "--help"],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_HELP_S,
        )
        return b"--use_cuda" in said.stdout + said.stderr
    return False


def is_listening(port: int, proc: Path = Path("/proc/self")) -> bool:
    """Tell whether somebody on this machine listens on a port: to connect would use it up."""
    for table in _TABLES:
        with contextlib.suppress(OSError):
            for line in (proc / table).read_text().splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                if state == _LISTEN and int(local.rpartition(":")[2], 16) == port:
                    return True
    return False


class OneEnd:
    """One end of a run, in a process of its own. What it prints is less than a pipe holds."""

    def __init__(self, words: list[str], environ: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            words,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def __enter__(self) -> OneEnd:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with self._process:  # waits, and closes its pipe
            pass

    def has_ended(self) -> bool:
        """Tell whether it has."""
        return self._process.poll() is not None

    def said(self) -> float | str:
        """Return the average in Gbit/s, or its own last words where it has none."""
        if not self.has_ended():
            return "no result in time"
        assert self._process.stdout is not None
        output = self._process.stdout.read()
        found = _ROW.search(output)
        if found and not self._process.returncode:
            return float(found.group(1))
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        return f"{TOOL}: {lines[-1] if lines else f'exit code {self._process.returncode}'}"
