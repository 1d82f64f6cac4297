# SPDX-License-Identifier: Apache-2.0
"""Repairs a drained node by the steps that its site allows, and tests it before it returns.

The health check asks what is next and begins it; a reset of GPUs and the site's test take minutes,
so they are a process of their own: `... -m slurm_health.node.repair FILE ATTEMPT [GPU]...`. Nothing
is done to a node that an administrator has drained, whose note was edited, or on which a job runs.
Checks take tens of seconds, and an administrator does not wait for them, so Slurm is asked again
right before anything is done.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.node import notify, shared, state
from slurm_health.node.checks.check import CheckContext
from slurm_health.node.hook import Hook
from slurm_health.node.notify import EventKind, NodeEvent
from slurm_health.node.rules import drain_note, repair
from slurm_health.node.rules.breaker import DrainLedger, tripped_for
from slurm_health.node.rules.finding import CheckResult
from slurm_health.node.rules.kernel_lines import address
from slurm_health.node.rules.recovery import DrainRecord
from slurm_health.node.rules.repair import Outcome, RepairAttempt, RepairStep
from slurm_health.node.shared import StoreUnusable
from slurm_health.node.site import Site, load
from slurm_health.node.store import held
from slurm_health.records.decoding import from_json, from_msgpack
from slurm_health.records.errors import SlurmError
from slurm_health.system import processes
from slurm_health.system.killable import Answered, run_one
from slurm_health.system.nvml import GpuDevice, Gpus, read_gpus
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Node
from slurm_health.system.telemetry import send_line

# In root's directory on the node; held while a step is taken.
LOCK = "repair.lock"
_NVML_LIMIT_S = 60.0
# The states of a node that waits only for repair; CLOUD and DYNAMIC name its kind.
_IDLE = frozenset({"IDLE", "DRAIN", "CLOUD", "DYNAMIC_NORM"})
# Behind the word of a state: down, rebooting, powered down, in maintenance.
MARKS = "*@^$~!%#"


def why_not_ours(now: Node, note: str) -> str:
    """Return why nothing may be done to a node now; empty if it is ours alone, and idle."""
    if not now.drained or drain_note.unsigned(now.reason) != note:
        return f"it is no longer drained by us alone: {now.state}: {now.reason or '(no reason)'}"
    if not now.states <= _IDLE or any(mark in now.state for mark in MARKS):
        return f"it is {now.state}"
    return ""


def is_at_work(directory: Path) -> bool:
    """Return whether a step is being taken on this node."""
    if not (directory / LOCK).exists():
        return False
    with held(directory / LOCK) as free:
        return not free


class _Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What one change of the ledger decided: how the last step ended, and the next one.

    `attempt` is the step as it is counted, None for none; `taken` are those of the node before.
    """

    ended: RepairAttempt | None
    why: str
    is_open: bool
    attempt: RepairAttempt | None
    taken: tuple[RepairAttempt, ...]


