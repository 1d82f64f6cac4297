# SPDX-License-Identifier: Apache-2.0

from typing import Any

import msgspec

from slurm_health.preflight.by_default.at_start import Rules, choose
from slurm_health.preflight.job_spec import JobSpec
from tests.support.rows import rows


@rows
def test_rules_what_the_job_was_given_and_the_users_wishes_decide_whether_and_how_it_is_checked(
    rules: dict[str, Any],
    lines: str,
    environ: dict[str, str],
    spec: dict[str, Any] | None,
    quiet: bool,
    said: str,
) -> None:
    """`spec` is how the check differs from the usual one of a job that nobody asked for."""
    text = rules.get("text") or msgspec.json.encode(msgspec.convert(rules, Rules)).decode()
    job = {"SLURM_JOB_NUM_NODES": "4", **environ}
    known = {name.encode(): value.encode() for name, value in job.items() if value}

    choice = choose(text, f"#!/bin/sh\n{lines}\necho ran\n".encode(), known)

    usual = {"unasked": True, "monitor": "off", "heartbeat": "off"}
    assert choice.spec == (None if spec is None else msgspec.convert({**usual, **spec}, JobSpec))
    assert (choice.quiet, said in choice.said) == (quiet, True)
    assert bool(choice.said) is bool(said)
