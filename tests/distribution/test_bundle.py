# SPDX-License-Identifier: Apache-2.0
"""slurm-health with an interpreter of its own: what it may need, and that it needs no other."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distribution import bundle

PYTHON = f"python3.{sys.version_info.minor}"
STANDARD_LIBRARY = Path(f"/usr/lib/{PYTHON}")
of_debian = pytest.mark.skipif(
    not (STANDARD_LIBRARY / "os.py").exists() or not Path("/usr/bin", PYTHON).exists(),
    reason=f"the distribution has no {PYTHON}",
)
# Takes away all interpreters that the distribution, or whoever installed one beside it, has.
WITHOUT_PYTHON = """\
set -e
mkdir -p {empty}
for each in /usr/lib/python3* /usr/local/lib/python3* /usr/share/python3; do
    if [ -d $each ]; then mount --bind {empty} $each; fi
done
for each in /usr/bin/python3* /usr/local/bin/python3*; do
    if [ -f $each ]; then mount --bind /dev/null $each; fi
done
if /usr/bin/python3 -c 1 2>/dev/null; then echo there is a Python still; exit 9; fi
{bundle}/bin/slurm-health --version
{bundle}/bin/slurm-health init-hooks {etc}
{bundle}/bin/slurm-health healthcheck --explain --config {etc}/config.toml
SLURMD_NODENAME=n1 {etc}/prolog/slurm-health-healthcheck
"""


def interpreter(directory: Path) -> Path:
    """Copy the distribution's interpreter: relocatable, but for this distribution's glibc."""
    (directory / "bin").mkdir(parents=True)
    shutil.copy(Path("/usr/bin", PYTHON).resolve(), directory / "bin" / PYTHON)
    ignored = shutil.ignore_patterns("test", "__pycache__", "dist-packages", "config-*")
    # Debian has what it changes of its own there as links into /etc.
    shutil.copytree(STANDARD_LIBRARY, directory / "lib" / PYTHON, ignore=ignored, symlinks=True)
    return directory


@of_debian
def test_a_file_that_needs_a_newer_glibc_or_another_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(Path("/usr/bin", PYTHON).resolve(), tmp_path / "bin" / PYTHON)
    (tmp_path / "text.so").write_text("no program\n")

    found = "\n".join(bundle.too_new(tmp_path, "2.4"))
    needed = re.findall(r"needs glibc ([\d.]+), limit 2.4", found)

    assert found.startswith(f"  bin/{PYTHON} needs glibc 2.")
    assert list(bundle.too_new(tmp_path, needed[0])) == []  # as new as it needs, and no newer
    assert [
        line for line in bundle.not_inside(tmp_path) if "libc.so" in line or "libm.so" in line
    ] == []


@of_debian
def test_a_library_that_is_in_the_archive_is_there(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    shutil.copy(Path("/usr/bin", PYTHON).resolve(), tmp_path / "bin" / PYTHON)
    missing = {line.split(" needs ")[1].split(",")[0] for line in bundle.not_inside(tmp_path)}
    if not missing:
        pytest.skip("this interpreter needs glibc alone")
    for name in missing:
        (tmp_path / name).touch()

    assert list(bundle.not_inside(tmp_path)) == []


def test_an_archive_is_the_same_each_time_and_belongs_to_root(tmp_path: Path) -> None:
    tree = tmp_path / "slurm-health"
    (tree / "bin").mkdir(parents=True)
    (tree / "bin/command").write_text("#!/bin/sh\n")
    first = bundle.archive(tree, tmp_path / "first.tar.gz").read_bytes()
    os.utime(tree / "bin/command", (1, 1))

    second = bundle.archive(tree, tmp_path / "second.tar.gz").read_bytes()

    assert first == second
    assert b"root" in gzip.decompress(first)


@pytest.mark.parametrize(
    ("name", "said"), [(None, "has no bin/python3.N"), ("python3.9", "is older than 3.11")]
)
def test_what_is_no_interpreter_is_refused(tmp_path: Path, name: str | None, said: str) -> None:
    (tmp_path / "bin").mkdir()
    if name:
        (tmp_path / "bin" / name).touch()

    with pytest.raises(SystemExit, match=said):
        bundle.wheels_for(tmp_path, tmp_path)


@of_debian
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to hide the interpreters")
def test_it_runs_where_the_distribution_has_no_python(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    tree = bundle.assemble(interpreter(tmp_path / "python"), scratch, bundle_wheels(tmp_path))
    # Debian's interpreter calls the directory of its packages so.
    (tree / "lib" / PYTHON / "dist-packages").symlink_to("site-packages")
    for path in (tree, *tree.parents):
        if path.is_relative_to(tmp_path):
            path.chmod(0o755)
    etc = tmp_path / "etc"
    etc.mkdir(mode=0o755)
    (etc / "config.toml").write_text(f'[hooks]\nstate = "{tmp_path}/state"\n[checks.memory]\n')
    (etc / "config.toml").chmod(0o644)
    script = WITHOUT_PYTHON.format(empty=tmp_path / "empty", bundle=tree, etc=etc)

    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("slurm-health "), done.stdout
    assert f"Prolog={etc}/prolog/slurm-health\n" in done.stdout
    assert "not checked" not in done.stdout + done.stderr
    assert str(tree) in (etc / "prolog/slurm-health-healthcheck").read_text()


def bundle_wheels(directory: Path) -> list[Path]:
    """Take wheels of what slurm-health needs from the package index, as `make bundle` does."""
    python = directory / "python"
    return bundle.wheels_for(python, directory)
