# SPDX-License-Identifier: Apache-2.0
"""`make bundle`: slurm-health with an interpreter of its own, in one archive.

    python -m distribution.bundle --python DIR --output DIR

For nodes whose distribution has no Python 3.11, as RHEL 8 and 9. DIR is a relocatable interpreter
for this machine's architecture, 3.11 or newer: bin/python3.N and lib/python3.N. The archive can be
unpacked anywhere. It is refused where a file in it needs a newer glibc than `--glibc`, or a library
that is neither in it nor glibc's own.
"""

from __future__ import annotations

import argparse
import gzip
import io
import os
import re
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

from distribution import EXTRAS, ROOT, run
from slurm_health import __version__

# RHEL 8's. What pip may take of a package index is built for it, or for an older one.
GLIBC = "2.28"
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
# Libraries of glibc itself, which every machine has; and the C++ compiler's, which numpy brings.
_OF_GLIBC = re.compile(r"^(lib(c|m|dl|rt|util|pthread|resolv|crypt)\.so\.\d|ld-linux.*\.so\.\d)")
# Of no use to a command, and a third of what an interpreter takes.
_LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "config-*")
_COMMAND = """\
#!/bin/sh
# Wherever the archive was unpacked, and by whatever link this was called.
here=$(dirname "$(readlink -f "$0")")
exec "$here/{python}" -E -P -m slurm_health "$@"
"""


def main() -> None:
    """Build the archive and print where it is, or say what in it would not run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", type=Path, required=True, help="a relocatable interpreter")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("--glibc", default=GLIBC, help=f"the oldest that it is for ({GLIBC})")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = assemble(options.python, Path(scratch), wheels_for(options.python, Path(scratch)))
        wrong = [*too_new(tree, options.glibc), *not_inside(tree)]
        if wrong:
            sys.exit("bundle: this interpreter would not run on the nodes:\n" + "\n".join(wrong))
        name = f"slurm-health-{__version__}-{os.uname().machine}.tar.gz"
        print(archive(tree, options.output / name))


def _version(python: Path) -> str:
    """Return the name of an interpreter's command, `python3.12`.

    Exits where there is none that slurm-health can use.
    """
    found = sorted(python.glob("bin/python3.*[0-9]"))
    if not found:
        sys.exit(f"bundle: {python} has no bin/python3.N; it is the root of an interpreter")
    name = found[-1].name
    if int(name.rpartition(".")[2]) < 11:
        sys.exit(f"bundle: {found[-1]} is older than 3.11")
    return name


def wheels_for(python: Path, scratch: Path) -> list[Path]:
    """Return wheels of slurm-health and of all that it needs but torch, for that interpreter."""
    wheels = scratch / "wheels"
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", wheels)
    own = next(wheels.glob("*.whl"))
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", wheels]
    run(*command, *_for_nodes(_version(python)), f"{own}[{EXTRAS}]")
    return sorted(wheels.glob("*.whl"))


def assemble(python: Path, scratch: Path, wheels: list[Path]) -> Path:
    """Return a directory with an interpreter and the wheels in it, as it is unpacked on a node."""
    name = _version(python)
    tree = scratch / "slurm-health"
    shutil.copytree(
        python / "lib" / name, tree / "lib" / name, symlinks=True,
        ignore=shutil.ignore_patterns(*_LEFT_OUT, "__pycache__", "site-packages", "dist-packages"),
    )  # fmt: skip
    for library in (python / "lib").glob("*.so*"):
        shutil.copy(library, tree / "lib" / library.name)
    (tree / "bin").mkdir()
    shutil.copy((python / "bin" / name).resolve(), tree / "bin" / name)
    for link in ("python", "python3"):
        (tree / "bin" / link).symlink_to(name)
    packages = tree / "lib" / name / "site-packages"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    command += ["--no-compile", "--target", str(packages), *_for_nodes(name)]
    run(*command, *wheels)
    for extra in ("bin", "share"):  # their commands name the interpreter that pip ran with
        if (packages / extra).is_dir():
            shutil.move(packages / extra, tree / f"of-{extra}")
    if (tree / "of-share").is_dir():
        (tree / "of-share").rename(tree / "share")
    if (tree / "of-bin/py-spy").is_file():
        shutil.move(tree / "of-bin/py-spy", tree / "bin")
    shutil.rmtree(tree / "of-bin", ignore_errors=True)
    (tree / "bin/slurm-health").write_text(_COMMAND.format(python=name))
    (tree / "bin/slurm-health").chmod(0o755)
    shutil.copy(ROOT / "LICENSE", tree)
    run("chmod", "-R", "u+rwX,go+rX,go-w", tree)
    return tree


def _for_nodes(name: str) -> list[str]:
    """Return what tells pip to choose for that interpreter, and for the oldest glibc."""
    machine = os.uname().machine
    platforms = [f"--platform={each}_{machine}" for each in _PLATFORMS]
    version = f"--python-version={name.removeprefix('python')}"
    return [version, "--implementation=cp", "--only-binary=:all:", *platforms]


def too_new(tree: Path, limit: str) -> Iterator[str]:
    """Yield the files that need a newer glibc than `limit`, each with the version it needs."""
    for path, elf in _programs(tree):
        needs = [
            version.name.removeprefix("GLIBC_")
            for section in elf.iter_sections()
            if isinstance(section, GNUVerNeedSection)
            for _, versions in section.iter_versions()
            for version in versions
            if version.name.startswith("GLIBC_")
        ]
        newest = max(filter(_is_number, needs), key=_number, default="0")
        if _number(newest) > _number(limit):
            yield f"  {path.relative_to(tree)} needs glibc {newest}, limit {limit}"


def not_inside(tree: Path) -> Iterator[str]:
    """Yield the files that need a library which is neither in the tree nor glibc's."""
    inside = {path.name for path in tree.rglob("*.so*")}
    for path, elf in _programs(tree):
        for section in elf.iter_sections():
            if not isinstance(section, DynamicSection):
                continue
            for tag in section.iter_tags("DT_NEEDED"):
                name = str(tag.needed)  # type: ignore[attr-defined]  # there for such tags
                if name not in inside and not _OF_GLIBC.match(name):
                    yield f"  {path.relative_to(tree)} needs {name}, which is not in the archive"


def _programs(tree: Path) -> Iterator[tuple[Path, ELFFile]]:
    for path in sorted(tree.rglob("*")):
        if path.is_symlink() or not path.is_file():
            continue
        with path.open("rb") as file:
            if file.read(4) != b"\x7fELF":
                continue
            try:
                yield path, ELFFile(file)
            except ELFError as err:
                sys.exit(f"bundle: {path}: {err}")


def _is_number(text: str) -> bool:
    return all(part.isdecimal() for part in text.split("."))


def _number(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def archive(tree: Path, path: Path) -> Path:
    """Write a tree into an archive that is the same each time: sorted, root's, of one time."""
    time_s = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = "root"
        entry.mtime = time_s
        return entry

    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as file:
        for each in [tree, *sorted(tree.rglob("*"))]:
            name = each.relative_to(tree.parent)
            file.add(each, arcname=str(name), recursive=False, filter=plain)
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))
    return path


if __name__ == "__main__":
    main()
