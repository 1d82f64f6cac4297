# SPDX-License-Identifier: Apache-2.0
"""`--setup`: what a file of the user's exports is what the probes run with.

The probes are played. What they do is read from a directory that only the file names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.command_line import Done, slurm_health

FAKE_WORKER = Path(__file__).parents[1] / "support" / "fake_worker.py"


def check(directory: Path, setup: str, *words: str) -> Done:
    """Check four played nodes, of which the last one's network fails, after sourcing a file."""
    played = directory / "played"
    played.mkdir()
    (played / "local3").write_text("unreachable")
    (directory / "env.sh").write_text(f"export FAKE_WORKER_DIR={played}\n{setup}\n")
    return slurm_health(
        "check",
        "--local=4",
        f"--journal={directory}/journal",
        f"--setup={directory}/env.sh",
        "--json",
        *words,
        environ={"FAKE_WORKER_DIR": str(directory)},
    )


def run_started(directory: Path) -> dict[str, Any]:
    (master,) = directory.glob("journal/local/*/0/master.jsonl")
    found: dict[str, Any] = json.loads(master.read_text().splitlines()[0])
    return found


def test_the_probes_run_with_what_the_file_exports_and_a_failed_exchange_names_the_interface(
    tmp_path: Path,
) -> None:
    exported = "export GLOO_SOCKET_IFNAME=lo API_TOKEN=secret; echo API_TOKEN=secret"

    done = check(tmp_path, exported, f"--python={FAKE_WORKER}")

    reasons = {each["node"]: each["reason"] for each in json.loads(done.stdout)["nodes"]}
    assert "connects over GLOO_SOCKET_IFNAME=lo" in reasons["local3"]
    assert run_started(tmp_path)["settings"]["setup"] == f"{tmp_path}/env.sh"
    written = "".join(path.read_text() for path in tmp_path.glob("journal/local/*/0/*.jsonl"))
    assert "secret" not in written + done.stdout + done.stderr


def test_a_python_path_that_the_file_sets_for_its_own_interpreter_does_not_harm_the_agents(
    tmp_path: Path,
) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('the wrong click')\n")

    done = check(tmp_path, f"export PYTHONPATH={tmp_path}", f"--python={FAKE_WORKER}")

    assert "the wrong click" not in done.stderr
    assert {each["level"] for each in json.loads(done.stdout)["nodes"][:3]} == {"healthy"}
