# SPDX-License-Identifier: Apache-2.0
"""A fleet's own figures become limits only where they come from enough devices."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from slurm_health.fleet.standing import baseline
from slurm_health.fleet.standing.baseline import COPY, MATMUL, Baseline, baselines, limits
from slurm_health.fleet.standing.observation import CheckFigure, Observation
from slurm_health.preflight.expectations import bases, expectation_of, expectations_from
from slurm_health.preflight.session.conclusion import with_limits
from slurm_health.records.records import Sampled, WorkersReady
from slurm_health.records.verdict import Level, NodeVerdict, Verdict
from tests.cli.test_history import LONG_AGO, called
from tests.support.command_line import slurm_health
from tests.support.fake_slurm import FakeSlurm
from tests.support.journals import RunJournal

MODEL = "NVIDIA H200"
TABLE = expectations_from({}, "the table")


def checked(
    node: int, gflop_per_s: float = 750e3, *, level: Level = Level.HEALTHY, devices: int = 8
) -> Observation:
    uuids = [f"GPU-{node:04}-{number}" for number in range(devices)]
    figures = [CheckFigure(uuid, MATMUL, gflop_per_s) for uuid in uuids]
    figures += [CheckFigure(uuid, COPY, 4100.0) for uuid in uuids]
    whole = CheckFigure("", MATMUL, gflop_per_s)
    return Observation(node=f"n{node}", model=MODEL, level=level, figures=(whole, *figures))


Seen = tuple[int, Observation]
ALICE, BOB, EVE = 1001, 1002, 1003


def fleet(nodes: int, gflop_per_s: float = 750e3, uid: int = ALICE) -> list[Seen]:
    return [(uid, checked(node, gflop_per_s)) for node in range(nodes)]


def printed(seen: Sequence[Seen]) -> str:
    return baseline.toml(baselines(seen), TABLE, period="28 days to 2026-11-22")


def test_each_device_counts_once_by_its_median() -> None:
    again = [(ALICE, checked(0, gflop_per_s)) for gflop_per_s in (700e3, 750e3, 760e3)]

    assert baselines([*fleet(8), *again])[MODEL][MATMUL] == Baseline(
        metric=MATMUL, devices=64, nodes=8, users=1, typical=750e3, least=750e3
    )


def test_no_number_of_devices_of_one_user_raises_what_is_expected_of_all() -> None:
    forged = [(EVE, checked(node, 5000e3)) for node in range(200)]  # the real ones, and others

    for honest in (fleet(8), [*fleet(8), *fleet(8, 740e3, BOB)]):
        found = baselines([*honest, *forged])[MODEL][MATMUL]
        assert found.typical <= 750e3, found
        assert found.users == len({uid for uid, _ in honest}) + 1


def test_what_one_user_alone_has_checked_is_told_as_such() -> None:
    assert "64 devices on 8 nodes, checked by one user alone, median 750" in printed(fleet(8))
    both = printed([*fleet(8), *fleet(8, 740e3, BOB)])
    assert "64 devices on 8 nodes, checked by 2 users, median 740" in both


def test_whatever_a_journal_calls_a_device_the_table_can_be_read() -> None:
    model = 'a "b" \\ \U0001f4a3 é]'
    seen = [(uid, msgspec.structs.replace(each, model=model)) for uid, each in fleet(8)]

    assert list(tomllib.loads(printed(seen))["expectations"]) == [model]


def test_what_a_check_did_not_find_healthy_is_no_part_of_it() -> None:
    slow = [(ALICE, checked(node, 400e3, level=Level.SLOW)) for node in range(100, 108)]
    unknown = [(ALICE, checked(200, 1e3, level=Level.INCONCLUSIVE))]

    assert baselines([*fleet(8), *slow, *unknown]) == baselines(fleet(8))


def test_a_few_devices_or_nodes_make_no_limit() -> None:
    few_nodes = [(ALICE, checked(node, devices=16)) for node in range(7)]
    for seen in (fleet(3), few_nodes):
        text = printed(seen)
        assert "too few devices for a limit: 32 on 8 nodes are needed" in text
        assert tomllib.loads(text) == {}


def test_the_tables_are_what_the_sites_file_takes() -> None:
    site = tomllib.loads(printed(fleet(8)))["expectations"]

    expected = expectation_of(MODEL, expectations_from(site, "config.toml"))
    assert expected is not None
    assert expected.bf16_tflop_per_s == 750
    assert expected.memory_gb_per_s == 4100
    assert expected.healthy_fraction == 0.8
    assert expected.basis == "the median of 64 devices on 8 nodes, 28 days to 2026-11-22"
    assert expected.allgather_gb_per_s == 100  # the table's


@pytest.mark.parametrize("gflop_per_s", [300e3, 989e3])
def test_a_limit_is_never_below_the_tables(gflop_per_s: float) -> None:
    known = TABLE["nvidia h200"]
    found = limits(MODEL, baselines(fleet(8, gflop_per_s))[MODEL], known, period="")

    assert found is not None
    assert found.bf16_tflop_per_s is not None
    assert found.bf16_tflop_per_s * 0.8 >= 989 * known.healthy_fraction * 0.999


def test_a_figure_that_is_missing_keeps_the_tables_limit() -> None:
    found = {MATMUL: baselines(fleet(8))[MODEL][MATMUL]}
    known = TABLE["nvidia h200"]

    limit = limits(MODEL, found, known, period="")
    assert limit is not None
    assert limit.memory_gb_per_s == pytest.approx(4800 * known.healthy_fraction / 0.8)


def test_a_model_that_the_table_lacks_has_only_what_was_measured() -> None:
    limit = limits("Accelerator X", {COPY: baselines(fleet(8))[MODEL][COPY]}, None, period="")

    assert limit is not None
    assert (limit.bf16_tflop_per_s, limit.memory_gb_per_s) == (None, 4100)


def test_a_slow_device_is_shown_with_the_limit_it_was_held_to() -> None:
    site = {MODEL: {"healthy_fraction": 0.8, "basis": "the median of 214 devices"}}
    known = expectations_from(site, "config.toml")
    judged = {
        "n1": NodeVerdict(node="n1", level=Level.SLOW, component="compute device 3"),
        "n2": NodeVerdict(node="n2", level=Level.SLOW, component="network"),
        "n3": NodeVerdict(node="n3", level=Level.HEALTHY),
    }

    told = with_limits(Verdict(nodes=judged, paths=()), bases(dict.fromkeys(judged, MODEL), known))

    limit = "limit of NVIDIA H200: 0.8 of the median of 214 devices"
    evidence = {name: found.evidence for name, found in told.nodes.items()}
    assert evidence == {"n1": (limit,), "n2": (), "n3": ()}


def test_they_are_printed_from_the_journals(tmp_path: Path) -> None:
    write_devices(tmp_path / "journal", [f"n{number}" for number in range(8)])

    done = called(tmp_path, "baselines", LONG_AGO)
    assert done.code == 0, done
    assert "# matmul: 64 devices on 8 nodes, checked by one user alone, median 750 " in done.stdout
    assert tomllib.loads(done.stdout)["expectations"][MODEL]["bf16_tflop_per_s"] == 750
    assert "no accelerator was found healthy" in called(tmp_path, "baselines", "--days=1").stdout


def test_nodes_that_slurm_does_not_know_are_no_part_of_them(tmp_path: Path) -> None:
    write_devices(tmp_path / "journal", [f"n{number}" for number in range(12)])
    slurm = FakeSlurm(tmp_path / "slurm", [f"n{number}" for number in range(9)])
    environ = {
        "SLURM_HEALTH_JOURNAL": str(tmp_path / "journal"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        **slurm.environ(),
    }

    done = slurm_health("baselines", LONG_AGO, environ=environ)

    assert "# matmul: 72 devices on 9 nodes, " in done.stdout, done


def write_devices(root: Path, nodes: Sequence[str]) -> None:
    """Write a check of nodes with eight devices each."""
    run = RunJournal(root, job=12, nodes=nodes)
    run.start()
    for number, node in enumerate(nodes):
        devices = [f"{MODEL} {number:08}-0000-4000-8000-{at:012}" for at in range(8)]
        run.write(
            node,
            WorkersReady(
                node=node, launch=0, store_port=1, torch="2.13.0", backend="nccl",
                devices=devices, model=MODEL,
            ),
            Sampled(
                node=node, round=0, group=[node], probe="matmul", scope="solo", flop=750e9,
                iteration_ms=[[1.0]] * 8,
            ),
        )  # fmt: skip
    run.judge()
    run.finish("proceed")
