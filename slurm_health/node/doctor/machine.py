# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`: the config file, this machine, repairs and notifications."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from slurm_health.node import notify, shared
from slurm_health.node.checks.check import CheckContext, first_few
from slurm_health.node.checks.external import is_there, program_of
from slurm_health.node.checks.filesystem import read_mounts
from slurm_health.node.doctor import ownership
from slurm_health.node.doctor.advice import Advice, change, fine, look
from slurm_health.node.rules.settings import matches
from slurm_health.node.run import node_name
from slurm_health.node.site import Site
from slurm_health.records.errors import Unmeasured
from slurm_health.system import SYSTEM_PATH
from slurm_health.system.proc import Mount, mount_of
from slurm_health.system.slurm.parsing import Node
from slurm_health.system.telemetry import LOG_SOCKET

# Filesystems that no other node shares.
_LOCAL_TYPES = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay"}
)
_HERE = CheckContext()


def advise_machine(site: Site, cluster: str, place: CheckContext = _HERE) -> list[Advice]:
    """Return advice on the config file and this machine.

    Args:
        site: the config file.
        cluster: its name in slurm.conf, empty if it is unknown.
        place: the machine.
    """
    return [
        *_settings(site),
        _ledger(site, place),
        *_journal(site, cluster, place),
        *_host(site, place),
    ]


def _settings(site: Site) -> Iterator[Advice]:
    if os.getuid() != 0:
        text = "not root: files that only root can read or write were not checked"
        yield look(text, "run doctor as root on a node, as the hooks run")
    if not site.planned:
        text = f"{site.path} configures no check: the hooks do nothing"
        yield change(text, "draft some on a healthy node: slurm-health init config")
        return
    shadow = [check.name for check in site.planned if check.shadow]
    if not site.hooks.drain:
        text = f"{site.path}: hooks.drain is false: faults are logged and nothing is drained"
        yield look(text, "drain = true, once the log shows only faults that are worth a drain")
    elif len(shadow) == len(site.planned):
        text = "every check is in shadow: faults are logged and nothing is drained"
        yield look(text, "remove shadow = true, check by check")
    else:
        yield fine(f"checks: {len(site.planned)}, of them in shadow: {len(shadow)}")
    if site.metrics.directory and not Path(site.metrics.directory).is_dir():
        text = f"metrics.directory = {site.metrics.directory} is no directory: nothing is written"
        fix = f"install -d -m 0755 -o root -g root {site.metrics.directory}"
        yield change(text, fix)
    what = f"root follows {site.path}"
    yield from ownership.loose_advice(what, ownership.replaceable(Path(site.path)))


def unmatched(site: Site, nodes: Mapping[str, Node]) -> Iterator[Advice]:
    """Yield the patterns of nodes and partitions that match nothing in this cluster."""
    partitions = {name for node in nodes.values() for name in node.partitions}
    for check in site.planned:
        for key, patterns, names in (
            ("nodes", check.nodes, nodes),
            ("partitions", check.partitions, partitions),
        ):
            for pattern in patterns:
                wanted = pattern.removeprefix("!")
                if not any(matches(name, (wanted,)) for name in names):
                    text = f"checks.{check.name}: {key} has {pattern}, which matches no {key[:-1]}"
                    yield look(text, f"the right name, or leave it out ({site.path})")


