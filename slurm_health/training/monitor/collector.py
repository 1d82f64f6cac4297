# SPDX-License-Identifier: Apache-2.0
"""What a collector is, and what it is told of the job that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from slurm_health.training.diagnosis.collected import ScriptEnd


@dataclass(frozen=True, kw_only=True)
class EndedJob:
    """A job whose script has ended.

    Args:
        end: how, and on which nodes it ran.
        environ: the script's environment.
        node: the name of the batch host, on which this process runs.
        directory: where the script was started.
        outputs: the files of its standard output and error; one that is no file is left out.
        output_from: where in these files its output begins; what an earlier start of the script
            wrote stands before it.
        script_text: the script itself, empty where it cannot be read.
        ended_s: when it ended, in seconds since the epoch, by this node's clock.
        duration_s: how long it ran.
        run_directory: of the run in the journal, None where there is none.
    """

    end: ScriptEnd
    environ: Mapping[str, str]
    node: str
    directory: Path
    outputs: tuple[Path, ...] = ()
    output_from: Mapping[Path, int] = field(default_factory=dict)
    script_text: str = ""
    ended_s: float = 0.0
    duration_s: float = 0.0
    run_directory: Path | None = None


@dataclass(frozen=True)
class Enabled:
    """Whether a collector has something to look at here: it has unless there is a reason not to."""

    why_not: str = ""

    def __bool__(self) -> bool:
        return not self.why_not


class NothingCollected(Exception):
    """There is nothing to collect, for the reason that this says. That is no failure."""


class DataCollector(Protocol):
    """Gathers one kind of data. Runs in a child process with a time limit; it may raise or hang."""

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def data(self) -> type[msgspec.Struct]:
        """The kind of what it collects, with which operators ask for it."""

    def is_enabled(self, job: EndedJob, /) -> Enabled:
        """Tell whether it can collect here, and why not."""

    def collect_data(self, job: EndedJob, /) -> msgspec.Struct:
        """Return what there is.

        Raises:
            NothingCollected: there is nothing, and why.
        """


class LiveCollector(Protocol):
    """Gathers one kind of data on the batch host while a training hangs, in a child, as above."""

    @property
    def name(self) -> str:
        """What reports call it."""

    @property
    def data(self) -> type[msgspec.Struct]:
        """The kind of what it collects."""

    def is_enabled(self, environ: Mapping[str, str], /) -> Enabled:
        """Tell whether it can collect in a job with this environment, and why not."""

    def collect_data(self, environ: Mapping[str, str], limit_s: float, /) -> msgspec.Struct:
        """Return what there is, within `limit_s`.

        Raises:
            NothingCollected: there is nothing, and why.
        """
