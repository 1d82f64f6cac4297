# SPDX-License-Identifier: Apache-2.0
"""`make release`: all that a release is made of, in one directory, with its checksums.

    SOURCE_DATE_EPOCH=$(git log -1 --format=%ct) python -m distribution.release --output DIR

The wheel and the source archive, built twice and compared; the packages that the tools at hand can
build; a list of all that is installed with it (CycloneDX); SHA256SUMS, signed if `--sign` names a
key of GnuPG. docs/admin/elsewhere.md has the checklist around it.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from distribution import EXTRAS, ROOT, run
from slurm_health import __version__


def main() -> None:
    """Build everything, and print what was made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist/release")
    parser.add_argument("--sign", metavar="KEY", help="a key of GnuPG to sign SHA256SUMS with")
    parser.add_argument("--no-packages", action="store_true", help="neither .deb nor .rpm")
    parser.add_argument(
        "--uncommitted", action="store_true", help="of files as they lie, to try it"
    )
    options = parser.parse_args()
    output = options.output.absolute()
    if output.is_dir() and any(output.iterdir()):
        sys.exit(f"release: {output} is not empty: a release is made of nothing that lies there")
    if "SOURCE_DATE_EPOCH" not in os.environ:
        sys.exit(
            "release: set SOURCE_DATE_EPOCH, by which two builds are the same (make release does)"
        )
    if not options.uncommitted and (changed := uncommitted(ROOT)):
        what = "release: in no commit, and it would be in the release: commit it or take it away"
        sys.exit("\n  ".join([f"{what} (--uncommitted: as it is)", *changed]))
    if f"\n## [{__version__}]" not in (ROOT / "CHANGELOG.md").read_text():
        print(f"release: CHANGELOG.md has no [{__version__}] yet", file=sys.stderr)
    output.mkdir(parents=True, exist_ok=True)
    for each in archives(output):
        print(each)
    if not options.no_packages:
        run(sys.executable, "-m", "distribution.packages", "--output", output)
    bill_of_materials(next(output.glob("*.whl")), output / "sbom.cdx.json")
    sums = checksums(output)
    if options.sign:
        run(
            "gpg",
            "--batch",
            "--yes",
            "--local-user",
            options.sign,
            "--armor",
            "--detach-sign",
            sums,
        )
    else:
        print("release: not signed (--sign KEY)", file=sys.stderr)
    print(sums.read_text(), end="")


def uncommitted(tree: Path) -> list[str]:
    """Return what lies in a checkout and in no commit; a source archive would take it.

    Exits where git cannot tell. An unpacked source archive is no checkout: nothing of it is.
    """
    if not (tree / ".git").exists():
        return []
    command = ["git", "-C", str(tree), "status", "--porcelain", "--untracked-files=normal"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        sys.exit("release: there is no git here to tell whether all of this is committed")
    except subprocess.CalledProcessError as err:
        sys.exit(f"release: git status failed: {err.stderr.strip()}")
    return [line[3:] for line in said.splitlines()]


def archives(output: Path) -> list[Path]:
    """Build wheel and source archive into a directory.

    Exits where a second build of the same files is not the same, byte for byte.
    """
    run(sys.executable, "-m", "hatchling", "build", "-d", output)
    made = [*output.glob("*.whl"), *output.glob("*.tar.gz")]
    with tempfile.TemporaryDirectory() as again:
        run(sys.executable, "-m", "hatchling", "build", "-d", again)
        for each in made:
            if each.read_bytes() != Path(again, each.name).read_bytes():
                sys.exit(f"release: two builds of {each.name} differ")
    return made


def bill_of_materials(wheel: Path, path: Path) -> None:
    """Write what is installed with a wheel, by installing it, in the form of CycloneDX."""
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=False)
        python = Path(scratch, "bin/python")
        run(
            sys.executable,
            "-m",
            "pip",
            "--python",
            python,
            "install",
            "--quiet",
            f"{wheel}[{EXTRAS}]",
        )
        run(sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible",
             "--output-file", path, python)  # fmt: skip


def checksums(output: Path) -> Path:
    """Write SHA256SUMS of all files in a directory, as `sha256sum --check` reads it."""
    path = output / "SHA256SUMS"
    files = sorted(each for each in output.iterdir() if each.is_file() and each != path)
    lines = [f"{hashlib.sha256(each.read_bytes()).hexdigest()}  {each.name}\n" for each in files]
    path.write_text("".join(lines))
    return path


if __name__ == "__main__":
    main()
