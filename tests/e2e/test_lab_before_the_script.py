# SPDX-License-Identifier: Apache-2.0
"""What has happened when a job's script begins: the user's setup, and the end of all agents."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab import played_nodes
from tests.lab.installed_site import Site
from tests.lab.played_nodes import FAKE_WORKER, FAULTY

pytestmark = [
    pytest.mark.lab,
    pytest.mark.timeout(600),
]

# Every node sees the processes of all.
LOOK = """\
#!/bin/bash
for each in /proc/[0-9]*; do
    words=$(tr '\\0' ' ' <$each/cmdline 2>/dev/null)
    case $words in
    *"slurm_health agent "* | *"/probes/worker.py "*) echo "ALIVE $words" ;;
    esac
done
echo "looked"
"""


@pytest.mark.heavy
@pytest.mark.parametrize("options", ["-N6", "-N4 --check=matmul"])
def test_no_process_of_a_check_is_alive_when_the_script_begins(site: Site, options: str) -> None:
    played_nodes.play(site)
    script = site.script("look.sh", LOOK)
    job = played_nodes.submit(site, *options.split(), script, script="")
    assert site.ended(job)["JobState"] == "COMPLETED"
    output = site.lab.job_output(job)
    assert "looked" in output
    assert "ALIVE" not in output
    for node in ("n1", "n2", "n3", "n4"):
        assert site.records(job, writer=node)[-1]["kind"] == "agent_ended"


def test_a_setup_named_in_the_script_is_what_the_check_runs_with_and_the_script_is_as_before(
    site: Site,
) -> None:
    played_nodes.play(site, n2=FAULTY)
    played = site.directory("elsewhere")
    (Path(played) / "n2").write_text("well")
    setup = site.script("env.sh", f"export FAKE_WORKER_DIR={played}\n")
    text = f'#!/bin/bash\n#HEALTH --setup={setup}\necho "dir=$FAKE_WORKER_DIR."\n'
    script = site.script("train.sh", text)
    job = site.submit(f"--python={FAKE_WORKER}", "-N2", script)
    site.ended(job)
    # ~/played, which counts without the setup, says otherwise of n2.
    reports = [r for r in site.records(job, writer="n2") if r["kind"] == "node_reported"]
    assert {each["outcome"] for each in reports} == {"measured"}
    assert "dir=." in site.lab.job_output(job)
