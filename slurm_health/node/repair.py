# SPDX-License-Identifier: Apache-2.0
"""Repairs a drained node by the steps that its site allows, and tests it before it returns.

The health check asks what is next and begins it; a reset of GPUs and the site's test take minutes,
so they are a process of their own: `... -m slurm_health.node.repair FILE ATTEMPT [GPU]...`. Nothing
is done to a node that somebody else has drained, whose note was edited, or on which a job runs.
Checks take tens of seconds, and an administrator does not wait for them, so Slurm is asked again
right before anything is done.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from slurm_health.node import notify, shared, state
from slurm_health.node.checks.check import CheckContext
from slurm_health.node.notify import EventKind, NodeEvent
from slurm_health.node.rules import drain_note, repair
from slurm_health.node.rules.breaker import DrainLedger, tripped_for
from slurm_health.node.rules.finding import CheckResult
from slurm_health.node.rules.kernel_lines import address
from slurm_health.node.rules.recovery import DrainRecord
from slurm_health.node.rules.repair import Gate, NextStep, Outcome, RepairAttempt, RepairStep
from slurm_health.node.shared import StoreUnusable
from slurm_health.node.site import Site, load
from slurm_health.records.decoding import from_json, from_msgpack
from slurm_health.records.errors import SlurmError, Unmeasured
from slurm_health.records.text import cut, one_line
from slurm_health.system import SYSTEM_PATH, processes
from slurm_health.system.killable import Answered, Broke, Hung, run_one
from slurm_health.system.nvml import Gpus, read_gpus
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Node
from slurm_health.system.telemetry import send_line

_LOCK = "repair.lock"
_NVML_LIMIT_S = 60.0
_SHOWN = 300
# What is kept of a command's output: a test of hours may print all the while.
_LAST_BYTES = 4096
# What a node that waits for nothing but repair is; CLOUD and DYNAMIC say where it is from.
_IDLE = frozenset({"IDLE", "DRAIN", "CLOUD", "DYNAMIC_NORM"})
# Behind the word of a state: down, rebooting, powered down, in maintenance.
_MARKS = "*@^$~!%#"
_AWAY = ("DOWN", "REBOOT", "NOT_RESP", "POWER")


class ActionLog(Protocol):
    """Where actions are logged."""

    def info(self, text: str) -> None:
        """Log what was done."""

    def warning(self, text: str) -> None:
        """Log what an administrator should look at."""


class HealthCheck(Protocol):
    """What is needed of a health check."""

    @property
    def site(self) -> Site: ...  # noqa: D102
    @property
    def node(self) -> str: ...  # noqa: D102
    @property
    def context(self) -> CheckContext: ...  # noqa: D102
    @property
    def log(self) -> ActionLog: ...  # noqa: D102

    def controller(self) -> Client:
        """Return slurmctld."""


class StepRefused(Exception):
    """A step must not be taken, or failed; the text says why."""


def why_not_ours(now: Node, note: str) -> str:
    """Return why nothing may be done to a node now; empty if it is ours alone, and idle."""
    if not now.drained or drain_note.unsigned(now.reason) != note:
        return f"it is no longer drained by us alone: {now.state}: {now.reason or '(no reason)'}"
    if not now.states <= _IDLE or any(mark in now.state for mark in _MARKS):
        return f"it is {now.state}"
    return ""


# --- attempts, in the ledger that all nodes share ------------------------------------------------


def read_attempts(site: Site) -> tuple[RepairAttempt, ...]:
    """Return the attempts on all nodes, read in a child.

    Raises:
        StoreUnusable: they cannot be read, so nothing may be done.
    """

    def work() -> tuple[RepairAttempt, ...]:
        return shared.read_ledger(site.breaker).repairs

    return shared.in_child(site, work, tuple[RepairAttempt, ...])


def keep_attempt(site: Site, attempt: RepairAttempt) -> None:
    """Keep an attempt, or how it ended.

    Raises:
        StoreUnusable: it cannot be kept.
    """

    def change(ledger: DrainLedger) -> tuple[DrainLedger, None]:
        repairs = repair.with_attempt(ledger.repairs, attempt)
        return msgspec.structs.replace(ledger, repairs=repairs), None

    shared.change_ledger(site, change, type(None))


class _Chosen(msgspec.Struct, frozen=True):
    next: NextStep
    attempt: RepairAttempt | None


def _reserve(
    check: HealthCheck, now: Node, choose: Callable[[tuple[RepairAttempt, ...]], _Chosen]
) -> _Chosen:
    """Choose a step and count it before it is taken, so that no two nodes take the last one."""

    def change(ledger: DrainLedger) -> tuple[DrainLedger, _Chosen]:
        tripped = tripped_for(ledger, now.name, now.partitions)
        if tripped is not None:
            why = f"the breaker of {tripped} has tripped"
            return ledger, _Chosen(NextStep(step=None, why=why), None)
        chosen = choose(ledger.repairs)
        if chosen.attempt is None:
            return ledger, chosen
        repairs = repair.with_attempt(ledger.repairs, chosen.attempt)
        return msgspec.structs.replace(ledger, repairs=repairs), chosen

    return shared.change_ledger(check.site, change, _Chosen)


# --- what the health check of a drained node does ------------------------------------------------


def consider(
    check: HealthCheck, kept: DrainRecord, now: Node, failed: Sequence[CheckResult]
) -> None:
    """Take the next step for a node that we have drained and that is still faulty.

    Args:
        check: the health check.
        kept: what the node was drained for.
        now: how Slurm sees it.
        failed: the faults that its checks have just measured, of those it was drained for; empty
            if no check can tell.
    """
    why_not = why_not_ours(now, kept.reason)
    if why_not:
        check.log.info(f"not repaired: {why_not}")
        return
    settings, now_s = check.site.repair, check.context.now_s

    def choose(attempts: tuple[RepairAttempt, ...]) -> _Chosen:
        first = repair.first_step(failed, settings)
        chosen = repair.next_repair(
            first, attempts, node=kept.node, drain=kept.reason, settings=settings, now_s=now_s
        )
        if chosen.step is None:
            return _Chosen(chosen, None)
        attempt = RepairAttempt(
            node=kept.node,
            step=chosen.step,
            time_s=now_s,
            drain=kept.reason,
            outcome=Outcome.DRY_RUN if settings.dry_run else Outcome.BEGUN,
            until_s=now_s + repair.STEP_LIMIT_S,
            text="; ".join(result.finding.text for result in failed),
        )
        return _Chosen(chosen, attempt)

    try:
        if failed:
            _judge_last(check, kept, failed)
        else:
            note_repaired(check, kept)
        chosen = _reserve(check, now, choose)
        attempt = chosen.attempt
        if attempt is None:
            check.log.info(f"not repaired: {chosen.next.why}")
        elif attempt.outcome is Outcome.DRY_RUN:
            check.log.info(f"dry run: {attempt.step.value} would be next: {chosen.next.why}")
        else:
            check.log.info(f"repair: {attempt.step.value}: {chosen.next.why}")
            _begin(check, kept, attempt, failed)
    except StoreUnusable as err:
        check.log.warning(f"not repaired: {err}")


def may_return(check: HealthCheck, kept: DrainRecord, now: Node) -> bool:
    """Return whether a node that passes its checks may return to service; test it first if not.

    Without a test in `[repair]` it may. A test that fails makes the node an administrator's.
    """
    settings, now_s = check.site.repair, check.context.now_s
    if not settings.test or not now.drained or drain_note.unsigned(now.reason) != kept.reason:
        return True
    try:
        attempts = read_attempts(check.site)
        gate, last = repair.gate(
            attempts, node=kept.node, drain=kept.reason, settings=settings, now_s=now_s
        )
        if gate is Gate.OPEN:
            return True
        if gate is Gate.TESTING:
            check.log.info("not released: the test of [repair] is running")
        elif gate is Gate.TEST_FAILED and last is not None:
            why = last.text if last.outcome is Outcome.FAILED else "it did not end, twice"
            check.log.warning(f"not released: the test of [repair] failed: {why}")
            _call_administrator(check, kept, f"the test of [repair] failed: {why}")
        else:
            _begin_test(check, kept, now)
    except StoreUnusable as err:
        check.log.warning(f"not released: whether it passed its test is not known: {err}")
    return False


def _begin_test(check: HealthCheck, kept: DrainRecord, now: Node) -> None:
    why_not = why_not_ours(now, kept.reason)
    if why_not:
        check.log.info(f"not released: it has to be tested first, and {why_not}")
        return
    now_s = check.context.now_s
    attempt = RepairAttempt(
        node=kept.node,
        step=RepairStep.TEST,
        time_s=now_s,
        drain=kept.reason,
        until_s=now_s + 60 * check.site.repair.test_limit_min + repair.STEP_LIMIT_S,
        text="before it returns to service",
    )
    keep_attempt(check.site, attempt)
    check.log.info("its checks pass: the test of [repair] begins")
    _start(check, attempt, ())


def _begin(
    check: HealthCheck, kept: DrainRecord, attempt: RepairAttempt, failed: Sequence[CheckResult]
) -> None:
    if attempt.step is RepairStep.ADMINISTRATOR:
        text = "; ".join(result.finding.text for result in failed) or kept.reason
        lines = [f"check {result.name}: {result.finding.text}" for result in failed]
        _notify_administrator(check, kept, text, lines)
        keep_attempt(check.site, msgspec.structs.replace(attempt, outcome=Outcome.DONE))
        return
    if attempt.step is RepairStep.RESET:
        devices = [result.finding.devices for result in failed]
        known = all(devices)  # if one is not known, all GPUs are reset
        buses = dict.fromkeys(bus for some in devices for bus in some) if known else {}
        _start(check, attempt, tuple(buses))
        return
    controller = check.controller()
    try:
        why_not = why_not_ours(controller.node(kept.node), kept.reason)
        if not why_not:
            controller.reboot(kept.node, kept.reason)
            return
    except SlurmError as err:
        _fail(check, attempt, f"it could not be begun: {err}")
        return
    ended = msgspec.structs.replace(attempt, outcome=Outcome.FAILED, text=why_not)
    keep_attempt(check.site, ended)
    check.log.info(f"not repaired: {why_not}")


def _start(check: HealthCheck, attempt: RepairAttempt, devices: tuple[str, ...]) -> None:
    """Start the process that takes a step."""
    words = [check.site.path, msgspec.json.encode(attempt).decode(), *devices]
    argv = processes.own_module("slurm_health.node.repair", *words)
    try:
        processes.start_detached(argv, check.context.environ)
    except OSError as err:
        _fail(check, attempt, f"it could not be begun: {err}")


def _judge_last(check: HealthCheck, kept: DrainRecord, failed: Sequence[CheckResult]) -> None:
    """Keep that the last step has not helped, now that the fault is still there."""
    last = repair.unfinished(read_attempts(check.site), kept.node, kept.reason)
    if last is None:
        return
    # A reboot is over when Slurm has the node back, idle, as it has now.
    is_over = last.outcome is Outcome.DONE or last.step is RepairStep.REBOOT
    if is_over or check.context.now_s >= last.until_s:
        texts = "; ".join(result.finding.text for result in failed)
        why = f"the fault is still there: {texts}" if is_over else "it did not end in time"
        _fail(check, last, why)


def note_repaired(check: HealthCheck, kept: DrainRecord) -> None:
    """Keep that a reboot is over: the checks that the node was drained for pass."""
    try:
        last = repair.unfinished(read_attempts(check.site), kept.node, kept.reason)
        if last and last.outcome is Outcome.BEGUN and last.step is RepairStep.REBOOT:
            ended = msgspec.structs.replace(last, outcome=Outcome.DONE, text="it is back")
            keep_attempt(check.site, ended)
    except StoreUnusable as err:
        check.log.warning(f"how the last step ended is not kept: {err}")


def report_missing(check: HealthCheck) -> None:
    """Notify of any node that is not back in time from a reboot: it may be unable to."""
    try:
        overdue = repair.overdue(read_attempts(check.site), check.context.now_s)
        nodes = check.controller().nodes() if overdue else {}
        for late in overdue:
            now = nodes.get(late.node)  # one that Slurm no longer has is not back either
            is_back = now is not None and not (
                any(word.startswith(_AWAY) for word in now.states) or "*" in now.state
            )
            why = "it is back" if is_back else f"{late.node} is not back from its reboot"
            outcome = Outcome.DONE if is_back else Outcome.FAILED
            keep_attempt(check.site, msgspec.structs.replace(late, outcome=outcome, text=why))
            if not is_back:
                check.log.warning(f"repair: {why}")
                lines = (f"drained with: {late.drain}",)
                for kind in (EventKind.STEP_FAILED, EventKind.ADMINISTRATOR):
                    _send(check, kind, why, (late.step.value,), lines, node=late.node)
    except (SlurmError, StoreUnusable) as err:
        check.log.warning(f"whether nodes are back from their reboots is not known: {err}")


def _fail(check: HealthCheck, attempt: RepairAttempt, why: str) -> None:
    keep_attempt(check.site, msgspec.structs.replace(attempt, outcome=Outcome.FAILED, text=why))
    check.log.warning(f"repair: {attempt.step.value} failed: {why}")
    _send(check, EventKind.STEP_FAILED, f"{attempt.step.value}: {why}", (attempt.step.value,))


def _call_administrator(check: HealthCheck, kept: DrainRecord, why: str) -> None:
    """Hand a node over, once for each drain."""
    new = RepairAttempt(
        node=kept.node,
        step=RepairStep.ADMINISTRATOR,
        time_s=check.context.now_s,
        drain=kept.reason,
        outcome=Outcome.DONE,
        text=why,
    )

    def change(ledger: DrainLedger) -> tuple[DrainLedger, bool]:
        if any((r.drain, r.step) == (new.drain, new.step) for r in ledger.repairs):
            return ledger, False
        repairs = repair.with_attempt(ledger.repairs, new)
        return msgspec.structs.replace(ledger, repairs=repairs), True

    if shared.change_ledger(check.site, change, bool):
        _notify_administrator(check, kept, why, [])


def _notify_administrator(
    check: HealthCheck, kept: DrainRecord, text: str, lines: Sequence[str]
) -> None:
    """Send all that is known of a node."""
    steps = repair.of_last_day(read_attempts(check.site), check.context.now_s).get(kept.node, [])
    evidence = [f"drained with: {kept.reason}", *lines]
    evidence += [
        f"{attempt.step.value} at {attempt.time_s:.0f}: {attempt.outcome.value}: {attempt.text}"
        for attempt in steps
        if attempt.step is not RepairStep.ADMINISTRATOR
    ]
    _send(check, EventKind.ADMINISTRATOR, text, kept.retest, tuple(evidence))


def _send(
    check: HealthCheck,
    kind: EventKind,
    text: str,
    checks: tuple[str, ...] = (),
    evidence: tuple[str, ...] = (),
    *,
    node: str = "",
) -> None:
    event = NodeEvent(
        kind=kind,
        node=node or check.node,
        time_s=check.context.now_s,
        text=text,
        checks=checks,
        evidence=evidence,
    )
    notify.send(check.site, event)


# --- the process that takes a step ---------------------------------------------------------------


@contextlib.contextmanager
def at_work(directory: Path) -> Iterator[bool]:
    """Hold this node for a step; yield whether it was free."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Others can reach the directory: who may open a file can hold its lock.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with os.fdopen(os.open(directory / _LOCK, flags, 0o600), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def is_at_work(directory: Path) -> bool:
    """Return whether a step is being taken on this node."""
    if not (directory / _LOCK).exists():
        return False
    with at_work(directory) as free:
        return not free


