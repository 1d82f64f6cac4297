# SPDX-License-Identifier: Apache-2.0
"""Whatever is read gives a value or an error of ours: no traceback, no hang, nobody accused.

A hundred cases each by default; `--hypothesis-profile=fuzz` tries 100,000 others.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from re import ASCII, fullmatch
from tempfile import TemporaryDirectory
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_health.fleet import answers
from slurm_health.fleet.index import opened
from slurm_health.node import site as site_file
from slurm_health.preflight import config
from slurm_health.preflight.master.run_check import make_localizer
from slurm_health.preflight.options import FOR_JOB, MAGIC, given_in, given_in_script, job_spec
from slurm_health.preflight.sbatch.arguments import listed_options, parse
from slurm_health.preflight.sbatch.node_counts import node_counts, options_asked
from slurm_health.preflight.sbatch.script import header, read_template, refusal, render
from slurm_health.preflight.session.controller import Controller
from slurm_health.preflight.session.deadlines import TimeLimits
from slurm_health.preflight.session.phases import phases
from slurm_health.records.errors import SlurmHealthError
from slurm_health.records.record_codec import Entry, encode
from slurm_health.records.records import Record
from slurm_health.report.build import story_of
from slurm_health.report.export import as_json, job_document
from slurm_health.report.layout import Page
from slurm_health.report.story import RunEntries
from slurm_health.report.text import job_text
from tests.strategies import random_record
from tests.support import accusing
from tests.support.accusing import accusation
from tests.support.sites import write_site

DATA = Path(__file__).parent / "data"
SLURM = DATA / "slurm-22.05"

T = TypeVar("T")


def read(directory: Path, pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(directory.glob(pattern))]


def random_cases(make: Callable[[Random], T]) -> st.SearchStrategy[T]:
    """Draw what is made at random from one number: drawing each choice takes ten times as long."""
    return st.integers(0, 2**64 - 1).map(lambda seed: make(Random(seed)))


def damaged(samples: Sequence[bytes], words: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Draw a real text with a few places cut, and words or any bytes put there."""

    def damage(random: Random) -> bytes:
        text = random.choice(samples)
        for _ in range(random.randint(0, 4)):
            at = random.randint(0, len(text))
            text = text[:at] + odd_word(random, words) + text[at + random.randint(0, 30) :]
        return text

    return random_cases(damage)


def odd_word(random: Random, words: Sequence[bytes]) -> bytes:
    return (
        random.choice(words) if random.random() < 0.6 else random.randbytes(random.randint(0, 12))
    )


def odd_words(words: Sequence[bytes]) -> st.SearchStrategy[list[bytes]]:
    def line(random: Random) -> list[bytes]:
        return [odd_word(random, words) for _ in range(random.randint(0, 8))]

    return random_cases(line)


def as_text(drawn: st.SearchStrategy[bytes]) -> st.SearchStrategy[str]:
    return drawn.map(lambda data: data.decode(errors="replace"))


# Numbers that are none, or too large, and what nests or ends where it should not.
ODD = [b"", b"-1", b"9" * 5000, b"1e999", b"NaN", b"\0", b"\n", b"\r\n", b"'", b'"', b"\xff", b"=",
       b"[" * 500, b"{" * 500, b"\xd9\xa1", b"n[1-999999999]", b"n[2-1]", b"[", b"]"]  # fmt: skip


# --- journals ----------------------------------------------------------------------------------

NODE, JOB = "n3", accusing.JOB
JOURNALS = [accusing.journal(), *read(DATA / "journal", "*.jsonl")]
FIELDS = [
    b'"kind":"verdict_reached"',
    b'"round":7',
    b'"nodes":[]',
    b'"node":"n3"',
    b'"v":2',
    b"null",
]


RECORDS = random_cases(lambda random: [random_record(random) for _ in range(random.randint(0, 8))])


@given(damaged(JOURNALS, ODD + FIELDS))
def test_a_damaged_journal_accuses_only_whom_its_verdict_names(data: bytes) -> None:
    found = accusation(data, NODE, JOB)
    assert found is None or (found.node, found.job) == (NODE, JOB)


@given(RECORDS)
def test_any_records_in_any_order_are_reported(written: list[Record]) -> None:
    found = stamped(written)
    everything = RunEntries(
        label="0", job="7", cluster="lab", master=found,
        nodes={NODE: found}, supervisor=found, requeue=found,
    )  # fmt: skip
    assert_reported(everything)


def assert_reported(entries: RunEntries) -> None:
    with suppress(SlurmHealthError):
        story = story_of([entries], now_s=1.0)
        assert job_text(story, Page(), verbose=True)
        assert as_json(job_document(story))


