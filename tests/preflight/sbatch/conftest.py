# SPDX-License-Identifier: Apache-2.0

import os
from pathlib import Path

import pytest

from tests.preflight.sbatch.desk import FAKE, SCRIPT, Desk
from tests.support.supervised import write_executable


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    directory = tmp_path / "desk"
    (tmp_path / "bin").mkdir()
    directory.mkdir()
    write_executable(tmp_path / "bin" / "sbatch", FAKE)
    monkeypatch.chdir(directory)
    (directory / "train.sh").write_bytes(SCRIPT)
    record = tmp_path / "record"
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    return Desk(directory, record, {"PATH": path, "FAKE_RECORD": str(record)})
