# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from slurm_health.training.monitor.srun_output import glob_of, patterns_in

ENVIRON = {
    "SLURM_JOB_ID": "12",
    "SLURM_ARRAY_JOB_ID": "10",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_JOB_NAME": "train",
}


@pytest.mark.parametrize(
    ("line", "patterns"),
    [
        ("srun --output=a.%j --error b.%t python x", ["a.%j", "b.%t"]),
        ("srun -o a -eb python x", ["a", "b"]),
        ('exec srun -N2 --output="$HOME/my logs/%x" python x', ["$HOME/my logs/%x"]),
        ("srun \\\n  --output=a \\\n  python x", ["a"]),
        ("# srun --output=a", []),
        ("srun --output='a", ["'a"]),
        ("python --output=a", []),
    ],
)
def test_the_options_of_srun_are_found_in_a_script(line: str, patterns: list[str]) -> None:
    assert list(patterns_in(line)) == patterns


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("out-%j.txt", "out-12.txt"),
        ("%A_%a.txt", "10_3.txt"),
        ("%x-%5j.txt", "train-00012.txt"),
        ("out-%t.txt", "out-[0-9]*.txt"),
        ("out-%N.%n.%s", "out-*.[0-9]*.[0-9]*"),
        ("%J.txt", "12.*.txt"),
        ("100%%.txt", "100%.txt"),
        ("a[1]*.txt", "a[[]1][*].txt"),
        ("$SLURM_JOB_ID/${SLURM_JOB_NAME}.txt", "12/train.txt"),
        ("$RUN/x.txt", "*/x.txt"),
        (r"a\%j", "a%j"),
        ("/dev/null", ""),
        ("none", ""),
        ("%t", ""),
        ("logs/%N%t", ""),
    ],
)
def test_a_pattern_of_srun_becomes_the_names_of_its_files(pattern: str, name: str) -> None:
    assert glob_of(pattern, ENVIRON) == name
