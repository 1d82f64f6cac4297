# SPDX-License-Identifier: Apache-2.0
"""`slurm-health doctor`, the part about the site's file and this machine."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from slurm_health.node.checks.check import CheckContext, first_few
from slurm_health.node.checks.external import is_there, program_of
from slurm_health.node.doctor import ownership
from slurm_health.node.doctor.advice import Advice, change, fine, look
from slurm_health.node.hooks.healthcheck import LONGEST_REPEAT_S
from slurm_health.node.rules.settings import matches
from slurm_health.node.run import node_name
from slurm_health.node.shared import MARGIN_S
from slurm_health.node.site_settings import Site
from slurm_health.node.state import LOCK_LIMIT_S
from slurm_health.records.errors import Unmeasured
from slurm_health.system.proc import Mount, mount_of
from slurm_health.system.telemetry import LOG_SOCKET

# What is on a filesystem of these types, no other node can see.
_LOCAL_TYPES = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "ramfs", "overlay"}
)
# Options of NFS and Lustre, and types, with which a lock on one node is none on another.
_LOCKS_OF_ITS_OWN = frozenset(
    {"nolock", "local_lock=all", "local_lock=flock", "localflock", "noflock", "fuse.sshfs"}
)
_CALLS_OF_A_DRAIN = 5
_HERE = CheckContext()
LOADED_BY_AGENTS = ("slurm_health.preflight.agent.agent", "msgspec._utils", "numpy.version")

TORCH_QUESTION = (
    "import torch; n = torch.cuda.nccl.version() if torch.cuda.is_available() else 'none';"
    "print('torch', torch.__version__, 'CUDA', torch.version.cuda, 'NCCL', n)"
)


def advise_machine(
    site: Site, cluster: str, limits_s: Mapping[str, int], place: CheckContext = _HERE
) -> list[Advice]:
    """Return what this machine and the site's file lack.

    Args:
        site: the site's file.
        cluster: its name in slurm.conf, empty where Slurm does not tell.
        limits_s: of the shims, by the key of slurm.conf that names each.
        place: the machine.
    """
    return [
        _rights(),
        *_settings(site, limits_s),
        _shared(place, site),
        *_state(place, site),
        *_metrics(site),
        *_journal(place, site, cluster),
        log_advice(place),
        _clock(),
        *_needs(site, place),
        *_users(place),
    ]


def _rights() -> Advice:
    if os.getuid() != 0:
        text = "not root: what only root can see or write was not checked"
        return look(text, "run doctor as root on a node, as the hooks run")
    return fine("doctor runs as root, as the hooks do: what only root can see was looked at")


def _settings(site: Site, limits_s: Mapping[str, int]) -> Iterator[Advice]:
    if not site.checks:
        text = f"{site.path} configures no check: the hooks do nothing"
        yield change(text, "draft some on a healthy node: slurm-health init-config")
        return
    shadow = [each.name for each in site.checks if each.shadow]
    if not site.hooks.drain:
        text = f"{site.path}: hooks.drain is false: faults are logged and nothing is drained"
        yield look(text, "drain = true, once the log shows only faults that are worth a drain")
    elif len(shadow) == len(site.checks):
        text = "every check is in shadow: faults are logged and nothing is drained"
        yield look(text, "remove shadow = true, check by check")
    else:
        yield fine(f"checks: {len(site.checks)}, of them in shadow: {len(shadow)}")
    for hook, longest_s in (("Prolog", _prolog_s(site)), ("Epilog", _epilog_s(site))):
        if longest_s > limits_s[hook]:
            text = (
                f"{hook} may take {longest_s:g} s when everything is slow, more than the"
                f" {limits_s[hook]} s of its shim: such a hook is stopped and drains nothing"
            )
            mend = f"a lower time_limit_s of the checks, or limit={longest_s:.0f} in the shim"
            yield look(text, mend)
    slow = [each.name for each in site.checks if each.time_limit_s > LONGEST_REPEAT_S]
    if slow and site.recovery.release:
        text = (
            f"a health check, which Slurm ends after a minute, cannot repeat {', '.join(slow)}: a"
            " node that is drained for it waits for a person"
        )
        yield look(text, "nothing; on the node: slurm-health nodes retest, then nodes release")


def _prolog_s(site: Site) -> float:
    """Return how long a prolog takes when each step takes its limit."""
    return _checks_s(site, "prolog") + _drain_s(site)


def _epilog_s(site: Site) -> float:
    """Return the same for an epilog that reads a journal, tests the node and marks it."""
    test_s = site.hooks.slurm_limit_s + _checks_s(site, "retest")  # is the node idle?
    # Twice where this Slurm does not tell when the job started, and is asked in between.
    read_s = 2 * site.accusations.read_limit_s + site.hooks.slurm_limit_s
    return _checks_s(site, "epilog") + read_s + test_s + _lock_s(site) + _drain_s(site)


def _checks_s(site: Site, context: str) -> float:
    """Return the same for checks: in a retest, those that need the node alone come one by one."""
    checks = [each for each in site.checks if context in each.contexts]
    apart = [each for each in checks if each.exclusive and context == "retest"]
    together_s = max((each.time_limit_s for each in checks if each not in apart), default=0.0)
    return together_s + sum(each.time_limit_s for each in apart)


def _drain_s(site: Site) -> float:
    """Return the same for a drain, which counts itself, and takes that back when it fails."""
    calls_s = _CALLS_OF_A_DRAIN * site.hooks.slurm_limit_s
    return site.breaker.spread_s + LOCK_LIMIT_S + calls_s + 2 * _lock_s(site)


def _lock_s(site: Site) -> float:
    return site.breaker.lock_limit_s + MARGIN_S


def _shared(place: CheckContext, site: Site) -> Advice:
    from slurm_health.node import shared

    path = site.breaker.directory
    if not path:
        text = "breaker.directory is not set: how many are drained is unknown, so none is drained"
        return change(text, f"in {site.path}: [breaker] directory = a directory all nodes share")
    try:
        known = shared.read_ledger(site.breaker)
        if os.getuid() == 0:
            shared.change_ledger(site, lambda ledger: (ledger, None), type(None))
    except shared.StoreDamaged as err:
        return change(f"nothing is drained: {err}", "as root on a node: slurm-health nodes reset")
    except shared.StoreUnusable as err:
        text = f"the shared directory cannot be used, so nothing is drained: {err}"
        return change(text, f"install -d -m 0755 -o root -g root {path}, exported to root")
    if known.trips:
        text = f"the breaker has tripped, nothing is drained in: {', '.join(known.trips)}"
        return change(text, "slurm-health nodes says why; then: slurm-health nodes reset")
    kind, options = _mount(place, path)
    if own := _LOCKS_OF_ITS_OWN.intersection([kind, *options.split(",")]):
        text = (
            f"breaker.directory = {path} is mounted with {', '.join(sorted(own))}: each node locks"
            " for itself, so what two write at once is lost, and too many are drained"
        )
        return change(text, "mount it with locks that hold for all nodes")
    if os.getuid() != 0:
        return look(f"whether {path} can be locked and written was not tried", "run doctor as root")
    if kind in _LOCAL_TYPES:
        text = (
            f"breaker.directory = {path} is on this machine's own {kind}: if other nodes do not see"
            " it, each counts for itself and a rack that fails at once is drained"
        )
        return look(text, "a directory on a filesystem that all nodes share")
    return fine(f"{path} can be locked and written here")


def _state(place: CheckContext, site: Site) -> Iterator[Advice]:
    kind = _mount(place, str(site.state)).kind
    if kind and kind not in _LOCAL_TYPES:
        text = (
            f"hooks.state = {site.state} is on {kind}: if other nodes have the same one, none knows"
            " what it was drained for, and none is released by itself"
        )
        yield look(text, "a directory that each node has for itself")


def _metrics(site: Site) -> Iterator[Advice]:
    if not site.metrics.directory:
        return
    path = Path(site.metrics.directory)
    if not path.is_dir():
        text = f"metrics.directory = {path} is no directory: no metrics are written"
        yield change(text, f"install -d -m 0755 -o root -g root {path}")
    elif loose := ownership.replaceable(path):
        text = (
            f"metrics.directory = {path}: root writes there, and others than root can change"
            f" {first_few(loose)}, and with it what node_exporter says of this node"
        )
        mend = f"chown root and chmod go-w {first_few(loose)}: node_exporter only reads"
        # Whoever can change what is above it can have root write elsewhere.
        yield look(text, mend) if loose == [path] else change(text, mend)


def _journal(place: CheckContext, site: Site, cluster: str) -> Iterator[Advice]:
    root = site.journal or "~/.slurm-health/journal"
    if root.startswith("~"):
        yield from _home(place, root)
        return
    mend = f"install -d -m 1777 {root} {root}/{cluster or 'CLUSTER'}"
    for path in (root, f"{root}/{cluster}") if cluster else (root,):
        try:
            mode = Path(path).stat().st_mode
        except OSError as err:
            text = (
                f"journal = {root}: {path} cannot be used ({err.strerror}): no job can be checked"
            )
            yield change(text, mend)
            return
        if not mode & stat.S_IWOTH:
            text = f"journal = {root}: users cannot write in {path}: their jobs cannot be checked"
            yield change(text, mend)
            return
    kind = _mount(place, root)[0]
    if kind in _LOCAL_TYPES:
        text = (
            f"journal = {root} is on this machine's own {kind}: the nodes of a job do not see each"
            " other's records, and every check ends inconclusive"
        )
        yield change(text, "a directory on a filesystem that all nodes share, or ~")
        return
    yield fine(f"journals are in {root}")


def _home(place: CheckContext, root: str) -> Iterator[Advice]:
    home = Path.home()
    if os.getuid() == 0:
        # Root's own home says nothing about those of users.
        text = (
            f"journals are in {root} of each user, whose homes all nodes must share: lemons,"
            " metrics and history of root, and the standings that they publish, see none of them"
        )
        yield look(text, "journal = a shared directory: documentation, admin/install.md, step 2")
        return
    if not os.access(home, os.W_OK):
        text = f"journals are in {root}, and {home} cannot be written: no job can be checked"
        yield change(text, "another place: --journal DIR, or SLURM_HEALTH_JOURNAL")
    elif _mount(place, str(home)).kind in _LOCAL_TYPES:
        text = f"{home} looks like a local disk: journals are in {root}, which all nodes must share"
        yield look(
            text, "if it is local, a shared directory: --journal DIR, or SLURM_HEALTH_JOURNAL"
        )
    else:
        yield fine(f"journals are in {root}")


def _mount(place: CheckContext, path: str) -> Mount:
    """Return type and options of the mount that a path is on; empty where it cannot be told."""
    from slurm_health.node.checks.filesystem import read_mounts

    try:
        return mount_of(read_mounts(place), str(Path(path).resolve()))
    except Unmeasured:
        return Mount("", "")


def log_advice(place: CheckContext) -> Advice:
    """Return whether what the hooks say is kept: slurmd shows it of a hook that fails only."""
    if place.path(LOG_SOCKET).is_socket():
        return fine(f"findings go to the system log ({LOG_SOCKET})")
    text = (
        f"nothing listens at {LOG_SOCKET}: what the hooks find, and why they do not drain, is lost"
    )
    return look(text, "run systemd-journald or a syslog daemon on the nodes")


def _clock() -> Advice:
    from slurm_health.node.checks.clock import read_clock

    try:
        clock = read_clock()
    except Unmeasured as err:
        return look(
            f"the state of the clock cannot be read: {err}",
            "make sure that it follows a time server",
        )
    if not clock.synchronised:
        text = "the clock is not synchronised: times in journals and notes cannot be compared"
        return look(text, "follow a time server: chrony, or systemd-timesyncd")
    return fine(f"the clock is {clock.offset_ms:g} ms off")


def _needs(site: Site, place: CheckContext) -> Iterator[Advice]:
    """Look for what configured checks need and this machine lacks."""
    import importlib.util

    uses_gpu = any(type(each.check).__name__.startswith("Gpu") for each in site.checks)
    lacks = []
    if uses_gpu and importlib.util.find_spec("pynvml") is None:
        text = "GPU checks are configured, but nvidia-ml-py is missing: they measure nothing"
        lacks.append(change(text, "pip install 'slurm-health[gpu]' where the shims' python is"))
    for each in site.checks:
        program = program_of(each.check)
        if program and not is_there(program, place) and matches(node_name(os.environ), each.nodes):
            text = f"checks.{each.name} runs {program}, which is not on this node: it measures"
            mend = (
                f"install it, or leave the check out; for some nodes only: nodes = in {site.path}"
            )
            lacks.append(change(f"{text} nothing", mend))
    yield from lacks or [fine("what the configured checks need is installed")]


def _users(place: CheckContext) -> Iterator[Advice]:
    """Look whether users can run this installation: their jobs do, on every node."""
    paths = [Path(sys.executable), Path(__file__)]
    places = {each for path in paths for start in (path, path.resolve()) for each in start.parents}
    closed = sorted(each for each in places if not _is_open(place.path(str(each))))
    if closed:
        text = (
            f"slurm-health runs with {sys.executable}, and users cannot enter {first_few(closed)}:"
            ' each of their commands ends with "Permission denied"'
        )
        yield change(
            text, "install it where all may read, as in /opt: documentation, admin/install.md"
        )


def byte_code_advice(modules: Iterable[str] = LOADED_BY_AGENTS) -> Advice:
    """Return whether what agents load is compiled, as users cannot do beside root's files.

    Args:
        modules: one of each package that an agent, or its worker without torch, loads.
    """
    import importlib.util

    specs = {name.partition(".")[0]: importlib.util.find_spec(name) for name in modules}
    uncompiled = {
        package: importlib.util.find_spec(package)
        for package, spec in specs.items()
        if spec is not None and spec.cached is not None and not Path(spec.cached).exists()
    }
    if not uncompiled:
        return fine("what agents load is compiled")
    text = f"{' and '.join(uncompiled)} without byte code: each agent of each check compiles"
    places = [Path(spec.origin).parent for spec in uncompiled.values() if spec and spec.origin]
    mend = f"as who owns it: {sys.executable} -m compileall -q {' '.join(map(str, places))}"
    return look(f"{text} what it loads, which costs half as much again as its start", mend)


def _is_open(path: Path) -> bool:
    try:
        return bool(path.stat().st_mode & stat.S_IXOTH)
    except OSError:
        return True


def reads_advice(name: str, why: str) -> Advice:
    """Return how Slurm is read here, and why so."""
    if name == "pyslurm" or why == "pyslurm is not installed":
        return fine(f"nodes are read through {name}: {why}")
    return look(f"nodes are read through {name}: {why}", "nothing, if that is intended")


def torch_advice(output: str, code: int, python: str) -> Advice:
    """Return what an interpreter's torch, asked with `TORCH_QUESTION`, is good for."""
    if code != 0:
        text = (
            f"{python} has no torch: light probes check a job with it, which see no GPU and no NCCL"
        )
        return look(text, "slurm-health doctor --python PATH, with the one that jobs train with")
    return fine(f"{python}: {output.strip()}")
