# SPDX-License-Identifier: Apache-2.0
"""Change deciding code in one place at a time, and say which changes no test notices.

    python -m tests.mutants [--minutes N] [--only PART-OF-A-PATH]

Numbers, thresholds of modules among them, comparisons, `and`, `or`, `not` and arithmetic are
changed, in a random order that is always the same: what a limited time allows is a fair sample.
Each change is made in a copy of the repository. Results are kept in build/mutants.jsonl and not
measured again while the changed module is what it was: remove the file after a change of tests.
"""

import argparse
import ast
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "build" / "mutants.jsonl"
# What is changed, its tests, and the tables of tests/frozen that rest on it.
AREAS: dict[str, tuple[str, str]] = {
    "preflight/decide": (
        "tests/preflight/decide",
        "after_failure check_again decide drains paths unchecked",
    ),
    "node/rules": ("tests/node/rules", "node_rules"),
    "fleet/standing.py": ("tests/fleet/test_observation.py", "fleet"),
    "fleet/partners.py": ("tests/fleet/test_sweep.py", "fleet"),
    "preflight/localize": (
        "tests/preflight/localize",
        "simulated_cpus simulated_devices simulated_fabrics simulated_nodes",
    ),
}
_MARKS = "not (heavy or lab or played_gpu or root or slow or torch)"
_LIMIT_S = 300.0  # a change may make a loop without an end
_COMPARISONS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq)),
    *((ast.In, ast.NotIn), (ast.Is, ast.IsNot)),
)
_ARITHMETIC = ((ast.Add, ast.Sub), (ast.Mult, ast.Div))
_SWAPPED: dict[type[ast.AST], type[Any]] = {
    **{one: other for pair in (*_COMPARISONS, *_ARITHMETIC) for one, other in (pair, pair[::-1])}
}


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One change: where it is, what it was and what it becomes, and the module's whole text."""

    path: str
    line: int
    old: str
    new: str
    text: str
    area: str

    @property
    def key(self) -> str:
        """What it is known by in the results."""
        return hashlib.sha256(f"{self.path}\n{self.text}".encode()).hexdigest()[:16]


def mutants() -> Iterator[Mutant]:
    for area in AREAS:
        home = ROOT / "slurm_health" / area
        for path in [home] if home.is_file() else sorted(home.glob("*.py")):
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                old = ast.unparse(node)
                for _ in _changes(node):
                    yield Mutant(
                        path=str(path.relative_to(ROOT)),
                        line=getattr(node, "lineno", 0),
                        old=old,
                        new=ast.unparse(node),
                        text=ast.unparse(tree),
                        area=area,
                    )


def _changes(node: ast.AST) -> Iterator[None]:
    """Change an expression, and undo that once the change was used."""
    before = dict(vars(node))
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            node.value = number + 1 if isinstance(number, int) else 2 * number or 1.0
        case ast.Compare(ops=[operator]):
            node.ops = [_SWAPPED[type(operator)]()]
        case ast.BoolOp(op=operation):
            node.op = ast.Or() if isinstance(operation, ast.And) else ast.And()
        case ast.BinOp(op=arithmetic) if type(arithmetic) in _SWAPPED:
            node.op = _SWAPPED[type(arithmetic)]()
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            node.operand = ast.UnaryOp(ast.Not(), operand)
        case _:
            return
    yield
    vars(node).update(before)


def outcome(mutant: Mutant, home: Path) -> str:
    """Return what the tests make of one change in a copy of the repository."""
    path = home / mutant.path
    before = path.read_text()
    path.write_text(mutant.text)
    try:
        # 2 and 4: the tests cannot even be loaded.
        found = {0: "survived", 1: "killed", 2: "killed", 4: "killed"}
        return found.get(tested(mutant.area, home, PYTHONDONTWRITEBYTECODE="1"), "failed")
    except subprocess.TimeoutExpired:
        return "killed"
    finally:
        path.write_text(before)


def tested(area: str, home: Path, **variables: str) -> int:
    """Run the tests of an area, what is frozen first; return pytest's exit code."""
    tests, tables = AREAS[area]
    name = "tests/test_frozen.py::test_what_is_concluded_and_decided_is_as_it_was_frozen"
    argv = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", _MARKS]
    return subprocess.run(
        [*argv, *(f"{name}[{table}]" for table in tables.split()), tests],
        cwd=home,
        env={**os.environ, "PYTHONPATH": str(home), **variables},
        capture_output=True,
        timeout=_LIMIT_S,
        check=False,
    ).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--only", default="", help="modules whose path contains this")
    options = parser.parse_args()
    chosen = [each for each in mutants() if options.only in each.path]
    random.Random(0).shuffle(chosen)
    RESULTS.parent.mkdir(exist_ok=True)
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    known = {each["key"]: each["outcome"] for each in map(json.loads, lines)}
    end_s = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as directory, RESULTS.open("a") as results:
        home = Path(directory) / "copy"
        left_out = shutil.ignore_patterns(".*", "build", "dist", "__pycache__")
        shutil.copytree(ROOT, home, ignore=left_out, symlinks=True)
        # Bytecode is written here and then never again: a change may come within the same second.
        for area in sorted({each.area for each in chosen}):
            if tested(area, home):
                print(f"the tests of {area} fail without any change", file=sys.stderr)
                return 1
        for mutant in chosen:
            if mutant.key not in known and time.monotonic() < end_s:
                known[mutant.key] = outcome(mutant, home)
                print(json.dumps({"key": mutant.key, "outcome": known[mutant.key]}), file=results)
                results.flush()
                if known[mutant.key] != "killed":
                    where = f"{mutant.path}:{mutant.line}"
                    print(f"{known[mutant.key]}: {where}: {mutant.old} -> {mutant.new}", flush=True)
    counts = Counter(known[each.key] for each in chosen if each.key in known)
    print(f"{counts['killed']} of {counts.total()} killed, of {len(chosen)} changes in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