def advance(
    hook: Hook, kept: DrainRecord, now: Node, failed: Sequence[CheckResult] = (), *, passes: bool
) -> bool:
    """Take the next step for a node that we drained; return whether it may return to service.

    The step is counted before it is taken, so that no two nodes take the last one.

    Args:
        hook: of the health check.
        kept: the record of its drain.
        now: the node in Slurm.
        failed: the faults that its checks have just measured; empty if no check can clear it.
        passes: its checks pass, so that only the test of `[repair]` is left.
    """
    settings, refusal = hook.site.repair, why_not_ours(now, kept.reason)
    outcome = "not released" if passes else "not repaired"
    if refusal and not passes:
        hook.log.info(f"{outcome}: {refusal}")
        return False
    faults = "; ".join(result.finding.text for result in failed)
    first = RepairStep.TEST if passes else repair.first_step(failed, settings)

    def change(ledger: DrainLedger) -> tuple[DrainLedger, _Turn]:
        attempts, about = ledger.repairs, (kept.node, kept.reason)
        last = repair.ended(attempts, *about, "" if passes else faults, hook.context.now_s)
        if last is not None:
            attempts = repair.with_attempt(attempts, last)
        chosen = repair.next_step(
            first,
            attempts,
            node=kept.node,
            drain=kept.reason,
            settings=settings,
            now_s=hook.context.now_s,
        )
        why, attempt = chosen.why, None
        if (tripped := tripped_for(ledger, now.name, now.partitions)) and not passes:
            why = f"the breaker of {tripped} has tripped"
        elif chosen.step is RepairStep.TEST and refusal:
            why = f"it has to be tested first, and {refusal}"
        elif chosen.step is not None:
            attempt = _attempt(hook, kept, chosen.step, why if passes else faults)
        taken = tuple(repair.of_last_day(attempts, hook.context.now_s).get(kept.node, ()))
        if attempt is not None:
            attempts = repair.with_attempt(attempts, attempt)
        return msgspec.structs.replace(ledger, repairs=attempts), _Turn(
            ended=last, why=why, is_open=chosen.is_open, attempt=attempt, taken=taken
        )

    try:
        turn = shared.change_ledger(hook.site, change, _Turn)
        if turn.ended is not None and turn.ended.outcome is Outcome.FAILED:
            _report_failure(hook, turn.ended)
        if turn.attempt is None:
            if not turn.is_open:
                hook.log.info(f"{outcome}: {turn.why}")
        elif turn.attempt.outcome is Outcome.DRY_RUN:
            hook.log.info(f"dry run: {turn.attempt.step.value} would be next: {turn.why}")
        else:
            hook.log.info(f"repair: {turn.attempt.step.value}: {turn.why}")
            _begin(hook, kept, turn, failed)
    except StoreUnusable as err:
        hook.log.warning(f"{outcome}: {err}")
        return passes and not settings.test
    return turn.is_open


def _attempt(hook: Hook, kept: DrainRecord, step: RepairStep, text: str) -> RepairAttempt:
    settings, is_test = hook.site.repair, step is RepairStep.TEST
    limit_s = repair.STEP_LIMIT_S + (60 * settings.test_limit_min if is_test else 0.0)
    outcome = Outcome.DONE if step is RepairStep.ADMINISTRATOR else Outcome.BEGUN
    return RepairAttempt(
        node=kept.node,
        step=step,
        time_s=hook.context.now_s,
        drain=kept.reason,
        outcome=Outcome.DRY_RUN if settings.dry_run and not is_test else outcome,
        until_s=hook.context.now_s + limit_s,
        text=text,
    )


def _begin(hook: Hook, kept: DrainRecord, turn: _Turn, failed: Sequence[CheckResult]) -> None:
    attempt = turn.attempt
    assert attempt is not None
    if attempt.step is RepairStep.ADMINISTRATOR:
        lines = [f"check {result.name}: {result.finding.text}" for result in failed]
        lines += [
            f"{a.step.value} at {a.time_s:.0f}: {a.outcome.value}: {a.text}"
            for a in turn.taken
            if a.step is not RepairStep.ADMINISTRATOR
        ]
        evidence = (f"drained with: {kept.reason}", *lines)
        _send(hook, EventKind.ADMINISTRATOR, attempt.text or kept.reason, kept.retest, evidence)
        return
    try:
        if attempt.step is RepairStep.REBOOT:
            controller = hook.controller()
            why_not = why_not_ours(controller.node(kept.node), kept.reason)
            if not why_not:
                controller.reboot(kept.node, kept.reason)
                return
            save_attempt(hook.site, repair.with_outcome(attempt, Outcome.FAILED, why_not))
            hook.log.info(f"not repaired: {why_not}")
            return
        # A process of its own; if the address of one GPU is not known, all are reset.
        devices = [result.finding.devices for result in failed]
        buses = {bus: None for some in devices for bus in some} if all(devices) else {}
        words = [hook.site.path, msgspec.json.encode(attempt).decode(), *buses]
        argv = processes.own_module("slurm_health.node.repair", *words)
        processes.start_detached(argv, hook.environ)
    except (SlurmError, OSError) as err:
        why = f"it could not be begun: {err}"
        failure = repair.with_outcome(attempt, Outcome.FAILED, why)
        save_attempt(hook.site, failure)
        _report_failure(hook, failure)


def _report_failure(hook: Hook, failure: RepairAttempt) -> None:
    step = failure.step.value
    hook.log.warning(f"repair: {step} failed: {failure.text}")
    _send(hook, EventKind.STEP_FAILED, f"{step}: {failure.text}", (step,))


