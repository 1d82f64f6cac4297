# SPDX-License-Identifier: Apache-2.0
"""The parts of the reference that are made from the code: `python -m tests.reference_pages`.

A page has its own text, and between two marks what the code says: the settings of a struct with
type, default, bounds and the comment above each, the checks, the errors of the kernel's log, the
causes that words lead to, the records of a journal, the exit codes.
"""

import inspect
import re
import textwrap
import tokenize
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec

from slurm_health.node.checks.check import BUILT_IN, Check, check_type
from slurm_health.node.rules import kernel_lines, settings, slurm_reasons
from slurm_health.node.rules.finding import Status
from slurm_health.records.errors import ExitCode
from slurm_health.records.record_codec import KINDS
from slurm_health.training.diagnosis import words, words_of_launchers

PAGES = Path(__file__).parents[1] / "docs" / "reference"
_PART = re.compile(
    r"(<!-- made by tests/reference_pages\.py: (\S+) -->\n).*?(?=<!-- end -->)", re.S
)
_LONG = 60  # characters of a default
_NONE = "–"  # noqa: RUF001 - as in the reports
_FEW = 2  # meanings of one cause
_MANY = 5  # choices, of which the comment says more


def made(page: str) -> str:
    """Return a page with its parts as the code makes them now."""
    return _PART.sub(lambda mark: mark[1] + _part(mark[2]), page)


