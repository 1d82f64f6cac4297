# SPDX-License-Identifier: Apache-2.0
"""A job that asked Slurm for mail: what its owner is sent, by Slurm's own program."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab import Lab
from tests.lab.installed_site import Site, eventually
from tests.lab.played_nodes import play, submit

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]

# Slurm's own mail comes from slurmctld, as SlurmUser; ours from a node, as the owner.
MAIL = """#!/bin/sh
[ "$(id -un)" = alice ] || exit 0
{ echo "to $3: $2"; cat; } >>"$HOME/mail"
"""
FAILS = "python3 -c 'raise ValueError(\"bad label 17\")'"


@pytest.fixture(scope="module")
def module_site() -> Iterator[Site]:
    with Lab.start(nodes=4, slurm_conf_extra="MailProg=/etc/slurm/mail") as lab:
        mail = lab.paths.etc / "slurm" / "mail"
        mail.write_text(MAIL)
        mail.chmod(0o755)
        yield Site(lab)


def test_a_failure_is_mailed_once_to_who_asked_for_mail_and_to_nobody_else(
    module_site: Site,
) -> None:
    play(module_site)
    asked = submit(module_site, "-N2", "--mail-type=FAIL", script=FAILS)
    silent = submit(module_site, "-N2", script=FAILS)
    for job in (asked, silent):
        assert module_site.ended(job)["JobState"] == "FAILED"
    eventually(module_site, lambda: "ValueError" in module_site.read("mail"), "the mail", 60)

    mail = module_site.read("mail")
    assert f"to alice: slurm-health: job {asked}: ValueError: bad label 17" in mail
    assert mail.count("slurm-health report") == 1
