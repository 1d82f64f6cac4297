# SPDX-License-Identifier: Apache-2.0
"""Find the script among the words given to sbatch, as sbatch itself does.

sbatch reads its command line with getopt_long and stops at the first word that is not an option.
To find that word one has to know which options take the next word as their value. The table is
the union over releases 22.05 to 26.05. Options of SPANK plugins are not in it; `sbatch --help`
lists them, and is asked only when an option is met that the table does not decide.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from slurm_health.records.errors import UsageError


class Value(Enum):
    """Whether an option takes a value. An optional one is never the next word."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRED = "required"


# name, or name/letter where the option has a short form.
_NO_VALUE = """
    consolidate-segments contiguous external help/h hold/H ignore-pbs no-requeue overcommit/O
    oversubscribe/s parsable quiet/Q reboot spread-job spread-segments stepmgr test-only usage
    use-min-nodes verbose/v version/V wait/W
"""
_OPTIONAL_VALUE = """
    exclusive get-user-env nice no-kill/k oom-kill-step propagate requeue resv-ports
"""
_REQUIRED_VALUE = """
    account/A acctg-freq array/a autocomplete batch bb bbf begin/b chdir/D cluster
    cluster-constraint clusters/M comment constraint/C container container-id container-type
    context core-spec/S cores-per-socket cpu-freq cpus-per-gpu cpus-per-task/c deadline delay-boot
    dependency/d distribution/m error/e exclude/x export export-file extra extra-node-info/B gid
    gpu-bind gpu-freq gpus/G gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint
    input/i job-name/J kill-on-invalid-dep licenses/L mail-type mail-user mcs-label mem mem-bind
    mem-per-cpu mem-per-gpu mem-update mincpus network nodefile/F nodelist/w nodes/N ntasks/n
    ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode
    output/o partition/p power prefer priority profile qos/q reservation resources runtime segment
    signal sockets-per-node switches tasks-per-node thread-spec threads-per-core time/t time-min
    tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap
"""


def _table() -> tuple[dict[str, Value], dict[str, str]]:
    long: dict[str, Value] = {}
    short: dict[str, str] = {}
    for value, names in (
        (Value.NONE, _NO_VALUE),
        (Value.OPTIONAL, _OPTIONAL_VALUE),
        (Value.REQUIRED, _REQUIRED_VALUE),
    ):
        for entry in names.split():
            name, _, letter = entry.partition("/")
            long[name] = value
            if letter:
                short[letter] = name
    return long, short


LONG, SHORT = _table()

# Further to the right stand the explanations, which name options too.
_LISTED = re.compile(r"^ {1,8}(?:-\w,? +)?--([A-Za-z0-9][\w-]*)(\[=|=)?", re.MULTILINE)


def listed_options(help_text: str) -> dict[str, Value]:
    """Return the long options that `sbatch --help` lists, those of plugins among them."""
    values = {"": Value.NONE, "=": Value.REQUIRED, "[=": Value.OPTIONAL}
    return {name: values[mark] for name, mark in _LISTED.findall(help_text)}


@dataclass(kw_only=True)
class CommandLine:
    """The words given to sbatch, taken apart.

    `options` are sbatch's own words before the script, in order, without --wrap; `plain` are all
    words except ours. `own` holds our options as (name, value), the value None where none was
    given. `seen` are the full names of sbatch's options and `values` what they were last given.
    `undecided` is a word that neither the
    table nor sbatch's help explains; nothing behind it was read. Nor was anything behind the `:`
    that separates the components of a heterogeneous job.
    """

    options: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    own: list[tuple[str, str | None]] = field(default_factory=list)
    script: str | None = None
    arguments: tuple[str, ...] = ()
    seen: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)
    undecided: str | None = None
    components: bool = False

    @property
    def wrap(self) -> str | None:
        """The command that stands in place of a script."""
        return self.values.get("wrap")


def parse(
    words: Sequence[str],
    *,
    own: Mapping[str, bool],
    read_help: Callable[[], str],
) -> CommandLine:
    """Take the words behind `sbatch` apart.

    `own` says for the name of each of our options whether it takes a value; ours are recognised
    by their full names only. `read_help` returns the text of `sbatch --help`.

    Raises:
        UsageError: one of our options lacks its value or has one too many.
    """
    return _Walk(words, own, read_help).run()