# Most of what an index takes is the making, opening and locking of it: ten jobs share one.
JOBS_TOGETHER = 10
INDEXED_TOGETHER = settings(max_examples=max(1, settings().max_examples // JOBS_TOGETHER))


def jobs(drawn: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    return st.lists(drawn, min_size=JOBS_TOGETHER, max_size=JOBS_TOGETHER)


@given(jobs(st.tuples(RECORDS, RECORDS, RECORDS)))
@INDEXED_TOGETHER
def test_any_records_in_any_order_have_a_history(jobs_: list[tuple[list[Record], ...]]) -> None:
    assert_indexed(
        [
            [
                b"".join(encode(each, entry_id="x:0", time_s=1.7e9) for each in records_)
                for records_ in written
            ]
            for written in jobs_
        ]
    )


def assert_indexed(files_of_jobs: list[list[bytes]]) -> None:
    """Index jobs with these files, and one that is well; ask for every node."""
    with TemporaryDirectory() as scratch:
        for job, contents in enumerate([[JOURNALS[0]], *files_of_jobs], start=1):
            run = Path(scratch, "lab", str(job), "0")
            run.mkdir(mode=0o755, parents=True)
            for name, data in zip(("master", NODE, "post-mortem"), contents, strict=False):
                (run / f"{name}.jsonl").write_bytes(data)
        with opened(None, Path(scratch), now_s=1.8e9) as index:
            lemons = answers.lemons(index, now_s=1.8e9, days=3650, known={})
            names = [each for each in index.nodes() if fullmatch(r"[\w.-]+", each, ASCII)]
            nodes = [
                each
                for name in names
                for each in answers.histories(index, name, now_s=1.8e9, days=3650, known={})
            ]
            answers.document("nodes", nodes, index.troubles())
            answers.document("clusters", lemons, index.troubles())
            answers.lemons_text(lemons, Page(width=60))
            for each in nodes:
                assert "\x1b" not in answers.history_text(each, Page(width=60), most=5)


@given(RECORDS)
def test_any_records_lead_to_a_next_step_or_an_error_of_ours(
    written: list[Record],
) -> None:
    controller = Controller(["n1", "n2", "n3"], make_localizer, TimeLimits(), phases(["quick"]))
    with suppress(SlurmHealthError):
        for entry in stamped(written):
            controller.state.fold(entry)
        controller.next_step(1.0)


def stamped(written: Sequence[Record]) -> list[Entry]:
    numbers = count()
    return [
        Entry(
            id=f"master:{next(numbers)}",
            time_s=1.0,
            kind=str(each.__struct_config__.tag),
            record=each,
        )
        for each in written
    ]


# --- batch scripts and command lines -----------------------------------------------------------

SCRIPTS = [b"#!/bin/sh\n#SBATCH -N4 --exclusive\n#HEALTH --spares=1\n#PBS -l nodes=2\necho\n",
           *read(DATA / "batch_script", "*.sbatch")]  # fmt: skip
OWN = {option.name: option.kind is not None for option in FOR_JOB}
OPTIONS = [
    *(f"--{name}".encode() for name in OWN),
    *(b"-N", b"--nodes=3-4", b"-w", b"n1", b"--", b"-", b":", b"--wrap", b"--ex", b"--gpus=4"),
    *(b"#SBATCH ", b"#HEALTH ", b"#HEALTH\t--spares ", b"#SBATCH hetjob\n", b"# ", b"4", b"=off "),
]
TEMPLATE = read_template()


@given(damaged(SCRIPTS, ODD + OPTIONS))
def test_any_script_is_refused_or_submitted_unchanged(script: bytes) -> None:
    if refusal(script) is not None:
        return
    with suppress(SlurmHealthError):
        spec = job_spec(given_in_script(header(script), "train.sh"))
        line = parse([], own={}, read_help=str)
        asked = options_asked(line, header(script), {}, str)
        node_counts(asked, spec.spares)
        text = render(
            script,
            template=TEMPLATE,
            python="python3",
            flags=["-P"],
            spec=spec,
            name="train.sh",
        )
        assert text.endswith(script)


@given(st.lists(odd_words(ODD + OPTIONS).map(b" ".join), max_size=4))
def test_any_health_lines_are_settings_or_an_error_with_their_line(lines: list[bytes]) -> None:
    with suppress(SlurmHealthError):
        given_in_script([MAGIC + b" " + line for line in lines], "train.sh")


@given(
    odd_words(ODD + OPTIONS),
    as_text(
        damaged([b"      --gres=list   generic resources\n  -N, --nodes=N   count\n"], OPTIONS)
    ),
)
def test_any_command_line_is_taken_apart_or_refused(given: list[bytes], help_text: str) -> None:
    words = [word.decode(errors="replace") for word in given]
    with suppress(SlurmHealthError):
        line = parse(words, own=OWN, read_help=lambda: help_text)
        assert len(line.plain) <= len(words)
        given_in([f"--{name}={text or ''}" for name, text in line.own], "command line")
        node_counts(options_asked(line, [], {}, lambda: help_text), 1)
    listed_options(help_text)


# --- the site's file ---------------------------------------------------------------------------

SITES = [
    b"""journal = "~/j"
[hooks]
state = "/var/lib/slurm-health"
[breaker]
share = 0.1
[localize]
network_floor = 1
[expectations."NVIDIA H100 80GB HBM3"]
matmul_tflops = 600
[checks.scratch]
check = "filesystem"
path = "/scratch"
contexts = ["prolog", "retest"]
nodes = ["gpu[01-16]"]
[checks.memory]
min_total_gib = 10
time_limit_s = 2.5
"""
]
KEYS = [b"[checks.x]\n", b"[checks]\n", b"[hooks]\n", b"[recovery]\n", b"check = 'file'\n", b"1\n",
        b"enabled = 3\n", b"journal = 1\n", b"path = ''\n", b"[[marks]]\n", b"nan\n", b"inf\n",
        b"= [1]\n", b"severity = 'pass'\n", b"shadow = true\n", b"expectations = 1\n"]  # fmt: skip


@pytest.fixture(scope="module")
def site_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("site")


@given(data=damaged(SITES, ODD + KEYS))
def test_any_site_file_is_settings_or_an_error_of_ours(site_directory: Path, data: bytes) -> None:
    path = write_site(site_directory, "")
    path.write_bytes(data)
    environ = {"HOME": "/home/ml", config.SITE_FILE_VARIABLE: str(path)}
    for read_it in (
        config.localize,
        config.expectations,
        lambda env: config.journal_root(None, env),
    ):
        with suppress(SlurmHealthError):
            read_it(environ)
    with suppress(SlurmHealthError):
        site_file.load(path)
