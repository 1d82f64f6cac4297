# SPDX-License-Identifier: Apache-2.0
"""Config files of a site, for the lab and for tests."""

import tempfile
from pathlib import Path


def write_site(directory: Path, text: str) -> Path:
    """Write a config file that only its owner may write; its path."""
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    path = directory / "config.toml"
    path.write_text(text)
    path.chmod(0o644)
    return path


def let_root_drain(directory: Path) -> dict[str, str]:
    """Write rules by which root's jobs may drain, with a new ledger; the variable to set."""
    place = Path(tempfile.mkdtemp(prefix="rules-", dir=directory))
    (place / "shared").mkdir(mode=0o755)
    file = write_site(place, f"[breaker]\ndirectory = '{place}/shared'\n")
    return {"SLURM_HEALTH_CONFIG": str(file)}