class _Walk:
    """One pass over the words."""

    def __init__(
        self, words: Sequence[str], own: Mapping[str, bool], read_help: Callable[[], str]
    ) -> None:
        self._rest = list(words)
        self._own = own
        self._read_help = read_help
        self._listed: dict[str, Value] | None = None
        self._line = CommandLine()

    def run(self) -> CommandLine:
        line = self._line
        while self._rest and line.undecided is None and not self._at_separator():
            word = self._rest[0]
            if word == "--":
                self._keep([self._rest.pop(0)])
                break
            if word == "-" or not word.startswith("-"):
                break
            self._rest.pop(0)
            if word.startswith("--"):
                self._long(word)
            else:
                self._cluster(word)
        line.plain += self._rest
        if self._rest and line.undecided is None and not self._at_separator():
            line.script, line.arguments = self._rest[0], tuple(self._rest[1:])
        return line

    def _at_separator(self) -> bool:
        self._line.components |= self._rest[0] == ":"
        return self._line.components

    def _long(self, word: str) -> None:
        given, equals, attached = word[2:].partition("=")
        if given in self._own:
            self._line.own.append((given, self._own_value(given, attached if equals else None)))
            return
        name, value = self._resolve(given, lookup=not equals)
        if value is None:
            self._keep([word])
            self._line.undecided = None if equals else word
            return
        words = [word]
        if value is Value.REQUIRED and not equals:
            if not self._take_value(words):
                return
            attached = words[1]
        self._note(name, words, attached)

    def _own_value(self, name: str, attached: str | None) -> str | None:
        if not self._own[name]:
            if attached is not None:
                raise UsageError(f"--{name} takes no value, found {attached!r}")
            return None
        if attached is not None:
            return attached
        if not self._rest:
            raise UsageError(f"--{name} needs a value: --{name}=VALUE")
        return self._rest.pop(0)

    def _cluster(self, word: str) -> None:
        """Read a word of short options: -N5, -HN5, or -N with its value in the next word."""
        for position, letter in enumerate(word[1:], start=1):
            name = SHORT.get(letter)
            if name is None:
                self._keep([word])
                self._line.undecided = word
                return
            self._line.seen.add(name)
            if LONG[name] is Value.NONE:
                continue
            words = [word]
            attached = word[position + 1 :]
            if LONG[name] is Value.REQUIRED and not attached:
                if not self._take_value(words):
                    return
                attached = words[1]
            self._note(name, words, attached)
            return
        self._keep([word])

    def _take_value(self, words: list[str]) -> bool:
        """Move the next word behind an option; without one, sbatch is left to complain."""
        if not self._rest or self._at_separator():
            self._keep(words)
            self._line.undecided = words[0]
            return False
        words.append(self._rest.pop(0))
        return True

    def _note(self, name: str, words: list[str], value: str) -> None:
        self._line.seen.add(name)
        self._line.values[name] = value
        if name == "wrap":
            self._line.plain += words
        else:
            self._keep(words)

    def _keep(self, words: list[str]) -> None:
        self._line.options += words
        self._line.plain += words

    def _resolve(self, given: str, *, lookup: bool) -> tuple[str, Value | None]:
        """Return the full name of a long option, "" if it is not certain, and what it takes."""
        matches = _matches(given, LONG)
        if len(matches) != 1 and lookup and len(set(matches.values())) != 1:
            # Not in the table, or an abbreviation that the releases of the table read differently.
            if self._listed is None:
                self._listed = listed_options(self._read_help())
            matches = _matches(given, {**self._listed, **_only(LONG, self._listed)})
        values = set(matches.values())
        name = next(iter(matches)) if len(matches) == 1 else ""
        return name, values.pop() if len(values) == 1 else None


def _matches(given: str, options: Mapping[str, Value]) -> dict[str, Value]:
    if given in options:
        return {given: options[given]}
    return {name: value for name, value in options.items() if name.startswith(given)}


def _only(options: Mapping[str, Value], names: Iterable[str]) -> dict[str, Value]:
    return {name: options[name] for name in names if name in options}
