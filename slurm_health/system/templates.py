# SPDX-License-Identifier: Apache-2.0
"""What people copy and may edit: batch scripts, the `sbatch` wrapper, the hooks, the dashboard.

A script that has to find slurm-health says where in a line of its own, `python=` or `command=`. A
copy gets the installation that it was made by; the other lines stay as they are.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

import slurm_health
from slurm_health.records.errors import UsageError
from slurm_health.system.private_files import publish

_SCRIPTS = "sbatch_templates"
_SETTING = re.compile(r"^(command|python|config|slurm|limit)=(.*)$", re.MULTILINE)
_ELF = b"\x7fELF"  # how a compiled program begins
_LICENSE = "# SPDX-"


HOOKS_DIRECTORY = "/etc/slurm-health"
_PATH = re.compile(r"^PATH=(.*)$", re.MULTILINE)


class TemplateKind(Enum):
    """What a template is for."""

    BATCH_SCRIPT = auto()
    WRAPPER = auto()
    HOOK = auto()
    DASHBOARD = auto()


@dataclass(frozen=True, kw_only=True)
class Template:
    """A file to copy. `source` is where it comes from, `file_name` what a copy is called."""

    name: str
    kind: TemplateKind
    source: str
    file_name: str

    @property
    def text(self) -> str:
        """Its text, as it is shipped."""
        return shipped(self.source).read_text(encoding="utf-8")

    @property
    def purpose(self) -> str:
        """What it is for: the first sentence of its comment, which JSON cannot hold."""
        if self.kind is TemplateKind.DASHBOARD:
            return "Dashboard of nodes with faults, drained nodes, lemons and slow checks."
        words = " ".join(self._comment())
        return re.split(r"(?<=\.)\s", words, maxsplit=1)[0]

    @property
    def example(self) -> str:
        """How its comment says that it is called; empty where it does not."""
        return next((line.strip() for line in self._comment() if line.startswith("  ")), "")

    def _comment(self) -> list[str]:
        found = []
        for line in self.text.splitlines()[1:]:
            if not line.startswith("# "):
                break
            if not line.startswith(_LICENSE):
                found.append(line.removeprefix("# "))
        return found


_WRAPPER = Template(
    name="sbatch", kind=TemplateKind.WRAPPER, source=f"{_SCRIPTS}/sbatch", file_name="sbatch"
)
_DASHBOARD = Template(
    name="dashboard",
    kind=TemplateKind.DASHBOARD,
    source="grafana/slurm-health.json",
    file_name="slurm-health.json",
)
# By the key of slurm.conf that names each.
HOOKS = {
    key: Template(
        name=name, kind=TemplateKind.HOOK, source=source, file_name=f"slurm-health-{name}"
    )
    for key, name, source in (
        ("Prolog", "prolog", "prolog/slurm-health"),
        ("Epilog", "epilog", "epilog/slurm-health"),
        ("HealthCheckProgram", "healthcheck", "prolog/slurm-health-healthcheck"),
    )
}
# Where each lies below the directory, by the key of slurm.conf that names it.
SHIMS = {key: hook.source for key, hook in HOOKS.items()}


def every() -> dict[str, Template]:
    """Return all templates by name: batch scripts, the wrapper, the hooks, the dashboard."""
    scripts = sorted(path.name for path in shipped(_SCRIPTS).glob("*.sbatch"))
    batch = [
        Template(
            name=name.removesuffix(".sbatch"),
            kind=TemplateKind.BATCH_SCRIPT,
            source=f"{_SCRIPTS}/{name}",
            file_name=name,
        )
        for name in scripts
    ]
    return {template.name: template for template in (*batch, _WRAPPER, *HOOKS.values(), _DASHBOARD)}


def find(name: str) -> Template:
    """Return the template of this name, or of this file's.

    Raises:
        UsageError: there is none.
    """
    known = every()
    found = known.get(name.removesuffix(".sbatch"))
    if found is not None:
        return found
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    raise UsageError(f"no template {name!r}; {hint}")


def settings(text: str) -> dict[str, str]:
    """Return what a script says in the lines that may be edited."""
    return {key: value.strip().strip("\"'") for key, value in _SETTING.findall(text)}


def edited(text: str, said: Mapping[str, str]) -> str:
    """Return a script whose lines say this; those of which nothing is said stay as they are."""
    return _SETTING.sub(
        lambda line: f"{line[1]}={shlex.quote(said[line[1]])}" if line[1] in said else line[0], text
    )


def write_script(path: Path, text: str, *, mode: int = 0o755) -> None:
    """Write a script whole or not at all: somebody may start it, or the one it replaces, any time.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    publish(path, os.fsencode(text), mode=mode)


