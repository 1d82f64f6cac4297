# SPDX-License-Identifier: Apache-2.0
"""Files to copy and edit: batch scripts, the `sbatch` wrapper, the hooks, the dashboard.

A script names the slurm-health that it runs in a line of its own, `python=` or `command=`. A copy
gets the installation that made it; the other lines stay as they are.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile
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
    """The kinds of templates, with their titles in a list."""

    BATCH_SCRIPT = "Batch scripts that check their nodes, for sbatch:"
    WRAPPER = "For programs that call sbatch by its name:"
    HOOK = "For slurm.conf, as root (slurm-health init hooks writes all four):"
    DASHBOARD = "For Grafana (documentation: admin/metrics.md):"


@dataclass(frozen=True, kw_only=True)
class Template:
    """A file to copy: its `source` in the package, and the `file_name` of a copy."""

    name: str
    kind: TemplateKind
    source: str
    file_name: str

    @property
    def text(self) -> str:
        """Its text."""
        return shipped(self.source).read_text(encoding="utf-8")

    @property
    def purpose(self) -> str:
        """The first sentence of its comment; JSON has none."""
        if self.kind is TemplateKind.DASHBOARD:
            return "Dashboard of nodes with faults, drained nodes, lemons and slow checks."
        words = " ".join(self._comment())
        return re.split(r"(?<=\.)\s", words, maxsplit=1)[0]

    @property
    def example(self) -> str:
        """The call that its comment shows; empty if it shows none."""
        return next((line.strip() for line in self._comment() if line.startswith("  ")), "")

    @property
    def next_step(self) -> str:
        """The next step with it, in a sentence."""
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
        lines = takewhile(lambda line: line.startswith("# "), self.text.splitlines()[1:])
        return [line.removeprefix("# ") for line in lines if not line.startswith(_LICENSE)]


_WRAPPER = Template(
    name="sbatch", kind=TemplateKind.WRAPPER, source=f"{_SCRIPTS}/sbatch", file_name="sbatch"
)
_DASHBOARD = Template(
    name="dashboard",
    kind=TemplateKind.DASHBOARD,
    source="grafana/slurm-health.json",
    file_name="slurm-health.json",
)
# By the key of slurm.conf.
HOOKS = {
    key: Template(
        name=name, kind=TemplateKind.HOOK, source=source, file_name=f"slurm-health-{name}"
    )
    for key, name, source in (
        ("Prolog", "prolog", "prolog/slurm-health"),
        ("Epilog", "epilog", "epilog/slurm-health"),
        ("HealthCheckProgram", "healthcheck", "prolog/slurm-health-healthcheck"),
        ("UnkillableStepProgram", "unkillable", "epilog/slurm-health-unkillable"),
    )
}
# Paths below the directory, by the key of slurm.conf.
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
    """Return the name and the purpose of every template, by the title of its kind."""
    titles: dict[str, list[tuple[str, str]]] = {kind.value: [] for kind in TemplateKind}
    for template in every().values():
        titles[template.kind.value].append((template.name, template.purpose))
    return titles


def find(name: str) -> Template:
    """Return the template of this name, or of this file name.

    Raises:
        UsageError: there is none.
    """
    known = every()
    template = known.get(name.removesuffix(".sbatch"))
    if template is not None:
        return template
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(known)}"
    raise UsageError(f"no template {name!r}; {hint}")


def settings(text: str) -> dict[str, str]:
    """Return the settings in the lines of a script that may be edited."""
    return {key: value.strip().strip("\"'") for key, value in _SETTING.findall(text)}


def edited(text: str, values: Mapping[str, str]) -> str:
    """Return a script with new values of some settings."""
    return _SETTING.sub(
        lambda line: f"{line[1]}={shlex.quote(values[line[1]])}" if line[1] in values else line[0],
        text,
    )


def write_script(path: Path, text: str, *, mode: int = 0o755) -> None:
    """Write a script whole or not at all: it may be started at any time, or the one it replaces.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    publish(path, os.fsencode(text), mode=mode)


def shipped(name: str) -> Path:
    """Return the path of a file or directory: in the package, or beside it in a checkout."""
    package = Path(slurm_health.__file__).parent
    installed = package / name
    return installed if installed.exists() else package.parent / name


def search_path(text: str) -> str:
    """Return the search path of a shim."""
    match = _PATH.search(text)
    return match[1].replace("$slurm", settings(text).get("slurm", "")) if match else ""


def install_hooks(directory: Path, python: str) -> dict[str, Path]:
    """Write the shims, to be run by this interpreter; return their paths by key of slurm.conf.

    They read the config file in the same directory. A shim that is there already keeps the
    settings of the site. Slurm may start one at any time, so it is replaced whole.

    Raises:
        OSError: one cannot be written.
    """
    paths = {key: directory / name for key, name in SHIMS.items()}
    for key, path in paths.items():
        kept = settings(os.fsdecode(path.read_bytes())) if path.exists() else {}
        values = {"config": str(directory / "config.toml"), **kept, "python": python}
        write_script(path, edited(HOOKS[key].text, values))
    return paths


def missing_config_files(hooks: Iterable[Path]) -> list[str]:
    """Return the config files that hooks name and that are not there, without repetition."""
    texts = (os.fsdecode(path.read_bytes()) for path in hooks)
    named = dict.fromkeys(settings(text).get("config", "") for text in texts)
    return [path for path in named if path and not os.path.lexists(path)]
