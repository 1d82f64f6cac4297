# SPDX-License-Identifier: Apache-2.0
"""What has happened when a job's script begins: the user's setup, and the end of all agents."""

from __future__ import annotations

import pytest

from tests.lab import played_nodes
from tests.lab.installed_site import Site

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
