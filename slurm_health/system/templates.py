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
from enum import Enum
from pathlib import Path

import slurm_health
from slurm_health.records.errors import UsageError
from slurm_health.system.private_files import publish

_SCRIPTS = "sbatch_templates"
_SETTING = re.compile(r"^(command|python|config|slurm|limit)=(.*)$", re.MULTILINE)
_LICENSE = "# SPDX-"


HOOKS_DIRECTORY = "/etc/slurm-health"
_PATH = re.compile(r"^PATH=(.*)$", re.MULTILINE)


class TemplateKind(Enum):
    """What a template is for, as a list of them is titled."""

    BATCH_SCRIPT = "Batch scripts that check their nodes, for sbatch:"
    WRAPPER = "For programs that call sbatch by its name:"
    HOOK = "For slurm.conf, as root (slurm-health init hooks writes all three):"
    DASHBOARD = "For Grafana (documentation: admin/metrics.md):"


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

    @property
    def next_step(self) -> str:
        """What to do with it, in a sentence."""
        match self.kind:
            case TemplateKind.BATCH_SCRIPT:
                return f"edit its #SBATCH lines, then: {self.example}"
            case TemplateKind.WRAPPER:
                return (
                    "save it as sbatch in a directory that is first on PATH where jobs are"
                    " submitted, and make it executable: chmod +x"
                )
            case TemplateKind.DASHBOARD:
                return "in Grafana, choose Dashboards, New, Import, and upload it"
            case TemplateKind.HOOK:
                key = next(key for key, hook in HOOKS.items() if hook is self)
                return (
                    "save it on every node, owned by root and executable, and name it in"
                    f" slurm.conf: {key}=FILE; slurm-health doctor says what is missing"
                )

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


def listed() -> dict[str, list[tuple[str, str]]]:
    """Return the name and the purpose of every template, by what they are for."""
    titles: dict[str, list[tuple[str, str]]] = {kind.value: [] for kind in TemplateKind}
    for template in every().values():
        titles[template.kind.value].append((template.name, template.purpose))
    return titles


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
