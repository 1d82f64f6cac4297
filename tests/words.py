# SPDX-License-Identifier: Apache-2.0
"""Words that pages, messages and help should do without: `python -m tests.words`, and `--accept`.

CONTRIBUTING.md has the rules. Each word is counted in the pages, without their code blocks, and in
the texts of the package, without docstrings but those of commands. The counts that are kept may
only fall: `--accept` lowers them, and raises none.
"""

import ast
import functools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "data" / "words.json"
# What a native engineer would not write, or would write otherwise.
WORDS = {
    "told": "report, log; a noun",
    "tells": "reports, shows",
    "heard": "received",
    "heed": "handle",
    "mend": "repair, fix",
    "mended": "repaired, fixed",
    "whoever": "anyone who, the process that",
    "whose doing": "blame",
    "nobody": "no node, no user, nothing",
    "somebody": "a user, another process",
    "a person": "an administrator",
    "site's file": "config file",
    "no longer": "the present tense",
    "since then": "the present tense",
    "by now": "the present tense",
    "that is to be": "the noun",
    "grows old": "expires",
}
_PATTERNS = {word: re.compile(rf"\b{word}\b", re.IGNORECASE) for word in WORDS}


@functools.cache
def counts() -> dict[str, dict[str, int]]:
    """Return how often each word stands in pages, and in messages and help."""
    texts = {"pages": "\n".join(_pages()), "messages": "\n".join(_messages())}
    return {
        where: {word: len(pattern.findall(text)) for word, pattern in _PATTERNS.items()}
        for where, text in texts.items()
    }


def kept() -> dict[str, dict[str, int]]:
    """Return the counts that may not be exceeded."""
    found: dict[str, dict[str, int]] = json.loads(KEPT.read_text(encoding="utf-8"))
    return found


def _pages() -> Iterator[str]:
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]):
        if path.name != "commands.md":  # is counted as help
            made = r"```.*?```|<!-- made by .*?<!-- end -->"  # those are messages, or examples
            text = re.sub(made, "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
            yield re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def _messages() -> Iterator[str]:
    for path in sorted((ROOT / "slurm_health").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and not _is_command(node)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in docstrings:
                yield str(node.value)


def _is_command(node: ast.AST) -> bool:
    """Tell whether a function is a command, whose docstring is its help."""
    decorators = getattr(node, "decorator_list", [])
    return any("command" in ast.unparse(decorator) for decorator in decorators)


def accept() -> None:
    """Keep the counts where they are lower than those that are kept."""
    now = counts()
    before = kept() if KEPT.exists() else now
    lower = {
        where: {word: min(count, before[where].get(word, count)) for word, count in found.items()}
        for where, found in now.items()
    }
    KEPT.write_text(json.dumps(lower, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--accept"]:
        accept()
    for where, found in counts().items():
        for word, count in found.items():
            print(f"{where:9} {word:14} {count:4}  {WORDS[word]}")