def copy(template: Template, destination: str, said: Mapping[str, str], *, force: bool) -> Path:
    """Write a copy that says this, and return where it is.

    Args:
        template: what is copied.
        destination: a file, or a directory; one that ends with a slash is made.
        said: by the names of the lines that may be edited.
        force: replace a script that is there; a compiled program never.

    Raises:
        UsageError: something is there already.
        OSError: the copy cannot be written.
    """
    path = Path(destination)
    if path.is_dir() or destination.endswith(os.sep):
        path /= template.file_name
    path = path.absolute()
    if _is_program(path):
        raise UsageError(
            f"{path} is a program, not a script, and is not replaced; choose another directory"
        )
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} is there already; --force replaces it")
    runs = template.kind in {TemplateKind.WRAPPER, TemplateKind.HOOK}  # not by sbatch or Grafana
    mode = 0o755 if runs else 0o644
    write_script(path, edited(template.text, said), mode=mode)
    return path


def next_steps(
    template: Template, path: Path, *, command: str, found: str | None, first_sbatch: str | None
) -> str:
    """Say what to do with a copy.

    Args:
        template: what was copied.
        path: the copy.
        command: this slurm-health.
        found: the `slurm-health` that PATH leads to, None where there is none.
        first_sbatch: the `sbatch` that PATH leads to.
    """
    match template.kind:
        case TemplateKind.BATCH_SCRIPT:
            call = template.example.replace(template.file_name, shlex.quote(str(path)))
            text = f"Edit its #SBATCH lines, then submit your training with it:\n    {call}\n"
            if found is None:
                directory = shlex.quote(str(Path(command).parent))
                text += f"The job calls slurm-health, so first: export PATH={directory}:$PATH\n"
            return text
        case TemplateKind.WRAPPER if first_sbatch == str(path):
            return "It is the first sbatch on PATH: each job's nodes are checked from now on.\n"
        case TemplateKind.WRAPPER:
            directory = shlex.quote(str(path.parent))
            return (
                "Put its directory first on PATH where jobs are submitted, as in ~/.bashrc:\n"
                f"    export PATH={directory}:$PATH\n"
                "From then on, the nodes of each job that is submitted there are checked.\n"
            )
        case TemplateKind.DASHBOARD:
            return f"In Grafana, choose Dashboards, New, Import, and upload it:\n    {path}\n"
        case TemplateKind.HOOK:
            key = next(key for key, hook in HOOKS.items() if hook is template)
            return (
                "Have it on every node, owned by root, and name it in slurm.conf:\n"
                f"    {key}={path}\n"
                "slurm-health doctor then says what is missing. All three hooks where they\n"
                "usually are: slurm-health init hooks\n"
            )


def _is_program(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_ELF)) == _ELF


def shipped(name: str) -> Path:
    """Return where a file or directory is: in the package, or beside it in a checkout."""
    package = Path(slurm_health.__file__).parent
    installed = package / name
    return installed if installed.exists() else package.parent / name


def search_path(text: str) -> str:
    """Return where a shim looks for commands."""
    found = _PATH.search(text)
    return found[1].replace("$slurm", settings(text).get("slurm", "")) if found else ""


def install_hooks(directory: Path, python: str) -> dict[str, Path]:
    """Write the shims, to be run by this interpreter; return where, by the key of slurm.conf.

    They read the site's file that lies in the same directory. One that stands there already keeps
    what a site has set in it. Slurm may start one at any time, so each is replaced whole.

    Raises:
        OSError: one cannot be written.
    """
    paths = {key: directory / name for key, name in SHIMS.items()}
    for key, path in paths.items():
        kept = settings(_own_bytes(path)) if path.exists() else {}
        said = {"config": str(directory / "config.toml"), **kept, "python": python}
        write_script(path, edited(HOOKS[key].text, said))
    return paths


def files_that_lack(hooks: Iterable[Path]) -> list[str]:
    """Return the site's files that hooks name and that are not there, each once."""
    named = dict.fromkeys(settings(_own_bytes(path)).get("config", "") for path in hooks)
    return [each for each in named if each and not os.path.lexists(each)]


def _own_bytes(path: Path) -> str:
    """Read what a site has edited, in whatever encoding: its own bytes are written again."""
    return os.fsdecode(path.read_bytes())
