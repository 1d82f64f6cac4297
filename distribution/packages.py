# SPDX-License-Identifier: Apache-2.0
"""`make packages`: the `.deb` and the `.rpm`, by whichever of dpkg-deb and rpmbuild are here.

    python -m distribution.packages --output DIR

Both hold one tree: a virtual environment in /opt/slurm-health, with all that slurm-health needs but
torch, and links to it where commands, pages and completion are looked for. They are for the
machine's architecture and for the distribution's Python of the version that makes them.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
import string
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path

from distribution import EXTRAS, ROOT, run
from slurm_health import __version__

_HERE = Path(__file__).parent
_PYTHON = f"python3.{sys.version_info.minor}"
_HOME = Path("opt/slurm-health")
# -E and -P: modules of HPC sites set PYTHONPATH, for another Python and its compiled packages.
_COMMAND = f"""\
#!/{_HOME}/bin/python -EP
import sys

from slurm_health.cli.main import main

sys.exit(main())
"""
_SCRIPTS = {
    "preinst": "before_install",
    "postinst": "after_install",
    "postrm": "after_removal",
}


def main() -> None:
    """Build what the tools at hand can build, and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    output = parser.parse_args().output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    builders = {"dpkg-deb": _deb, "rpmbuild": _rpm}
    missing = [tool for tool in builders if shutil.which(tool) is None]
    if len(missing) == len(builders):
        sys.exit("packages: neither dpkg-deb nor rpmbuild is here; install dpkg or rpm-build")
    with tempfile.TemporaryDirectory() as scratch:
        made = _tree(Path(scratch))
        for tool, build in builders.items():
            if tool in missing:
                print(f"packages: no {tool} here, so none of its packages", file=sys.stderr)
                continue
            tree = Path(scratch, tool)
            shutil.copytree(made, tree, symlinks=True)
            print(build(tree, output))


def _tree(scratch: Path) -> Path:
    """Return a directory with all files as they lie on a node."""
    tree, packages = scratch / "tree", scratch / "packages"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", packages,
         f"{ROOT}[{EXTRAS}]")  # fmt: skip
    share, commands = packages / "share", packages / "bin"
    binaries = tree / _HOME / "bin"
    binaries.mkdir(parents=True)
    for name in ("python", "python3"):
        (binaries / name).symlink_to(f"/usr/bin/{_PYTHON}")
    (binaries / "slurm-health").write_text(_COMMAND)
    (binaries / "slurm-health").chmod(0o755)
    shutil.move(commands / "py-spy", binaries)
    shutil.rmtree(commands)
    (tree / "usr" / "bin").mkdir(parents=True)
    (tree / "usr" / "bin" / "slurm-health").symlink_to(f"/{_HOME}/bin/slurm-health")
    _share(share, tree / "usr" / "share")
    configuration = "home = /usr/bin\ninclude-system-site-packages = false\n"
    (tree / _HOME / "pyvenv.cfg").write_text(configuration)
    _compiled(packages, tree)
    return tree


def _share(found: Path, share: Path) -> None:
    """Move what slurm-health has below share/; what its dependencies have is for their commands."""
    for path in [each for each in found.rglob("*slurm-health*") if each.is_file()]:
        there = share / path.relative_to(found)
        there.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".1":
            packed = gzip.compress(path.read_bytes(), mtime=0)
            there.with_name(f"{there.name}.gz").write_bytes(packed)
        else:
            shutil.move(path, there)
    shutil.rmtree(found)


def _compiled(packages: Path, tree: Path) -> None:
    """Move the packages where they belong, compiled: only root could do so there, and would."""
    home = _HOME / "lib" / _PYTHON / "site-packages"
    (tree / home).parent.mkdir(parents=True)
    shutil.move(packages, tree / home)
    run(sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash",
         "-s", tree, "-p", "/", tree / home)  # fmt: skip
    run("chmod", "-R", "u+rwX,go+rX,go-w", tree)
    for library in tree.rglob("*.so*"):  # some wheels have them as programs
        library.chmod(0o644)