def _ledger(site: Site, place: CheckContext) -> Advice:
    path = site.breaker.directory
    if not path:
        text = "breaker.directory is not set: how many are drained is unknown, so none is drained"
        return change(text, f"in {site.path}: [breaker] directory = a directory all nodes share")
    as_root = look(f"a write to {path} was not tried", "run doctor as root")
    try:
        known = shared.read_ledger(site.breaker)
        if os.getuid() == 0:
            shared.change_ledger(site, lambda ledger: (ledger, None), type(None))
    except shared.StoreForRoot:
        return as_root
    except shared.StoreDamaged as err:
        return change(f"nothing is drained: {err}", "as root on a node: slurm-health nodes reset")
    except shared.StoreUnusable as err:
        text = f"the shared directory cannot be used, so nothing is drained: {err}"
        return change(text, f"install -d -m 0755 -o root -g root {path}, exported to root")
    if known.trips:
        text = f"the breaker has tripped, nothing is drained in: {', '.join(known.trips)}"
        return change(text, "slurm-health nodes says why; then: slurm-health nodes reset")
    if os.getuid() != 0:
        return as_root
    kind = _mount(place, path).kind
    if kind in _LOCAL_TYPES:
        text = (
            f"breaker.directory = {path} is on this machine's own {kind}: if other nodes do not"
            " share it, every node counts alone, and a rack that fails at once is drained"
        )
        return look(text, "a directory on a filesystem that all nodes share")
    return fine(f"{path} can be written here")


def _journal(site: Site, cluster: str, place: CheckContext) -> Iterator[Advice]:
    root = site.journal or "~/.slurm-health/journal"
    if root.startswith("~"):
        text = (
            f"journals are in {root} of every user, whose homes all nodes must share: root's"
            " lemons, metrics and history, and the standings that they publish, have none"
        )
        yield look(text, "journal = a shared directory: documentation, admin/install.md")
        return
    fix = f"install -d -m 1777 -o root {root} {root}/{cluster or 'CLUSTER'}"
    for path in (root, f"{root}/{cluster}") if cluster else (root,):
        try:
            status = Path(path).stat()
        except OSError as err:
            why = err.strerror
            yield change(f"journal: {path} cannot be used ({why}): no job can be checked", fix)
            return
        if not status.st_mode & stat.S_IWOTH:
            yield change(f"journal: users cannot write in {path}: no job can be checked", fix)
            return
        if not status.st_mode & stat.S_ISVTX or status.st_uid != 0:
            text = f"journal: {path} must be root's and sticky, or any user can replace journals"
            yield change(text, fix)
            return
    if _mount(place, root).kind in _LOCAL_TYPES:
        text = (
            f"journal = {root} is on this machine's own disk: the nodes of a job cannot read one"
            " another's records, and every check ends undecided"
        )
        yield change(text, "a directory on a filesystem that all nodes share, or ~")
    else:
        loose = ownership.replaceable(Path(root).parent)
        yield from ownership.loose_advice(f"journals are in {root}", loose) or [
            fine(f"journals are in {root}")
        ]


def _mount(place: CheckContext, path: str) -> Mount:
    """Return type and options of the mount that a path is on; empty if they are unknown."""
    try:
        return mount_of(read_mounts(place), str(Path(path).resolve()))
    except Unmeasured:
        return Mount("", "")


def log_advice(place: CheckContext) -> Advice:
    """Return advice on the machine's log: slurmd shows only the output of hooks that fail."""
    if place.path(LOG_SOCKET).is_socket():
        return fine(f"findings go to the system log ({LOG_SOCKET})")
    text = f"nothing listens at {LOG_SOCKET}: findings, and why no node is drained, are lost"
    return look(text, "run systemd-journald or a syslog daemon on the nodes")


def _host(site: Site, place: CheckContext) -> Iterator[Advice]:
    kind = _mount(place, str(site.state)).kind
    if kind and kind not in _LOCAL_TYPES:
        text = (
            f"hooks.state = {site.state} is on {kind}: if other nodes use the same one, their"
            " records are mixed up, and no node is released by itself"
        )
        yield look(text, "a directory that every node has for itself")
    yield log_advice(place)
    # Users' jobs run this installation as well, on every node.
    ours = [Path(sys.executable), Path(__file__)]
    parents = {p for path in ours for start in (path, path.resolve()) for p in start.parents}
    closed = set()
    for path in parents:
        with contextlib.suppress(OSError):
            if not place.path(str(path)).stat().st_mode & stat.S_IXOTH:
                closed.add(path)
    if closed:
        text = (
            f"slurm-health runs with {sys.executable}, and users cannot enter"
            f' {first_few(sorted(closed))}: their commands end with "Permission denied"'
        )
        yield change(
            text, "install it where all may read, as in /opt: documentation, admin/install.md"
        )
    uses_gpu = any(type(check.check).__name__.startswith("Gpu") for check in site.planned)
    if uses_gpu and importlib.util.find_spec("pynvml") is None:
        text = "GPU checks are configured, but nvidia-ml-py is missing: they measure nothing"
        yield change(text, "pip install 'slurm-health[gpu]' where the shims' python is")
    for check in site.planned:
        program = program_of(check.check)
        here = matches(node_name(os.environ), check.nodes)
        if program and here and not is_there(program, place):
            text = f"checks.{check.name} runs {program}, which is not on this node: it measures"
            fix = f"install it, or leave the check out; for some nodes only: nodes in {site.path}"
            yield change(f"{text} nothing", fix)


