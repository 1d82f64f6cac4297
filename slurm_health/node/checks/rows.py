# SPDX-License-Identifier: Apache-2.0
"""Judge the output of a tool by rows of a table.

The output becomes records: the fields of one JSON object together with those of the objects around
it, or the fields of one line. A `Row` names the fields that make a record a finding, and its text;
the first row that matches decides. A check that needs more than rows is an external check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from slurm_health.node.checks.check import CheckContext
from slurm_health.node.checks.external import run_program
from slurm_health.node.rules.finding import (
    Finding,
    Remedy,
    inconclusive,
    node_fault,
    warned,
    with_remedy,
)
from slurm_health.records.errors import Unmeasured

Record = Mapping[str, str]
_JUDGED = {"fault": node_fault, "warn": warned, "unclear": inconclusive}


class Row(NamedTuple):
    """A row of the table: records that match are findings.

    Args:
        fields: of a record, with the regular expressions that they match in full.
        weight: `fault`, `warn`, `unclear` (undecided), or `ignore`.
        words: of the finding, with fields in braces.
        above: a field, and the limit that its number must exceed.
        remedy: what repairs it.
    """

    fields: Mapping[str, str]
    weight: Literal["fault", "warn", "unclear", "ignore"]
    words: str = ""
    above: tuple[str, float] | None = None
    remedy: Remedy | None = None

    def matches(self, record: Record) -> bool:
        """Return whether this is a finding of a record."""
        if self.above is not None:
            name, limit = self.above
            try:
                if not float(record[name]) > limit:
                    return False
            except (KeyError, ValueError):
                return False
        return all(
            name in record and re.fullmatch(pattern, record[name], re.DOTALL)
            for name, pattern in self.fields.items()
        )


def judge(records: Iterable[Record], rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield the findings of records. Pure."""
    for record in records:
        row = next((row for row in rows if row.matches(record)), None)
        if row is not None and row.weight != "ignore":
            finding = _JUDGED[row.weight](row.words.format_map(record))
            yield with_remedy(finding, row.remedy)


def records_of(output: str) -> list[Record]:
    """Return the objects of the JSON that a tool printed, without lines that libraries print.

    A record has an object's own plain values and those of the objects around it, as text.
    """
    starts = [place for place in map(output.find, "{[") if place >= 0]
    if not starts:
        return []
    start = min(starts)
    end = output.rfind("}" if output[start] == "{" else "]")
    try:
        document: object = json.loads(output[start : end + 1])
        return list(_flattened(document, {}))
    except (ValueError, RecursionError):
        return []


def _flattened(value: object, around: Record) -> Iterator[Record]:
    if isinstance(value, list):
        for item in value:
            yield from _flattened(item, around)
    elif isinstance(value, dict):
        plain = {
            str(name): str(item)
            for name, item in value.items()
            if item is not None and not isinstance(item, dict | list)
        }
        yield {**around, **plain}
        for name, item in value.items():
            yield from _flattened(item, {**around, **plain, "in": str(name)})


def ask(argv: Sequence[str], machine: CheckContext) -> list[Record]:
    """Return the records of a tool's JSON.

    Raises:
        Unmeasured: it cannot be run, or printed none.
    """
    run = run_program(argv, machine)
    records = records_of(run.output)
    if not records:
        raise Unmeasured(f"{' '.join(argv[:2])}: {run.first_line or f'exit code {run.code}'}")
    return records
