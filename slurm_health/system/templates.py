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
from enum import Enum, auto
from itertools import takewhile
from pathlib import Path

import slurm_health
from slurm_health.records.errors import UsageError
from slurm_health.system.private_files import publish

_SCRIPTS = "sbatch_templates"
_SETTING = re.compile(r"^(command|python|config|slurm|limit)=(.*)$", re.MULTILINE)
_ELF = b"\x7fELF"  # the first bytes of a compiled program
_LICENSE = "# SPDX-"


HOOKS_DIRECTORY = "/etc/slurm-health"
_PATH = re.compile(r"^PATH=(.*)$", re.MULTILINE)


class TemplateKind(Enum):
    """The kinds of templates."""

    BATCH_SCRIPT = auto()
    WRAPPER = auto()
    HOOK = auto()
    DASHBOARD = auto()


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


def copy(template: Template, destination: str, values: Mapping[str, str], *, force: bool) -> Path:
    """Write a copy with these settings, and return its path.

    Args:
        template: to copy.
        destination: a file, or a directory; one that ends with a slash is made.
        values: of settings, by name.
        force: replace a script that is there; a compiled program never.

    Raises:
        UsageError: something is there already.
        OSError: the copy cannot be written.
    """
    path = Path(destination)
    if path.is_dir() or destination.endswith(os.sep):
        path /= template.file_name
    path = path.absolute()
    if path.is_file():
        with path.open("rb") as file:
            is_program = file.read(len(_ELF)) == _ELF
        if is_program:
            problem = "is a program, not a script, and is not replaced"
            raise UsageError(f"{path} {problem}; choose another directory")
    if os.path.lexists(path) and not force:
        raise UsageError(f"{path} is there already; --force replaces it")
    runs = template.kind in {TemplateKind.WRAPPER, TemplateKind.HOOK}  # not by sbatch or Grafana
    mode = 0o755 if runs else 0o644
    write_script(path, edited(template.text, values), mode=mode)
    return path


def next_steps(
    template: Template, path: Path, *, command: str, on_path: str | None, first_sbatch: str | None
) -> str:
    """Return the next steps with a copy.

    Args:
        template: that was copied.
        path: the copy.
        command: this slurm-health.
        on_path: the first `slurm-health` on PATH, None without one.
        first_sbatch: the first `sbatch` on PATH.
    """
    match template.kind:
        case TemplateKind.BATCH_SCRIPT:
            call = template.example.replace(template.file_name, shlex.quote(str(path)))
            text = f"Edit its #SBATCH lines, then submit your training with it:\n    {call}\n"
            if on_path is None:
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
                "Then see what is missing: slurm-health doctor\n"
                "All three hooks in their usual places: slurm-health init hooks\n"
            )


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
