# SPDX-License-Identifier: Apache-2.0
"""What hooks say is found in a real journald by the command that the documentation gives."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shell.test_shims import install
from tests.support.sites import write_site

JOURNALD = Path("/usr/lib/systemd/systemd-journald")
FLAG = "broken"
# A journald of its own, in a mount namespace with a /run and a /dev of its own.
WITH_JOURNALD = """
set -e
mount -t tmpfs none /run
mkdir -p /run/dev /run/systemd/journal /run/log/journal
for name in null zero urandom; do
    touch /run/dev/$name
    mount --bind /dev/$name /run/dev/$name
done
mount --rbind /run/dev /dev
"$1" &
journald=$!
trap 'kill $journald; wait' EXIT
until [ -S /run/systemd/journal/dev-log ]; do sleep 0.05; done
ln -s /run/systemd/journal/dev-log /dev/log
shift
"$@" || true
sleep 0.1
journalctl --sync
journalctl --directory=/run/log/journal -t slurm-health -o json --no-pager
"""


@pytest.mark.root
@pytest.mark.skipif(
    not JOURNALD.exists() or shutil.which("journalctl") is None, reason="no systemd-journald"
)
def test_what_a_hook_and_its_shim_say_is_found_by_their_name(tmp_path: Path) -> None:
    (tmp_path / FLAG).touch()
    site = f"""\
[hooks]
state = "{tmp_path}/state"
[checks.flag]
check = "file"
path = "{tmp_path}/{FLAG}"
exists = false
"""
    prolog = "prolog/slurm-health"
    shims = []
    for name, config in (("good", write_site(tmp_path / "etc", site)), ("bad", Path("/nothing"))):
        (tmp_path / name).mkdir()
        shims.append(install(tmp_path / name, prolog, python=sys.executable, config=config))

    good, bad = map(logged, shims)

    assert f"prolog: node=n3 job=7 check=flag node_fault: {tmp_path}/{FLAG}" in good[0]["MESSAGE"]
    assert (good[0]["PRIORITY"], good[0]["_COMM"]) == ("3", "python")
    assert bad[-1]["MESSAGE"] == "prolog: this node was not checked (code 78)"
    assert {each["SYSLOG_IDENTIFIER"] for each in good + bad} == {"slurm-health"}


def logged(hook: Path) -> list[dict[str, str]]:
    """Run a hook as slurmd does, and ask journald what came of it."""
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", WITH_JOURNALD]
    ran = subprocess.run(
        [*argv, "sh", str(JOURNALD), str(hook)],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SLURMD_NODENAME": "n3", "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    assert lines, ran
    return [json.loads(line) for line in lines]