# --- repairs and notifications -------------------------------------------------------------------


def _command(key: str, argv: tuple[str, ...]) -> Iterator[Advice]:
    """Yield advice on a command of the site: missing, or others can change it."""
    path = shutil.which(argv[0], path=SYSTEM_PATH) if argv else None
    if argv and path is None:
        yield change(f"{key}: {argv[0]} is not on this node, so it fails", "install it everywhere")
    elif path is not None:
        loose = ownership.replaceable(Path(path))
        yield from ownership.loose_advice(f"{key}: root runs {path}", loose)


def advise_on_repair(site: Site, config: Mapping[str, str]) -> list[Advice]:
    """Return advice on repairs; none if the site wants none.

    Args:
        site: the config file.
        config: the fields of slurm.conf, none if they are unknown.
    """
    settings = site.repair
    if not (settings.steps or settings.test):
        return []
    reset = settings.reset if "reset" in settings.steps else ()
    advice = [*_command("repair.reset", reset), *_command("repair.test", settings.test)]
    if "reboot" in settings.steps and config and not config.get("RebootProgram"):
        text = "repair.steps has reboot, and slurm.conf has no RebootProgram: Slurm reboots nothing"
        advice.append(change(text, "RebootProgram=/usr/sbin/reboot"))
    if "administrator" in settings.steps and not (site.notify.command or site.notify.urls):
        text = "repair.steps has administrator, and [notify] is empty: no event is sent"
        advice.append(look(text, "set command or urls in [notify]"))
    how = "logged and not done (dry run)" if settings.dry_run else "done"
    steps = ", ".join([*settings.steps, *(["test"] if settings.test else [])])
    return advice or [fine(f"repairs of nodes are {how}: {steps}")]


def advise_on_notify(site: Site) -> list[Advice]:
    """Return advice on notifications; none if the site sends none."""
    settings = site.notify
    if not (settings.command or settings.urls):
        return []
    advice = list(_command("notify.command", settings.command))
    if settings.urls and importlib.util.find_spec("apprise") is None:
        text = f"notify.urls needs apprise, which {sys.executable} does not have"
        advice.append(change(text, "pip install 'slurm-health[notify]', on every node"))
    files = [entry for entry in settings.urls if entry.startswith("/")]
    if len(files) < len(settings.urls) and Path(site.path).stat().st_mode & 0o044:
        text = f"notify.urls: a URL may hold a password, and users can read {site.path}"
        advice.append(look(text, "urls = [a file of URLs that only root can read]"))
    for file in files if os.getuid() == 0 else []:  # others cannot look
        if problem := notify.file_problem(file):
            fix = f"chown root {file}; chmod 600 {file}"
            advice.append(change(f"notify.urls: {problem}", fix))
    return advice or [fine("events of nodes are sent; try: slurm-health doctor --test-notify")]


def reads_advice(obstacle: str) -> Advice:
    """Return how nodes are read here; `obstacle` is why not through pyslurm."""
    if not obstacle:
        return fine("nodes are read through pyslurm, which goes with this Slurm")
    text = f"nodes are read through Slurm's commands: {obstacle}"
    if "not installed" in obstacle:
        return fine(text)
    return look(text, "nothing, if that is intended")
