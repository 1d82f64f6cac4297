# SPDX-License-Identifier: Apache-2.0
"""The job whose script has ended, as collectors see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from slurm_health.training.diagnosis.collected import ScriptEnd


@dataclass(frozen=True, kw_only=True)
class EndedJob:
    """A job whose script has ended.

    Args:
        end: its exit status and nodes.
        environ: the script's environment.
        node: the name of the batch host, on which this process runs.
        directory: the script's working directory.
        outputs: the files of its standard output and error; pipes and devices are left out.
        output_from: the places in these files at which its output begins, behind that of an
            earlier start.
        script_text: the script itself, empty if it cannot be read.
        ended_s: when it ended, in seconds since the epoch, by this node's clock.
        duration_s: how long it ran.
        run_directory: of the run in the journal, None without one.
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
