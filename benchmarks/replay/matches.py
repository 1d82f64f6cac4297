# SPDX-License-Identifier: Apache-2.0
"""Pairs of Flight Recorder entries from PyTorch's own tests, with whether they match.

A case is a pair, as two ranks of a group would have left them in their dumps. A mismatch of which
nothing is said is undecided; a rank that is named where the entries match is an innocent.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.replay.contested import why_contested
from benchmarks.replay.source import Score, Source
from slurm_health.training.diagnosis.collectives import CollectiveState
from slurm_health.training.monitor.flight_dumps import record_of

_TEST = "test_match_one_event"
_PARTS = ("what", "group", "input_sizes", "output_sizes", "state", "collective_seq_id")
_MATCHED = {"FULLY_MATCHED", "UNDECIDED"}


def score(path: Path) -> Score:
    """Compare each pair that the test compares, read as dumps of ranks 0 and 1."""
    score = Score()
    for name, pair, verdict in _cases(ast.parse(path.read_text())):
        records = [record_of(_dump(entry), rank, tuple) for rank, entry in enumerate(pair)]
        difference = CollectiveState(records).difference
        if (difference is None) is (verdict in _MATCHED):
            score.right += 1
            continue
        score.innocent += len(difference.ranks) if difference else 0
        said = difference.description if difference else "nothing"
        score.miss(
            f"{name}: {said}, truth {verdict}",
            undecided=difference is None,
            why_contested="" if difference else why_contested("pytorch", name),
        )
    return score


def _cases(tree: ast.Module) -> Iterator[tuple[str, tuple[Any, Any], str]]:
    (test,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == _TEST
    ]
    entries: dict[str, Mapping[str, Any]] = {}
    for statement in test.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=args, keywords=more)):
                told = dict(zip(_PARTS, map(ast.literal_eval, args), strict=False))
                told |= {str(each.arg): ast.literal_eval(each.value) for each in more}
                entries[name] = told
            case ast.Expr(
                value=ast.Call(
                    args=[
                        ast.Attribute(
                            value=ast.Call(args=[ast.Name(id=one), ast.Name(id=other), *_])
                        ),
                        ast.Attribute(attr=verdict),
                    ]
                )
            ):
                yield f"{one} and {other}", (entries[one], entries[other]), verdict


def _dump(told: Mapping[str, Any]) -> dict[str, Any]:
    entry = {
        "record_id": 0,
        "process_group": told["group"],
        "collective_seq_id": told.get("collective_seq_id", 0),
        "profiling_name": f"nccl:{told['what']}",
        "input_sizes": told["input_sizes"],
        "output_sizes": told["output_sizes"],
        "input_dtypes": ["float32"],
        "output_dtypes": [told.get("output_dtypes", "float32")],
        "state": told.get("state", "scheduled"),
        "retired": False,
        "is_p2p": False,
    }
    number, purpose = told["group"]
    group = {"name": number, "desc": purpose, "ranks": "[0, 1]"}
    return {"entries": [entry], "pg_config": {number: group}}


SOURCES = (
    Source(
        name="pytorch",
        place="test/distributed/flight_recorder/test_fr_analysis.py",
        anchor="all, by its own tests",
        seen=False,
        score=score,
    ),
)
