# SPDX-License-Identifier: Apache-2.0
"""Where modules stood before the house had quarters: each is still found by its old name.

A package may be replaced under a running job, whose processes then start others by the names that
they know. A site's probes, checks, collectors and operators import what they were told to. And a
hook's own errors end in exit code 0, so a shim whose module is gone would switch the hooks off
without a word.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # importlib.abc loads what a hook has no time for
    from collections.abc import Sequence
    from importlib.abc import InspectLoader, Loader
    from types import CodeType, ModuleType

_PACKAGE = "slurm_health."
# Each row is true of what is below it, too.
MOVED = {
    "acting": "preflight.acting",
    "agent": "preflight.agent",
    "bell": "preflight.orders",
    "checks": "node.checks",
    "checks.ethernet": "node.checks.network",
    "checks.infiniband": "node.checks.network",
    "checks.registry": "node.checks.check",
    "checks.services": "node.checks.tasks",
    "checks.xid": "node.checks.kernel_log",
    "config": "preflight.config",
    "core.acting": "preflight.decide",
    "core.acting.elsewhere": "preflight.decide.facts",
    "core.allocation": "records.allocation",
    "core.attribution": "records.script_records",
    "core.decoding": "records.decoding",
    "core.diagnosis": "training.diagnosis",
    "core.diagnosis.chain": "training.diagnosis.inference",
    "core.diagnosis.gpu_use": "training.diagnosis.rank_now",
    "core.diagnosis.hang_words": "training.diagnosis.seen",
    "core.diagnosis.hangs_without_stacks": "training.diagnosis.hangs",
    "core.diagnosis.names": "records.script_records",
    "core.diagnosis.out_of_step": "training.diagnosis.waits",
    "core.diagnosis.without_heartbeat": "training.diagnosis.by_movement",
    "core.diagnosis.words": "records.text",
    "core.expectations": "preflight.expectations",
    "core.exposition": "system.telemetry",
    "core.gpu_load": "records.gpu_load",
    "core.history": "fleet.standing",
    "core.history.published": "fleet.standing.standing",
    "core.localize": "preflight.localize",
    "core.localize.fabric": "preflight.localize.evidence",
    "core.node": "node.rules",
    "core.node.node_pattern": "node.rules.settings",
    "core.nodeset": "records.nodeset",
    "core.orders": "preflight.order_lines",
    "core.played_nodes": "preflight.agent.node_facts",
    "core.probe_catalog": "records.probe_catalog",
    "core.record_codec": "records.record_codec",
    "core.records": "records.records",
    "core.retention": "fleet.retention.rules",
    "core.same_job": "records.allocation",
    "core.session": "preflight.session",
    "core.standings": "records.standings",
    "core.sweep": "fleet.sweep.choice",
    "core.text": "records.text",
    "core.topology": "system.slurm.parsing",
    "core.verdict": "records.verdict",
    "doctor": "node.doctor",
    "doctor.large_cluster": "node.doctor.cluster",
    "draining": "node.draining",
    "errors": "records.errors",
    "history": "fleet.history",
    "history.export": "fleet.history.presentation",
    "history.server_url": "fleet.history.place",
    "history.sqlite_file": "fleet.history.database",
    "history.table": "fleet.history.presentation",
    "hooks": "node.hooks",
    "journal": "system.journal",
    "journal.reader": "system.journal.files",
    "journal.writer": "system.journal.files",
    "killable": "system.killable",
    "machine_log": "system.telemetry",
    "master": "preflight.master",
    "master.interpreter": "preflight.master.job_environment",
    "master.setup_file": "preflight.master.job_environment",
    "monitor": "training.monitor",
    "monitor.gpu_activity": "training.monitor.closer_look",
    "monitor.job_output": "training.monitor.job_collectors",
    "monitor.on_hang": "training.monitor.findings",
    "monitor.output_watch": "training.monitor.watch",
    "monitor.py_spy": "training.monitor.closer_look",
    "monitor.srun_output": "training.monitor.output_files",
    "monitor.tails": "training.monitor.output_files",
    "nvml": "system.nvml",
    "options": "preflight.options",
    "orders": "preflight.orders",
    "preflight.probes.gpt_fit": "preflight.probes.gpt",
    "preflight.probes.gpt_model": "preflight.probes.gpt",
    "preflight.probes.host_copy": "preflight.probes.device_copy",
    "preflight.probes.matmul": "preflight.probes.compute",
    "preflight.probes.matmul_fp8": "preflight.probes.compute",
    "preflight.probes.memory_copy": "preflight.probes.memory",
    "preflight.probes.memory_pattern": "preflight.probes.memory",
    "preflight.probes.peer_copy": "preflight.probes.device_copy",
    "preflight.probes.processors": "preflight.probes.timing",
    "preflight.probes.values": "preflight.probes.compute",
    "private_files": "system.private_files",
    "probe_choice": "preflight.option_kinds",
    "probes": "preflight.probes",
    "probes.gpt_fit": "preflight.probes.gpt",
    "probes.gpt_model": "preflight.probes.gpt",
    "probes.load": "preflight.probes.kits",
    "probes.matmul": "preflight.probes.compute",
    "probes.memory_copy": "preflight.probes.memory",
    "probes.values": "preflight.probes.compute",
    "processes": "system.processes",
    "restart": "training.restart",
    "retention": "fleet.retention",
    "retention.remove": "fleet.retention.removal",
    "sbatch": "preflight.sbatch",
    "shipped": "system.templates",
    "site_file": "system.site_file",
    "site_settings": "node.site_settings",
    "slurm": "system.slurm",
    "slurm.pyslurm_client": "system.slurm.reads",
    "slurm.real_sbatch": "system.slurm.command",
    "stuck": "system.killable",
    "supervisor": "preflight.supervisor",
    "sweep": "fleet.sweep",
    "templates": "system.templates",
    "torchrun.channel.secret": "torchrun.unshared_check",
    "torchrun.own_agent": "torchrun.joint_check",
}
# Held only what has moved.
EMPTIED = "core"

# A process that began before the package was replaced may look for the rest of itself. Old and new
# modules know different things of each other: nearly every process begins again instead.
_REPLACED = "slurm-health was replaced while this process ran"
# The script's process cannot begin again. This is all that it loads late: the module, what it takes
# from it, and where that stands.
_SUPERVISOR = f"{_PACKAGE}supervisor.supervisor"
LATE = {
    "core.acting.resized_environ": (
        "changes",
        "preflight.supervisor.kept_spares",
        "resized_environ",
    ),
    "core.diagnosis.flight_environ": (
        "changes",
        "preflight.supervisor.monitor_process",
        "flight_environ",
    ),
    "supervisor.batch_node_watch": ("beside", "preflight.supervisor.batch_node_watch", "beside"),
    "supervisor.kept_spares": ("KeptSpares", "preflight.supervisor.kept_spares", "KeptSpares"),
}
# These have nothing to lose: the same process begins again.
_BEGIN_AGAIN = (f"{_PACKAGE}monitor.beside", f"{_PACKAGE}monitor.batch_node")
# It ends, whatever it would catch; its agent starts another.
_WORKER = "/probes/worker.py"


def new_name(name: str) -> str | None:
    """Return where the module of this full name stands today; None for one that has not moved."""
    old = name.removeprefix(_PACKAGE)
    rest: list[str] = []
    while old:
        if old in MOVED:
            return ".".join([_PACKAGE + MOVED[old], *rest])
        old, _, last = old.rpartition(".")
        rest.insert(0, last)
    # What `from package import module` looks for, of a package that has moved to elsewhere.
    package, _, last = name.removeprefix(_PACKAGE).rpartition(".")
    for old, new in MOVED.items():
        if new == package and f"{old}.{last}" in MOVED:
            return _PACKAGE + MOVED[f"{old}.{last}"]
    return None


class Moved:
    """Finds modules by the names that they had."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - imports give it
        target: ModuleType | None = None,  # noqa: ARG002 - imports give it
    ) -> ModuleSpec | None:
        """Return how the module of an old name is loaded, None for any other name."""
        if not fullname.startswith(_PACKAGE):
            return None
        if fullname == _PACKAGE + EMPTIED:
            return ModuleSpec(fullname, None, is_package=True)
        name = new_name(fullname)
        found = importlib.util.find_spec(name) if name is not None else None
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        loader = cast("Loader", _UnderOldName(found))
        return ModuleSpec(fullname, loader, origin=found.origin, is_package=is_package)