def take(
    site: Site,
    attempt: RepairAttempt,
    devices: Collection[str],
    *,
    why_not: Callable[[], str],
    look: Callable[[], Gpus],
) -> RepairAttempt:
    """Reset GPUs, or run the site's test; return how that ended.

    Args:
        site: the config file.
        attempt: what was begun.
        devices: the PCI addresses of the GPUs at fault; none for all.
        why_not: asks Slurm why nothing may be done to the node now.
        look: asks NVML.
    """
    refusal = why_not()
    if refusal:
        return msgspec.structs.replace(attempt, outcome=Outcome.FAILED, text=refusal)
    try:
        if attempt.step is RepairStep.TEST:
            text = _run(site.repair.test, 60 * site.repair.test_limit_min)
        else:
            buses = ",".join(_free_gpus(look(), devices))
            argv = [word.replace("{gpus}", buses) for word in site.repair.reset]
            text = _run(argv, repair.STEP_LIMIT_S)
            # What the kernel wrote before the reset counts no more, as after an administrator.
            with contextlib.suppress(OSError, Unmeasured):
                place = CheckContext(now_s=time.time(), state=site.state)
                state.keep_return(site.state, place.boot_time())
    except StepRefused as err:
        return msgspec.structs.replace(attempt, outcome=Outcome.FAILED, text=str(err))
    return msgspec.structs.replace(attempt, outcome=Outcome.DONE, text=text)


