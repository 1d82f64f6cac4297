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