class _UnderOldName:
    """Loads one module for two names; run as a program, it is run from its own file."""

    def __init__(self, found: ModuleSpec) -> None:
        self._found = found

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002 - imports give it
        """Return the module by its name of today."""
        return importlib.import_module(self._found.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has been, under its own name."""
        module.__spec__ = self._found  # the import has just put the old name's there

    def get_code(self, fullname: str) -> CodeType | None:  # noqa: ARG002 - runpy gives it
        """Return the code of the file that it stands in today."""
        return cast("InspectLoader", self._found.loader).get_code(self._found.name)

    def get_source(self, fullname: str) -> str | None:  # noqa: ARG002 - as above
        """Return the text of that file."""
        return cast("InspectLoader", self._found.loader).get_source(self._found.name)


def install() -> None:
    """Have old names found, before anything else looks for them. Once is enough."""
    if not any(isinstance(finder, Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, Moved())


def stand_in(name: str) -> None:
    """Be what stood at this name, in a process that began before the package was replaced.

    A wheel has a file at each old name that calls this. Nothing that began later comes here.

    Raises:
        ImportError: what started this process copes with its end, or it copes with this itself.
        SystemExit: the same, of a worker.
    """
    main = sys.modules["__main__"]
    if getattr(main.__spec__, "name", "") in _BEGIN_AGAIN:
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - ourselves
    if _SUPERVISOR in sys.modules:
        _give_late(sys.modules[name], name.removeprefix(_PACKAGE))
        return
    if str(getattr(main, "__file__", "")).endswith(_WORKER):
        raise SystemExit(_REPLACED)
    raise ImportError(f"{_REPLACED}, and {name} has moved", name=name)


def _give_late(module: ModuleType, old: str) -> None:
    if old not in LATE:
        return  # a package on the way to one
    wanted, place, today = LATE[old]
    setattr(module, wanted, getattr(importlib.import_module(_PACKAGE + place), today))
