# SPDX-License-Identifier: Apache-2.0
"""Logs of failed jobs, each with the class of its cause and the exit code.

Of a class, the causes count as right that say the same in our words. A process that ended well
with a loss that is no number has not failed for us: what the monitor says while it runs counts.
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.replay.source import Score, Source
from slurm_health.training.diagnosis.collected import ScriptEnd
from slurm_health.training.diagnosis.failure import FailureDiagnostician
from slurm_health.training.diagnosis.output import read_output
from slurm_health.training.diagnosis.output_lines import Losses
from slurm_health.training.diagnosis.pace import NOT_A_NUMBER
from slurm_health.training.framework import DataManager

_RIGHT = {
    "assertion": {"program-error", "same-error-everywhere"},
    "cuda_oom": {"gpu-out-of-memory"},
    "cuda_runtime": {"device-assert", "illegal-access", "launch-failure", "gpu-library-failed"},
    "device_mismatch": {"device-mismatch"},
    "div_zero": {"program-error"},
    "file_not_found": {"file-not-found", "script-not-found"},
    "missing_module": {"module-not-found"},
    "nan_loss": {"not-a-number"},
    "nccl": {"connections-broke", "collective-timed-out", "ranks-waited", "never-entered"},
    "oom_killer": {"killed-for-memory"},
    "permission": {"permission-denied"},
    "ram_oom": {"host-out-of-memory"},
    "runtime_error": {"program-error", "wrong-shape", "missing-key", "gpu-not-supported"},
    "segfault": {"crashed"},
    "traceback": {"program-error"},
}
_OPEN = {None, "script-failed", "rank-failed"}


def score(labels: Path) -> Score:
    """Read each log as a job's output, and compare the cause with its class."""
    score = Score()
    diagnostician = FailureDiagnostician()
    for line in labels.read_text().splitlines():
        label = json.loads(line)
        text = (labels.parents[1] / label["log_path"]).read_text(errors="replace")
        status = int(label["true_exit_code"])
        end = ScriptEnd(
            exit_code=status if status >= 0 else 128 - status,
            signal=max(0, -status),
            nodes=("n1",),
        )
        log = read_output([("output", text)])
        diagnosed = diagnostician.diagnose(data_manager=DataManager([end, log])).diagnosed
        cause = diagnosed.cause if diagnosed else _seen_while_it_ran(text)
        score.innocent += bool(diagnosed and diagnosed.accused)
        if cause in _RIGHT[label["mode"]]:
            score.right += 1
        elif cause in _OPEN:
            score.undecided += 1
        else:
            score.wrong += 1
        if cause not in _RIGHT[label["mode"]]:
            score.missed.append(f"{label['id']}: {cause}")
    return score


def _seen_while_it_ran(text: str) -> str | None:
    losses = Losses()
    seen = [each for line in text.splitlines() if (each := losses.take(line)) is not None]
    return NOT_A_NUMBER if seen else None


SOURCES = (
    Source(
        name="gpualert-eval",
        place="corpus/labels.jsonl",
        anchor="473 of 474 by its own tool",
        seen=True,
        score=score,
    ),
)