def _free_gpus(gpus: Gpus, wanted: Collection[str]) -> list[str]:
    """Return the addresses of GPUs that no process uses.

    Raises:
        StepRefused: one is in use, or that is not known; or its NVLinks are just being joined.
    """
    if gpus.broken:
        raise StepRefused(f"the GPUs cannot be asked: {gpus.broken}")
    named = {address(bus) for bus in wanted}
    chosen = [gpu for gpu in gpus.devices if not named or address(gpu.bus) in named]
    if not chosen or (named and len(chosen) < len(named)):
        missing = named - {address(gpu.bus) for gpu in chosen}
        raise StepRefused(f"NVML shows no GPU at {', '.join(sorted(missing)) or 'all'}")
    for gpu in chosen:
        name = f"GPU {gpu.index}"
        if gpu.processes is None:
            why = gpu.lost or gpu.unanswered or "not supported"
            raise StepRefused(f"{name} does not report which processes use it: {why}")
        if gpu.processes:
            raise StepRefused(f"{name} is in use by PID {', '.join(map(str, gpu.processes))}")
        if gpu.fabric_state == "in progress":
            raise StepRefused(f"{name} is still joining the NVLink fabric")
    return [gpu.bus or str(gpu.index) for gpu in chosen]


def ask_nvml() -> Gpus:
    """Return this machine's GPUs, asked in a child.

    Raises:
        StepRefused: NVML does not answer.
    """
    match run_one(lambda: msgspec.msgpack.encode(read_gpus()), _NVML_LIMIT_S):
        case Answered(data=data):
            return from_msgpack(data, Gpus)
        case Broke(reason=reason):
            raise StepRefused(f"the GPUs cannot be asked: {reason}")
        case Hung(limit_s=limit_s):
            raise StepRefused(f"NVML did not answer within {limit_s:g} s")


