# SPDX-License-Identifier: Apache-2.0
"""The `.deb` and the `.rpm`, by whichever of dpkg-deb and rpmbuild are here.

    python -m distribution.packages --output DIR

Both hold one tree: a virtual environment in /opt/slurm-health, with all that slurm-health needs but
torch, a link to its command in /usr/bin, and bash's completion. They are for the machine's
architecture and for the distribution's Python of the version that makes them.
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
_SCRIPTS = {"preinst": "before_install", "postinst": "after_install", "postrm": "after_removal"}


def main() -> None:
    """Build what the tools at hand can build, and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    output = parser.parse_args().output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    builders = {"dpkg-deb": _deb, "rpmbuild": _rpm}
    present = [tool for tool in builders if shutil.which(tool)]
    if not present:
        sys.exit("packages: neither dpkg-deb nor rpmbuild is here; install dpkg or rpm-build")
    with tempfile.TemporaryDirectory() as scratch:
        made = _tree(Path(scratch))
        for tool in present:
            tree = Path(scratch, tool)
            shutil.copytree(made, tree, symlinks=True)
            print(builders[tool](tree, output))


def _tree(scratch: Path) -> Path:
    """Return a directory with all files as they lie on a node."""
    tree, packages = scratch / "tree", scratch / "packages"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--target", packages,
         f"{ROOT}[{EXTRAS}]")  # fmt: skip
    binaries, home = tree / _HOME / "bin", tree / _HOME / "lib" / _PYTHON / "site-packages"
    binaries.mkdir(parents=True)
    for name in ("python", "python3"):
        (binaries / name).symlink_to(f"/usr/bin/{_PYTHON}")
    (binaries / "slurm-health").write_text(_COMMAND)
    (binaries / "slurm-health").chmod(0o755)
    shutil.move(packages / "bin" / "py-spy", binaries)
    shutil.rmtree(packages / "bin")
    shutil.rmtree(packages / "share", ignore_errors=True)  # for commands of dependencies
    (tree / "usr/bin").mkdir(parents=True)
    (tree / "usr/bin/slurm-health").symlink_to(f"/{_HOME}/bin/slurm-health")
    completions = tree / "usr/share/bash-completion/completions"
    completions.mkdir(parents=True)
    code = "from slurm_health.cli.main import commands; commands(prog_name='slurm-health')"
    environ = {**os.environ, "_SLURM_HEALTH_COMPLETE": "bash_source"}
    script = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, env=environ)
    (completions / "slurm-health").write_bytes(script)
    (tree / _HOME / "pyvenv.cfg").write_text(
        "home = /usr/bin\ninclude-system-site-packages = false\n"
    )
    home.parent.mkdir(parents=True)
    shutil.move(packages, home)
    # Compiled here: only root could do so on a node, and every hook would try.
    run(sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash",
         "-s", tree, "-p", "/", home)  # fmt: skip
    run("chmod", "-R", "u+rwX,go+rX,go-w", tree)
    for library in tree.rglob("*.so*"):  # some wheels have them as programs
        library.chmod(0o644)
    return tree


def _deb(tree: Path, output: Path) -> Path:
    name, address = (os.environ.get(key) for key in ("DEBFULLNAME", "DEBEMAIL"))
    # The project has no address, and a .deb must name one: that of who builds it.
    maintainer = f"{name or 'whoever built it'} <{address or 'root@localhost'}>"
    about, overrides = tree / "usr/share/doc/slurm-health", tree / "usr/share/lintian/overrides"
    control = tree / "DEBIAN"
    for directory in (about, overrides, control):
        directory.mkdir(parents=True)
    (about / "copyright").write_text(_filled("copyright.in"))
    shutil.copy(_HERE / "lintian-overrides", overrides / "slurm-health")
    entry = (
        f"slurm-health ({__version__}-1) unstable; urgency=medium\n\n"
        "  * What changed is in changelog.gz.\n\n"
        f" -- {maintainer}  {_built('%a, %d %b %Y %H:%M:%S +0000')}\n"
    )
    changelog = (ROOT / "CHANGELOG.md").read_bytes()
    for file, text in (("changelog.gz", changelog), ("changelog.Debian.gz", entry.encode())):
        (about / file).write_bytes(gzip.compress(text, mtime=0))
    files = sorted(each for each in tree.rglob("*") if each.is_file() and not each.is_symlink())
    sums = (hashlib.md5(each.read_bytes(), usedforsecurity=False).hexdigest() for each in files)
    lines = (f"{md5}  {each.relative_to(tree)}\n" for md5, each in zip(sums, files, strict=True))
    (control / "md5sums").write_text("".join(lines))
    architecture = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
    size_kib = sum(each.stat().st_size for each in files) // 1024
    facts = {"architecture": architecture, "size_kib": size_kib, "maintainer": maintainer}
    (control / "control").write_text(_filled("control.in", **facts))
    for file, script in _SCRIPTS.items():
        (control / file).write_text((_HERE / f"{script}.sh").read_text())
        (control / file).chmod(0o755)
    path = output / f"slurm-health_{__version__}-1_{architecture}.deb"
    # The least of xz takes a quarter of the time that its default takes, for a seventh more bytes.
    run("dpkg-deb", "--root-owner-group", "-Zxz", "-z1", "--build", tree, path)
    return path


def _rpm(tree: Path, output: Path) -> Path:
    scripts = {name: (_HERE / f"{name}.sh").read_text() for name in _SCRIPTS.values()}
    for link in [each for each in tree.rglob("*") if each.is_symlink()]:
        target = link.readlink()  # RPM wants links that hold below any root
        link.unlink()
        link.symlink_to(os.path.relpath(target, Path("/") / link.parent.relative_to(tree)))
    for kind, name in (("licenses", "LICENSE"), ("doc", "CHANGELOG.md")):
        directory = tree / "usr/share" / kind / "slurm-health"
        directory.mkdir(parents=True)
        shutil.copy(ROOT / name, directory)
    with tempfile.TemporaryDirectory() as scratch:
        spec, day = Path(scratch, "slurm-health.spec"), _built("%a %b %d %Y")
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
    summary, _, _ = project["description"].partition(", and")  # of 80 characters at most
    known = {"version": __version__, "python": _PYTHON, "summary": summary}
    return string.Template((_HERE / name).read_text()).substitute(known, **values)


if __name__ == "__main__":
    main()
