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
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

from slurm_health.preflight.probes import adapters, perftest
from slurm_health.preflight.probes.context import Board, NotMeasured, ProbeContext, Sample

# For the runs of one direction, and for those who serve them to be there.
DEADLINE_S, LISTENS_S = 30.0, 10.0
POLL_S = 0.02
# With it, the kernel lets adapters reach the memory of GPUs.
_GPUDIRECT = "module/nvidia_peermem"
_ANY_PORT = 9  # no packet is sent: connecting a datagram socket only chooses a route

Said = Union[float, str]  # noqa: UP007 - Gbit/s, or why not; read by older Pythons too


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
        "messages": perftest.MESSAGES if context.on_cuda else perftest.FEW_MESSAGES,
    }
    tool = shutil.which(perftest.TOOL, path=environ.get("PATH"))
    if tool is None:
        return {**end, "lacks": f"{perftest.TOOL} (perftest) is not installed"}
    try:
        found = adapters.used(environ, sys)
    except NotMeasured as err:
        return {**end, "lacks": str(err)}
    if not found:
        return {**end, "lacks": "there is no adapter that NCCL would use"}
    nearest = dict.fromkeys((each.name for each in found), -1)
    if context.on_cuda and (sys / _GPUDIRECT).is_dir() and perftest.takes_gpus(tool, environ):
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
    places = [perftest.RunEnd(each, gpu=gpu, messages=messages) for each, gpu in gpus.items()]
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
    slower_ms = perftest.MESSAGE_BYTES * 8 / min(rates) / 1e6
    return Sample(
        iteration_ms=[slower_ms],
        quantity=quantity,
        shared=True,
        total_bytes=perftest.MESSAGE_BYTES,
        figures={"gbit_per_s_to_first": rates[0], "gbit_per_s_to_second": rates[1]},
    )


def _serve(
    board: Board, way: int, ends_of: Sequence[perftest.RunEnd], environ: Mapping[str, str]
) -> dict[str, Said]:
    """Be written to; return what the other node has measured of each adapter."""
    with contextlib.ExitStack() as ends:
        places = [replace(each, port=_free_port()) for each in ends_of]
        runs = {place: ends.enter_context(_run(place, "", environ)) for place in places}

        def is_there(place: perftest.RunEnd) -> bool:
            return runs[place].has_ended() or perftest.is_listening(place.port)

        _wait(board, lambda: all(map(is_there, places)), LISTENS_S)
        failed = {each.adapter: run.said() for each, run in runs.items() if run.has_ended()}
        ports = {each.adapter: each.port for each in places}
        board.tell(f"ports/{way}", json.dumps({**ports, **failed}))
        found: dict[str, Said] = json.loads(board.hear(f"rates/{way}"))
        return found


def _write(
    board: Board,
    way: int,
    ends_of: Sequence[perftest.RunEnd],
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


def _run(place: perftest.RunEnd, server: str, environ: Mapping[str, str]) -> perftest.Run:
    tool = shutil.which(perftest.TOOL, path=environ.get("PATH")) or perftest.TOOL
    return perftest.Run(perftest.command(tool, place, server, environ), environ)


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
