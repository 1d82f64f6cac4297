# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`: what of a site's slurm.conf and of this machine should be changed."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from slurm_health.hooks.site_settings import Site

_GLOB = re.compile(r"[*?\[]")
_NUMBER = re.compile(r"\d+")
# The shims' own limit, and what Slurm needs beyond it.
_SHIM_LIMIT_S = 65


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is fine, worth a look, or to be changed."""

    level: str
    text: str


def fine(text: str) -> Advice:
    """Return that something is as it should be."""
    return Advice(level="fine", text=text)


def look(text: str) -> Advice:
    """Return that something may be meant so, and has a price."""
    return Advice(level="look", text=text)


def bad(text: str) -> Advice:
    """Return that something must be changed."""
    return Advice(level="change", text=text)


def read_config(text: str) -> dict[str, str]:
    """Return the fields of `scontrol show config`."""
    fields = {}
    for line in text.splitlines():
        name, sign, value = line.partition("=")
        if sign:
            fields[name.strip()] = "" if value.strip() == "(null)" else value.strip()
    return fields


def advise(config: Mapping[str, str], site: Site | None) -> list[Advice]:
    """Return what slurm.conf should have. Pure but for the scripts it names."""
    return [
        *_scripts("Prolog", config),
        *_scripts("Epilog", config),
        *_prolog_flags(config),
        *_timeouts(config),
        *_requeue(config),
        *_health_check(config, site),
    ]


def _scripts(key: str, config: Mapping[str, str]) -> list[Advice]:
    # 23.02 and newer number several entries: Prolog[0].
    entries = [
        entry
        for name, value in config.items()
        if re.fullmatch(rf"{key}(\[\d+\])?", name) and value
        for entry in value.split(",")
    ]
    if not entries:
        return [look(f"{key} is not set: {key.lower()} checks do not run")]
    return [advice for entry in entries for advice in _entry(key, entry)]


def _entry(key: str, entry: str) -> list[Advice]:
    if _GLOB.search(entry):
        found = sorted(glob.glob(entry))  # noqa: PTH207 - slurmd expands it the same way
        if not found:
            return [bad(f"{key}={entry} matches nothing: every job fails and drains its nodes")]
        wrong = [path for path in found if not os.access(path, os.R_OK | os.X_OK)]
        return [
            look(f"{key}={entry} is a pattern: a stray file there fails every job; name each file"),
            *(bad(f"{path} is not executable: {key} fails on every node") for path in wrong),
        ]
    if not Path(entry).is_file():
        return [bad(f"{key}={entry} is not there: every job fails and drains its nodes")]
    if not os.access(entry, os.R_OK | os.X_OK):
        return [bad(f"{key}={entry} is not executable: every job fails and drains its nodes")]
    return [fine(f"{key}={entry}")]


def _prolog_flags(config: Mapping[str, str]) -> list[Advice]:
    flags = {flag.lower() for flag in config.get("PrologFlags", "").split(",")}
    missing = [flag for flag in ("Alloc", "DeferBatch") if flag.lower() not in flags]
    if missing:
        text = "PrologFlags needs Alloc,DeferBatch: else a batch script starts while the prologs"
        return [bad(f"{text} of its other nodes still run (missing: {', '.join(missing)})")]
    return [fine("PrologFlags has Alloc and DeferBatch")]


def _timeouts(config: Mapping[str, str]) -> list[Advice]:
    found = []
    for key in ("PrologEpilogTimeout", "PrologTimeout", "EpilogTimeout"):
        number = _NUMBER.match(config.get(key, ""))
        if number and int(number.group()) <= _SHIM_LIMIT_S:
            text = f"{key}={number.group()}: Slurm would kill the hook, which fails it;"
            found.append(bad(f"{text} more than {_SHIM_LIMIT_S}, or lower the limit in the shims"))
    return found or [fine("Slurm lets the hooks end by themselves")]


def _requeue(config: Mapping[str, str]) -> list[Advice]:
    found = []
    if config.get("JobRequeue") == "0":
        found.append(look("JobRequeue=0: a job whose prolog fails is not started elsewhere"))
    parameters = config.get("SchedulerParameters", "").split(",")
    if "nohold_on_prolog_fail" not in parameters:
        text = "SchedulerParameters lacks nohold_on_prolog_fail: a job whose prolog fails is held"
        found.append(look(f"{text} until somebody releases it"))
    return found or [fine("a job whose prolog fails starts elsewhere")]


def _health_check(config: Mapping[str, str], site: Site | None) -> list[Advice]:
    if not config.get("HealthCheckProgram"):
        return [look("HealthCheckProgram is not set: idle nodes are not checked, nor given back")]
    number = _NUMBER.match(config.get("HealthCheckInterval", ""))
    if not number or int(number.group()) == 0:
        return [look("HealthCheckInterval=0: HealthCheckProgram never runs")]
    state = config.get("HealthCheckNodeState", "").upper()
    if "NONDRAINED_IDLE" in state and (site is None or site.recovery.release):
        return [look("HealthCheckNodeState=NONDRAINED_IDLE: a drained node is never given back")]
    return [fine(f"HealthCheckProgram runs every {number.group()} s")]


def advise_machine(site: Site) -> list[Advice]:
    """Return what this machine lacks: rights, shared directory, clock, the state directory."""
    return [_rights(), _shared(site), _clock(), _gpu(site)]


def _rights() -> Advice:
    if os.getuid() != 0:
        return look("not root: run doctor as root on a node, as the hooks do")
    return fine("root")


def _shared(site: Site) -> Advice:
    from slurm_health.hooks import ledger

    if not site.breaker.directory:
        return bad("breaker.directory is not set: nothing is drained")
    try:
        ledger.change(site.breaker, lambda before: (before, b""), owner=os.getuid())
    except ledger.Untrusted as err:
        return bad(f"the shared directory cannot be used, so nothing is drained: {err}")
    return fine(f"{site.breaker.directory} can be locked and written here")


def _clock() -> Advice:
    from slurm_health.checks.check import Place, Unmeasured
    from slurm_health.checks.clock import Clock

    try:
        seen = Clock().collect(Place())
    except Unmeasured as err:
        return look(str(err))
    if not seen.synchronised:
        return look("the clock is not synchronised: times in journals cannot be compared")
    return fine(f"the clock is {seen.offset_ms:g} ms off")


def _gpu(site: Site) -> Advice:
    import importlib.util

    uses_gpu = any(type(each.check).__name__.startswith("Gpu") for each in site.checks)
    if uses_gpu and importlib.util.find_spec("pynvml") is None:
        return bad(
            "GPU checks are configured and nvidia-ml-py is missing: pip install 'slurm-health[gpu]'"
        )
    return fine("what the configured checks need is installed")


def pyslurm_advice(pyslurm: str | None, slurm: str) -> Advice:
    """Return whether pyslurm, of that version or missing, goes with `scontrol --version`."""
    if pyslurm is None:
        return fine("pyslurm is not installed; Slurm's commands are used")
    release = _release(slurm)
    if release is None:
        return look(f"cannot tell which Slurm this is: {slurm.strip()!r}")
    if _release(pyslurm) != release:
        major, minor = release
        return look(
            f"pyslurm {pyslurm} does not go with Slurm {major}.{minor:02d} and is not used;"
            f" install pyslurm {major}.{minor}"
        )
    return fine(f"pyslurm {pyslurm} goes with Slurm")


def _release(text: str) -> tuple[int, int] | None:
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found.group(1)), int(found.group(2))) if found else None


def torch_advice(output: str, code: int, python: str) -> Advice:
    """Return what an interpreter's torch, asked with `TORCH_QUESTION`, is good for."""
    if code != 0:
        return look(f"{python} has no torch: jobs that use it cannot be checked here")
    return fine(f"{python}: {output.strip()}")


TORCH_QUESTION = (
    "import torch; n = torch.cuda.nccl.version() if torch.cuda.is_available() else 'none';"
    "print('torch', torch.__version__, 'CUDA', torch.version.cuda, 'NCCL', n)"
)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the doctor has to say."""

    advice: tuple[Advice, ...]

    @property
    def text(self) -> str:
        """One line each, the worst first."""
        order = {"change": 0, "look": 1, "fine": 2}
        ranked = sorted(self.advice, key=lambda each: order[each.level])
        return "".join(f"{each.level:<7} {each.text}\n" for each in ranked)