def _run(argv: Sequence[str], limit_s: float) -> str:
    """Run a command of the site's, as root; return the end of its output.

    Raises:
        StepRefused: it cannot be run, failed, or did not end in time.
    """
    try:
        ended = processes.run(
            argv,
            environ={"PATH": SYSTEM_PATH, "LC_ALL": "C", "HOME": "/root"},
            deadline_s=limit_s,
            directory=Path("/"),
            last_bytes=_LAST_BYTES,
        )
    except TimeoutError:
        raise StepRefused(f"{argv[0]} did not end within {limit_s / 60:g} min") from None
    except OSError as err:
        raise StepRefused(f"{argv[0]} cannot be run: {err.strerror}") from err
    # Tests say what is wrong at the end.
    output = cut(one_line((ended.stdout + ended.stderr).decode(errors="replace")[-_SHOWN:]), _SHOWN)
    if ended.returncode:
        raise StepRefused(f"{argv[0]} exited with code {ended.returncode}: {output}")
    return output


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Take one step; return the exit code."""
    config, order, *devices = arguments
    site, attempt = load(Path(config)), from_json(order, RepairAttempt)

    def why_not() -> str:
        controller = Client.for_hook(environ, limit_s=site.timing.slurm_s)
        try:
            return why_not_ours(controller.node(attempt.node), attempt.drain)
        except SlurmError as err:
            return f"Slurm cannot be asked: {err}"

    with at_work(site.state) as free:
        if not free:
            return 1
        ended = take(site, attempt, devices, why_not=why_not, look=ask_nvml)
        line = f"{attempt.step.value}: {ended.outcome.value}: {ended.text}"
        try:
            keep_attempt(site, ended)
        except StoreUnusable as err:
            line += f" (not kept: {err})"
        send_line("warning", f"slurm-health: repair: node={attempt.node} {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