def _deb(tree: Path, output: Path) -> Path:
    # Debian's zsh looks in a directory of its own.
    functions = tree / "usr/share/zsh/site-functions"
    functions.rename(functions.with_name("vendor-completions"))
    _debian_documents(tree)
    files = [each for each in tree.rglob("*") if each.is_file() and not each.is_symlink()]
    sums = [
        f"{hashlib.md5(each.read_bytes(), usedforsecurity=False).hexdigest()}  "
        f"{each.relative_to(tree)}\n"
        for each in sorted(files)
    ]
    architecture = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
    control = tree / "DEBIAN"
    control.mkdir()
    (control / "md5sums").write_text("".join(sums))
    size_kib = sum(each.stat().st_size for each in files) // 1024
    filled = _filled(
        "control.in",
        architecture=architecture,
        size_kib=size_kib,
        maintainer=maintainer(os.environ),
    )
    (control / "control").write_text(filled)
    for name, script in _SCRIPTS.items():
        (control / name).write_text((_HERE / f"{script}.sh").read_text())
        (control / name).chmod(0o755)
    path = output / f"slurm-health_{__version__}-1_{architecture}.deb"
    # The least of xz takes a quarter of the time that its default takes, for a seventh more bytes.
    run("dpkg-deb", "--root-owner-group", "-Zxz", "-z1", "--build", tree, path)
    return path


def _debian_documents(tree: Path) -> None:
    """Write what Debian wants beside the files: licence, changelogs, why a rule is not kept."""
    about, overrides = tree / "usr/share/doc/slurm-health", tree / "usr/share/lintian/overrides"
    for directory in (about, overrides):
        directory.mkdir(parents=True)
    (about / "copyright").write_text(_filled("copyright.in"))
    shutil.copy(_HERE / "lintian-overrides", overrides / "slurm-health")
    entry = (
        f"slurm-health ({__version__}-1) unstable; urgency=medium\n\n"
        "  * What changed is in changelog.gz.\n\n"
        f" -- {maintainer(os.environ)}  {_built('%a, %d %b %Y %H:%M:%S +0000')}\n"
    )
    for name, text in (
        ("changelog.gz", (ROOT / "CHANGELOG.md").read_bytes()),
        ("changelog.Debian.gz", entry.encode()),
    ):
        (about / name).write_bytes(gzip.compress(text, mtime=0))


def maintainer(environ: Mapping[str, str]) -> str:
    """Return whom a package of ours names: who builds it, by the variables of Debian's own tools.

    The project has no address for it, and a .deb must name one.
    """
    name = environ.get("DEBFULLNAME", "whoever built it")
    return f"{name} <{environ.get('DEBEMAIL', 'root@localhost')}>"


def _rpm(tree: Path, output: Path) -> Path:
    scripts = {name: (_HERE / f"{name}.sh").read_text() for name in _SCRIPTS.values()}
    for link in [each for each in tree.rglob("*") if each.is_symlink()]:
        there = link.readlink()  # RPM wants links that hold below any root
        link.unlink()
        link.symlink_to(os.path.relpath(there, Path("/") / link.parent.relative_to(tree)))
    for kind, name in (("licenses", "LICENSE"), ("doc", "CHANGELOG.md")):
        directory = tree / "usr/share" / kind / "slurm-health"
        directory.mkdir(parents=True)
        shutil.copy(ROOT / name, directory)
    with tempfile.TemporaryDirectory() as scratch:
        spec = Path(scratch, "slurm-health.spec")
        day = _built("%a %b %d %Y")
        spec.write_text(_filled("slurm-health.spec.in", tree=tree, day=day, **scripts))
        choices = {"_topdir": scratch, "_rpmdir": f"{scratch}/made", "_rpmfilename": "%{NAME}.rpm"}
        defined = [f"--define={name} {value}" for name, value in choices.items()]
        run("rpmbuild", "-bb", "--quiet", *defined, spec)
        path = output / f"slurm-health-{__version__}-1.{os.uname().machine}.rpm"
        shutil.move(f"{scratch}/made/slurm-health.rpm", path)
    return path


def _built(form: str) -> str:
    """Return when it is built: by `SOURCE_DATE_EPOCH`, where two builds are to be the same."""
    return time.strftime(form, time.gmtime(int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))))


def _filled(name: str, **values: object) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = string.Template((_HERE / name).read_text())
    summary, _, _ = project["description"].partition(", and")  # of 80 characters at most
    known = {"version": __version__, "python": _PYTHON, "summary": summary}
    return text.substitute(known, **values)


if __name__ == "__main__":
    main()
