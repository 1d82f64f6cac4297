# SPDX-License-Identifier: Apache-2.0
"""NCCL's RAS service, played by a server that speaks its protocol as NCCL 2.28.7 and later do."""

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from slurm_health.records.script_records import Diagnosed
from slurm_health.system.killable import Answered, run_one
from slurm_health.training.diagnosis.hang import HangDiagnostician
from slurm_health.training.diagnosis.ras import RasStatus
from slurm_health.training.diagnosis.samples import RankSample, Standstill
from slurm_health.training.framework import DataManager, NothingCollected
from slurm_health.training.monitor.containment import collect
from slurm_health.training.monitor.nccl_ras import NcclRas
from tests.support.rows import rows

LIMIT_S = 20.0
RANKS = 4


def communicator(
    launched: dict[int, int], missing: dict[int, str], name: str = "0x5a"
) -> dict[str, Any]:
    return {
        "hash": name,
        "secondary_hash": "0x1:0x2",
        "size": len(launched) + len(missing),
        "ranks_count": len(launched),
        "missing_ranks_count": len(missing),
        "ranks": [
            {
                "rank": rank,
                "host": f"10.0.0.{rank + 1}",
                "pid": 100 + rank,
                "cuda_dev": 0,
                "nvml_dev": 0,
                "status": {"init_state": 0, "async_error": 0, "abort_flag": False},
                "collective_counts": {"Broadcast": 1, "AllReduce": count - 1},
            }
            for rank, count in launched.items()
        ],
        "missing_ranks": [
            {
                "rank": rank,
                "host": f"10.0.0.{rank + 1}",
                "pid": 100 + rank,
                "status": {"unresponsive": True, "considered_dead": how == "dead"},
            }
            for rank, how in missing.items()
        ],
    }


def status(*communicators: dict[str, Any]) -> bytes:
    said = {
        "nccl_version": "2.30.7",
        "communicators_count": len(communicators),
        "communicators": communicators,
        "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
    }
    return json.dumps(said, indent=2).encode()


Serve = Callable[..., dict[str, str]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start a server that answers with these bytes; return the environment that names it."""
    servers: list[socket.socket] = []

    def start(answer: bytes, *, json_known: bool = True, silent: bool = False) -> dict[str, str]:
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def talk() -> None:
            client, _ = server.accept()
            with client, client.makefile("rwb", buffering=0) as lines:
                for line in lines:
                    words = line.decode().strip().lower()
                    if silent:
                        continue
                    if words.startswith("client protocol"):
                        lines.write(b"SERVER PROTOCOL 2\n")
                    elif words == "verbose status":
                        lines.write(answer)
                        return
                    elif words.startswith("set format") and not json_known:
                        lines.write(f"ERROR: Unknown command {words}\n".encode())
                    else:
                        lines.write(b"OK\n")

        threading.Thread(target=talk, daemon=True).start()
        return {"NCCL_RAS_ADDR": f"127.0.0.1:{server.getsockname()[1]}"}

    yield start
    for each in servers:
        each.close()


def standstill() -> Standstill:
    """All ranks are alive and do not say where they are; two nodes have the same process number."""
    return Standstill(
        stalled_s=60.0,
        allowance_s=25.0,
        step=7,
        nodes=tuple(f"n{rank}" for rank in range(RANKS)),
        ranks=tuple(
            RankSample(rank=rank, node=f"n{rank}", pid=100 + rank, state="S")
            for rank in range(RANKS)
        ),
    )


def asked(environ: dict[str, str], limit_s: float) -> NcclRas:
    collector = NcclRas(limit_s)
    collector.environ = environ
    return collector


def found(environ: dict[str, str]) -> Diagnosed:
    data = collect([NcclRas(LIMIT_S)], environ, [standstill()], limit_s=LIMIT_S)
    diagnosed = HangDiagnostician().diagnose(data_manager=data).diagnosed
    assert diagnosed is not None
    return diagnosed


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """Of each communicator how much ranks launched and how others are missing; the conclusion."""

    groups: list[tuple[dict[int, int], dict[int, str]]]
    cause: str
    ranks: list[int]
    nodes: list[str]
    sureness: str
    says: list[str]


@rows
def test_the_rank_that_nccl_shows_to_hold_up_others_is_named_and_no_node_accused(
    serve: Serve, case: Case
) -> None:
    named = enumerate(case.groups, 1)
    cause = found(serve(status(*(communicator(*group, f"0x{n}") for n, group in named))))

    text = "\n".join([cause.description, *cause.evidence])
    assert (cause.cause, cause.ranks, cause.nodes) == (case.cause, case.ranks, case.nodes)
    assert case.sureness in ("", cause.sureness)
    assert [words for words in case.says if words not in text] == []
    assert cause.accused == []


@pytest.mark.parametrize(
    ("answer", "how", "why"),
    [
        (b"", {"json_known": False}, "JSON comes with NCCL 2.28.7"),
        (b"NCCL version 2.24\n", {}, "malformed"),
        (b"", {"silent": True}, "no answer in time"),
        (b'{"communicators": 5}', {}, "Expected `array`"),
    ],
)
def test_what_does_not_answer_as_nccl_does_says_why(
    serve: Serve, answer: bytes, how: dict[str, bool], why: str
) -> None:
    with pytest.raises(NothingCollected, match=why):
        asked(serve(answer, **how), 1.0).collect_data()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "[::1]:x"])
def test_where_nobody_listens_it_is_off_and_why(address: str) -> None:
    environ = {"NCCL_RAS_ADDR": address}
    data: DataManager = collect([NcclRas(LIMIT_S)], environ, [standstill()], limit_s=LIMIT_S)

    assert data.get(RasStatus) is None
    assert address in data.missing["nccl-ras"]


def test_where_it_was_switched_off_nobody_is_asked() -> None:
    data = collect([NcclRas(LIMIT_S)], {"NCCL_RAS_ENABLE": "0"}, limit_s=LIMIT_S)

    assert data.missing == {"nccl-ras": "NCCL_RAS_ENABLE is 0"}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_who_listens_on_the_port_is_not_believed(serve: Serve) -> None:
    environ = serve(status(communicator({0: 42, 1: 41}, {})))

    def ask() -> bytes:
        os.setresuid(65534, 65534, 65534)
        try:
            asked(environ, LIMIT_S).collect_data()
        except NothingCollected as err:
            return str(err).encode()
        return b"believed"

    ended = run_one(ask, LIMIT_S)
    assert isinstance(ended, Answered)
    assert b"no process of this user" in ended.data