def _send(
    hook: Hook, kind: EventKind, text: str, checks: tuple[str, ...], evidence: tuple[str, ...] = ()
) -> None:
    event = NodeEvent(kind, hook.node, hook.context.now_s, text, checks=checks, evidence=evidence)
    notify.send(hook.site, event)


def save_attempt(site: Site, attempt: RepairAttempt) -> None:
    """Save how an attempt ended.

    Raises:
        StoreUnusable: it cannot be saved.
    """

    def change(ledger: DrainLedger) -> tuple[DrainLedger, None]:
        repairs = repair.with_attempt(ledger.repairs, attempt)
        return msgspec.structs.replace(ledger, repairs=repairs), None

    shared.change_ledger(site, change, type(None))


# --- the process that takes a step ---------------------------------------------------------------


def take(
    site: Site, attempt: RepairAttempt, devices: Collection[str], look: Callable[[], Gpus]
) -> RepairAttempt:
    """Reset GPUs that no process uses, or run the site's test; return how that ended.

    Args:
        site: the config file.
        attempt: what was begun.
        devices: the PCI addresses of the GPUs at fault; none for all.
        look: asks NVML.
    """
    try:
        if attempt.step is RepairStep.TEST:
            text = processes.run_for_site(site.repair.test, 60 * site.repair.test_limit_min)
            return repair.with_outcome(attempt, Outcome.DONE, text)
        gpus, wanted = look(), {address(bus) for bus in devices}
        chosen = [gpu for gpu in gpus.devices if not wanted or address(gpu.bus) in wanted]
        why = "" if chosen else "NVML shows no GPU"
        if missing := wanted - {address(gpu.bus) for gpu in chosen}:
            why = f"NVML shows no GPU at {', '.join(sorted(missing))}"
        if gpus.broken:
            why = f"the GPUs cannot be asked: {gpus.broken}"
        if why := why or next(filter(None, map(_why_not_reset, chosen)), ""):
            return repair.with_outcome(attempt, Outcome.FAILED, why)
        buses = ",".join(gpu.bus or str(gpu.index) for gpu in chosen)
        argv = [word.replace("{gpus}", buses) for word in site.repair.reset]
        text = processes.run_for_site(argv, repair.STEP_LIMIT_S)
        # Lines that the kernel wrote before the reset no longer count.
        if (now := CheckContext().boot_time()) is not None:
            state.save(site.state, returned=now)
    except processes.CommandFailed as err:
        return repair.with_outcome(attempt, Outcome.FAILED, str(err))
    return repair.with_outcome(attempt, Outcome.DONE, text)


def _why_not_reset(gpu: GpuDevice) -> str:
    """Return who uses a GPU, or why that is not known; or that its NVLinks are being joined."""
    if gpu.processes is None:
        why = gpu.lost or gpu.unanswered or "not supported"
        return f"GPU {gpu.index} does not report which processes use it: {why}"
    if gpu.processes:
        return f"GPU {gpu.index} is in use by PID {', '.join(map(str, gpu.processes))}"
    joins = gpu.fabric_state == "in progress"
    return f"GPU {gpu.index} is still joining the NVLink fabric" if joins else ""


def ask_nvml() -> Gpus:
    """Return this machine's GPUs, read in a child."""
    answer = run_one(lambda: msgspec.msgpack.encode(read_gpus()), _NVML_LIMIT_S)
    if isinstance(answer, Answered):
        return from_msgpack(answer.data, Gpus)
    return Gpus(broken=getattr(answer, "reason", f"no answer within {_NVML_LIMIT_S:g} s"))


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Take one step; return the exit code."""
    config, order, *devices = arguments
    site, attempt = load(Path(config)), from_json(order, RepairAttempt)

    with held(site.state / LOCK) as free:
        if not free:
            return 1
        try:
            controller = Client.for_hook(environ, limit_s=site.timing.slurm_s)
            why_not = why_not_ours(controller.node(attempt.node), attempt.drain)
        except SlurmError as err:
            why_not = f"Slurm cannot be asked: {err}"
        if why_not:
            ended = repair.with_outcome(attempt, Outcome.FAILED, why_not)
        else:
            ended = take(site, attempt, devices, ask_nvml)
        line = f"{attempt.step.value}: {ended.outcome.value}: {ended.text}"
        try:
            save_attempt(site, ended)
        except StoreUnusable as err:
            line += f" (not saved: {err})"
        send_line("warning", f"slurm-health: repair: node={attempt.node} {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
