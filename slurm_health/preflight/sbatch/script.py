# SPDX-License-Identifier: Apache-2.0
"""The text that is submitted in place of the user's script: a launcher with the script inside.

sbatch reads options only from the comment lines at the top, so these are repeated above the
launcher; the script itself follows at the end, byte for byte. The launcher's text is the file
`launcher.sbatch` beside this one, with what to do where slurm-health cannot run on the batch host
in the middle: `not_started.sbatch`, or for a job that its site has checked by default
`not_started_by_default.sbatch`.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

from slurm_health.preflight.job_spec import JobSpec

_TEMPLATE, _ASKED_FOR, _BY_DEFAULT = (
    Path(__file__).with_name(f"{name}.sbatch")
    for name in ("launcher", "not_started", "not_started_by_default")
)
# A line of every launcher that `slurm-health sbatch` submits begins so.
SUBMITTED = "Submitted with slurm-health sbatch"
_FOREIGN = (b"#PBS", b"#BSUB")
# sbatch reads #PBS and #BSUB lines wherever they stand, until it has met more than this many
# lines that do not begin with `#`. As many blank lines end the launcher of a script with such lines
# at its top: read a second time inside of the script, some of them would add up.
_FOREIGN_LIMIT = 100
_COMPONENT = re.compile(rb"#(?:SBATCH|SLURM)\s*(?:hetjob|packjob)(?:\s|$)", re.IGNORECASE)
_WRAP_NAME = b"#SBATCH --job-name=wrap\n"


def read_template(*, by_default: bool = False) -> str:
    """Return the launcher's text, with names in place of what differs from job to job.

    `by_default`: for a job whose site has it checked, though its user did not ask for that.
    """
    middle = _BY_DEFAULT if by_default else _ASKED_FOR
    return _TEMPLATE.read_text(encoding="ascii").replace(
        "@not started@\n", middle.read_text(encoding="ascii")
    )


def by_default(*, template: str, python: str, flags: Sequence[str], rules: str) -> bytes:
    """Return what goes before the script of a job that its site has checked by default.

    It is the same for every script. `rules` are told to the supervisor, as one word.
    """
    values = {
        "options": b"--by-default=" + _quoted(rules),
        "name": b'"${SLURM_JOB_NAME-}"',
        "origin": b"By default on this cluster (slurm-health init default)",
        "needed": b", slurm_health.preflight.by_default.at_start",  # older installations lack it
    }
    return _launcher(template, python, flags, values)


def wrapped(command: bytes) -> bytes:
    """Return the script that sbatch makes of `--wrap=command`."""
    return b"#!/bin/sh\n# This script was created by sbatch --wrap.\n\n" + command + b"\n"


def header(script: bytes) -> list[bytes]:
    """Return the lines in which sbatch looks for options: up to the first command."""
    lines = []
    for line in script.split(b"\n"):
        if line.strip() and not line.lstrip().startswith(b"#"):
            break
        lines.append(line)
    return lines


def refusal(script: bytes) -> str | None:
    """Say why sbatch would refuse a script; None when it would not."""
    if not script.strip():
        return "it is empty"
    if not script.startswith(b"#!"):
        return "its first line does not begin with #!"
    if b"\0" in script:
        return "it contains a NUL byte"
    if b"\r\n" in script:
        return "it contains DOS line ends"
    return None


def has_components(script: bytes) -> bool:
    """Tell whether a script describes a heterogeneous job."""
    return any(_COMPONENT.match(line) for line in header(script))


def render(
    script: bytes,
    *,
    template: str,
    python: str,
    flags: Sequence[str],
    spec: JobSpec,
    name: str,
    is_wrap: bool = False,
) -> bytes:
    """Return the text to submit in place of `script`.

    `python` with `flags` runs slurm-health on the batch host, which does what `spec` asks for;
    `name` is what the user calls the script. `is_wrap` names the job as sbatch names one made
    with --wrap; environment, script and command line still rename it.
    """
    lines = header(script)[1:]
    if lines and not lines[-1]:
        lines.pop()  # what follows the last line end is not a line
    foreign = any(line.startswith(_FOREIGN) for line in lines)
    values = {
        "options": b"--spec=" + _quoted(spec.encoded()),
        "name": _quoted(name),
        "origin": SUBMITTED.encode(),
        "header": (_WRAP_NAME if is_wrap else b"") + b"".join(line + b"\n" for line in lines),
        "padding": b"\n" * (_FOREIGN_LIMIT + 1) if foreign else b"",
        "on_unchecked": _quoted(spec.on_unchecked.value),
    }
    return _launcher(template, python, flags, values) + script


# Of what the launcher says of itself, what may be nothing.
_NOTHING = dict.fromkeys(("header", "padding", "needed", "on_unchecked"), b"")


def _launcher(template: str, python: str, flags: Sequence[str], values: dict[str, bytes]) -> bytes:
    """Return the launcher, which knows on which line behind it the script begins."""
    filled = {
        **_NOTHING,
        "python": _quoted(python),
        "flags": b" ".join(_quoted(flag) for flag in flags),
        **values,
    }
    line = _fill(template, filled, line=0).count(b"\n") + 1
    return _fill(template, filled, line=line)


def _quoted(value: str) -> bytes:
    return os.fsencode(shlex.quote(value))


def _fill(template: str, values: Mapping[str, bytes], *, line: int) -> bytes:
    # Latin-1 maps every byte to one character and back, so any bytes pass through the template.
    texts = {key: value.decode("latin-1") for key, value in values.items()}
    return Template(template).substitute(texts, line=line).encode("latin-1")
