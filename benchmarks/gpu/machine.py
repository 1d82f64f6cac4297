# SPDX-License-Identifier: Apache-2.0
"""Where it is measured: the interpreter with torch, its devices, and what is installed on them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from slurm_health.preflight.agent.node_facts import (
    VisibleDevices,
    environ_of_each,
    share_devices,
    visible_devices,
)
from slurm_health.preflight.expectations import Expectation, expectation_of, expectations_from
from slurm_health.system.processes import run

ROOT = Path(__file__).parents[2]
_FIND_LIMIT_S = 30.0
_DESCRIBE_LIMIT_S = 120.0
# Prints the platform that a torch is built for, without loading it.
_BUILT_FOR = """
import importlib.util, pathlib, runpy
spec = importlib.util.find_spec("torch")
if spec:
    found = runpy.run_path(str(pathlib.Path(spec.origin).with_name("version.py")))
    print("cuda" if found.get("cuda") or found.get("hip") else "cpu")
"""


class Unusable(Exception):
    """Nothing can be measured here; the text says why and what to do."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One accelerator, as torch describes it."""

    name: str
    uuid: str
    total_bytes: int


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What figures depend on. Figures of different facts do not belong into one table."""

    torch: str
    collective_library: str
    driver: str
    runtime: str
    model: str
    devices: list[Device]
    python: str
    linux: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """This machine, or its CPUs alone. `torch_directories` hold what loading torch reads."""

    python: str
    environ: Mapping[str, str]
    facts: Facts
    torch_directories: Sequence[str] = ()

    @property
    def devices(self) -> VisibleDevices:
        """The accelerators, by the names that the caller gave them."""
        return visible_devices(self.environ)

    @property
    def on_cpus(self) -> bool:
        """Whether there are no accelerators to measure."""
        return not self.facts.devices

    @property
    def expectation(self) -> Expectation | None:
        """What a healthy device of this model reaches, None where nobody has told."""
        return expectation_of(self.facts.model, expectations_from({}, "the built-in table"))

    def environ_of_ranks(self, count: int) -> list[Mapping[str, str]]:
        """Return the environment of each of some processes that play nodes."""
        names = [f"rank{number}" for number in range(count)]
        own = environ_of_each(names, self.devices)
        return [{**self.environ, **own[name]} for name in names]

    def shares_devices(self, count: int) -> bool:
        """Tell whether so many nodes have no device to themselves."""
        nodes = [str(number) for number in range(count)]
        return self.on_cpus or share_devices(nodes, self.devices)


def describe(python: str, environ: Mapping[str, str], proc: Path = Path("/proc")) -> Machine:
    """Return this machine as an interpreter sees it.

    Raises:
        Unusable: it has no torch, or one that cannot use the accelerators that are there.
    """
    own = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR", **environ}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")]))
    expected = len(visible_devices(own, proc).names)
    argv = [python, "-m", "benchmarks.gpu.on_device.describe", str(expected)]
    try:
        ended = run(argv, environ=own, deadline_s=_DESCRIBE_LIMIT_S, directory=ROOT)
    except (OSError, TimeoutError) as err:
        raise Unusable(f"{python} cannot be run: {err or 'it did not answer'}") from err
    if ended.returncode:
        said = ended.stderr.decode(errors="replace").strip().splitlines() or ["without a word"]
        raise Unusable(f"{python}: {said[-1]}; name another interpreter with --python")
    told = msgspec.json.decode(ended.stdout.strip().splitlines()[-1], type=dict[str, object])
    directories = msgspec.convert(told.pop("directories"), list[str])
    own_facts = {"driver": driver(proc), "linux": platform.release()}
    facts = msgspec.convert({**told, **own_facts}, Facts)
    return Machine(python=python, environ=own, facts=facts, torch_directories=directories)


def find_python(environ: Mapping[str, str]) -> str:
    """Return the first interpreter whose torch is built for accelerators, else one with torch.

    `python3` on the PATH comes before our own, as for a check.

    Raises:
        Unusable: none has torch.
    """
    candidates = [shutil.which("python3", path=environ.get("PATH")), sys.executable]
    paths = list(dict.fromkeys(path for path in candidates if path))
    built_for = {path: _built_for(path, environ) for path in paths}
    for wanted in ("cuda", "cpu"):
        for path in paths:
            if built_for[path] == wanted:
                return path
    raise Unusable(f"no torch beside {' or '.join(paths)}; name an interpreter with --python")


def _built_for(path: str, environ: Mapping[str, str]) -> str:
    try:
        ended = run([path, "-c", _BUILT_FOR], environ=environ, deadline_s=_FIND_LIMIT_S)
    except (OSError, TimeoutError):
        return ""
    return ended.stdout.decode(errors="replace").strip()


def driver(proc: Path) -> str:
    """Return the version of NVIDIA's kernel driver, empty where it is not loaded."""
    try:
        text = (proc / "driver/nvidia/version").read_text()
    except OSError:
        return ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""