def pages() -> dict[Path, str]:
    """Return each page that has such a part, as it is to be."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md"))}
    return {path: made(text) for path, text in texts.items() if "tests/reference_pages.py" in text}


def _part(name: str) -> str:
    makers: dict[str, Callable[[], Iterable[str]]] = {
        "checks": _checks,
        "kernel-lines": _kernel_lines,
        "causes": _causes,
        "records": _records,
        "exit-codes": _exit_codes,
        "slurm-drains": _slurm_drains,
    }
    lines = makers[name]() if name in makers else _settings(getattr(settings, name))
    return "\n".join(["", *lines, "", ""]).replace("\n\n\n", "\n\n")


# --- settings ------------------------------------------------------------------------------------


def _settings(kind: type[msgspec.Struct]) -> Iterator[str]:
    above = comments(kind)
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    shown = msgspec.inspect.type_info(kind)
    assert isinstance(shown, msgspec.inspect.StructType)
    for field in shown.fields:
        if isinstance(field.type, msgspec.inspect.StructType) or not above[field.name]:
            continue  # a table of its own
        cells = (f"`{field.name}`", _type(field.type), _default(field), above[field.name])
        yield f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def comments(kind: type) -> dict[str, str]:
    """Return the comment above each field of a class, and of those that it is made from."""
    source = textwrap.dedent(inspect.getsource(kind))
    found: dict[str, str] = {}
    above: list[str] = []
    fields = kind.__annotations__
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if (
            token.type == tokenize.COMMENT
            and not source.splitlines()[token.start[0] - 1][: token.start[1]].strip()
        ):
            above.append(token.string.removeprefix("#").strip())
        elif token.type == tokenize.NAME and token.start[1] == 4 and token.string in fields:
            found.setdefault(token.string, " ".join(above))
            above = []
        elif token.type == tokenize.NAME:
            above = []
    return found


def _type(shown: msgspec.inspect.Type) -> str:
    inspect_ = msgspec.inspect
    match shown:
        case inspect_.UnionType(types=types):
            known = [each for each in types if not isinstance(each, inspect_.NoneType)]
            texts = [_type(each) for each in known if getattr(each, "values", None) != ("",)]
            return " or ".join(dict.fromkeys(texts))
        case inspect_.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case inspect_.EnumType(cls=cls):
            choices = [f"`{value.value}`" for value in cls]
            return " or ".join(choices) if len(choices) < _MANY else "text"
        case inspect_.BoolType():
            return "boolean"
        case inspect_.IntType() | inspect_.FloatType():
            return _number(shown)
        case inspect_.StrType(pattern="^/"):
            return "path"
        case inspect_.StrType():
            return "text"
        case inspect_.VarTupleType(item_type=item) | inspect_.ListType(item_type=item):
            return f"list of {_type(item)}"
        case inspect_.DictType(value_type=value):
            return f"table of {_type(value)}"
        case _:
            return "table"


def _number(shown: Any) -> str:
    name = "integer" if isinstance(shown, msgspec.inspect.IntType) else "number"
    low = f"≥ {shown.ge:g}" if shown.ge is not None else ""
    low = f"> {shown.gt:g}" if shown.gt is not None else low
    high = f"≤ {shown.le:g}" if shown.le is not None else ""
    return ", ".join(filter(None, (name, low, high)))


def _default(field: msgspec.inspect.Field) -> str:
    if field.required:
        return "required"
    factory = field.default_factory
    value = field.default if factory is msgspec.NODEFAULT else factory()
    match value:
        case None:
            return _NONE
        case bool():
            return f"`{str(value).lower()}`"
        case Enum():
            return f"`{value.value}`"
        case int() | float():
            return f"{value:g}"
        case str():
            return f"`{value}`" if value else _NONE
        case tuple() | list() | dict():
            text = " ".join(map(str, value))
            return _NONE if not value else f"`{text}`" if len(text) < _LONG else "built in"
        case _:
            return str(value)


# --- the rest ------------------------------------------------------------------------------------


def _checks() -> Iterator[str]:
    for name in BUILT_IN:
        check = check_type(name)
        yield f"## {name}"
        yield ""
        yield " ".join(inspect.cleandoc(check.__doc__ or "").split())
        yield ""
        alone = " Takes the node for itself." if check.EXCLUSIVE else ""
        yield f"Runs in: {', '.join(check.CONTEXTS)}. Worst: {_words(check.SEVERITY)}.{alone}"
        yield ""
        if check.__struct_fields__:
            yield from _settings(check)
            yield ""
    assert issubclass(check, Check)


def _words(status: Status) -> str:
    return status.value.replace("_", " ")


def _kernel_lines() -> Iterator[str]:
    verdicts = {Status.PASS: _NONE, Status.WARN: "warning", Status.NODE_FAULT: "node fault"}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for error in kernel_lines.all_errors():
        key = (verdicts[error.status], error.whose, error.what)
        rows.setdefault(key, []).append(error.name)
    yield "| error | verdict | whose | what |"
    yield "|---|---|---|---|"
    for (verdict, whose, what), names in rows.items():
        yield f"| {_short(names)} | {verdict} | {whose} | {what} |"


def _short(names: list[str]) -> str:
    """Return names with the word that they begin with said once."""
    first, _, number = names[0].partition(" ")
    if not number:
        return ", ".join(f"`{name}`" for name in names)
    return ", ".join([names[0], *(name.removeprefix(f"{first} ") for name in names[1:])])


def _causes() -> Iterator[str]:
    rows = (
        *words.EXCEPTIONS,
        *words_of_launchers.MISTAKES,
        *words_of_launchers.REFUSALS,
        *words_of_launchers.WAITS,
    )
    meanings: dict[str, list[str]] = {}
    ends: dict[str, str] = {}
    for row in rows:
        # What follows a colon or a semicolon are details, which the report has.
        text = re.sub(r"(?<=\w)\{\w+\}", "", re.split(r"[:;] ", row.says)[0])
        text = re.sub(r"\{(\w+)\}", r"these \1", text)
        if text not in meanings.setdefault(row.name, []):
            meanings[row.name].append(text)
        ends.setdefault(row.name, f"{row.blame.value} | {row.sureness.name.lower()}")
    yield "| cause | meaning | blame | confidence |"
    yield "|---|---|---|---|"
    for name, texts in sorted(meanings.items()):
        yield f"| `{name}` | {'; or '.join(texts[:_FEW])} | {ends[name]} |"


def _records() -> Iterator[str]:
    yield "| kind | fields | meaning |"
    yield "|---|---|---|"
    for kind in KINDS:
        first = inspect.cleandoc(kind.__doc__ or "").split("\n\n")[0]
        fields = ", ".join(f"`{name}`" for name in kind.__struct_fields__) or _NONE
        yield f"| `{kind.__struct_config__.tag}` | {fields} | {' '.join(first.split())} |"


def _slurm_drains() -> Iterator[str]:
    for row in (*slurm_reasons.REASONS, slurm_reasons.COMPLETING):
        yield f"## {row.name}"
        yield ""
        yield ", ".join(
            f"`{re.sub(r'[*]+', '…', text) if '(' in text else text}`" for text in row.texts
        )
        yield ""
        yield f"- Meaning: {row.meaning}"
        yield f"- Evidence: {row.evidence}"
        yield f"- Lifted when: {row.lifted_by.value}"
        yield f"- What to do: {row.advice}"
        yield ""


def _exit_codes() -> Iterator[str]:
    yield "| code | name |"
    yield "|---|---|"
    for code in ExitCode:
        yield f"| {code.value} | {code.name.lower().replace('_', ' ')} |"


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
