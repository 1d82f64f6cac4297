# SPDX-License-Identifier: Apache-2.0
"""Repairs a drained node by the steps that its site allows, and tests it before it returns.

The health check asks what is next and begins it; a reset of GPUs and the site's test take minutes,
so they are a process of their own: `... -m slurm_health.node.repair FILE ATTEMPT [GPU]...`. Nothing
is done to a node that an administrator has drained, whose note was edited, or on which a job runs.
Checks take tens of seconds, and an administrator does not wait for them, so Slurm is asked again
right before anything is done.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from slurm_health.node import notify, shared, state
from slurm_health.node.checks.check import CheckContext
from slurm_health.node.notify import EventKind, NodeEvent
from slurm_health.node.rules import drain_note, repair
from slurm_health.node.rules.breaker import DrainLedger, tripped_for
from slurm_health.node.rules.finding import CheckResult
from slurm_health.node.rules.kernel_lines import address
from slurm_health.node.rules.recovery import DrainRecord
from slurm_health.node.rules.repair import Gate, Outcome, RepairAttempt, RepairStep
from slurm_health.node.shared import StoreUnusable
from slurm_health.node.site import Site, load
from slurm_health.node.store import held
from slurm_health.records.decoding import from_json, from_msgpack
from slurm_health.records.errors import SlurmError, Unmeasured
from slurm_health.records.text import cut, one_line
from slurm_health.system import SYSTEM_PATH, processes
from slurm_health.system.killable import Answered, run_one
from slurm_health.system.nvml import Gpus, read_gpus
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.parsing import Node
from slurm_health.system.telemetry import send_line

# In root's directory on the node; held while a step is taken.
LOCK = "repair.lock"
_NVML_LIMIT_S = 60.0
_SHOWN = 300
# The end of a command's output: a test of hours may print all the while.
_LAST_BYTES = 4096
# The states of a node that waits only for repair; CLOUD and DYNAMIC name its kind.
_IDLE = frozenset({"IDLE", "DRAIN", "CLOUD", "DYNAMIC_NORM"})
# Behind the word of a state: down, rebooting, powered down, in maintenance.
MARKS = "*@^$~!%#"
_AWAY = ("DOWN", "REBOOT", "NOT_RESP", "POWER")


class StepRefused(Exception):
    """A step must not be taken, or failed; the text says why."""


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


# --- attempts, in the ledger that all nodes share ------------------------------------------------


def read_attempts(site: Site) -> tuple[RepairAttempt, ...]:
    """Return the attempts on all nodes, read in a child.

    Raises:
        StoreUnusable: they cannot be read, so nothing may be done.
    """
    kind = tuple[RepairAttempt, ...]
    return shared.in_child(site, lambda: shared.read_ledger(site.breaker).repairs, kind)


def save_attempt(site: Site, attempt: RepairAttempt) -> None:
    """Save an attempt, or how it ended.

    Raises:
        StoreUnusable: it cannot be saved.
    """

    def change(ledger: DrainLedger) -> tuple[DrainLedger, None]:
        repairs = repair.with_attempt(ledger.repairs, attempt)
        return msgspec.structs.replace(ledger, repairs=repairs), None

    shared.change_ledger(site, change, type(None))


def _ended(attempt: RepairAttempt, outcome: Outcome, text: str) -> RepairAttempt:
    return msgspec.structs.replace(attempt, outcome=outcome, text=text)


# --- what the health check of a drained node does ------------------------------------------------


class Repairs:
    """The repairs of one health check: of its node, and of nodes that are not back from a reboot.

    Args:
        site: the config file.
        node: this node.
        context: of the health check.
        log: writes a text at a level into the log.
        controller: returns a client of slurmctld.
    """

    def __init__(
        self,
        site: Site,
        node: str,
        context: CheckContext,
        *,
        log: Callable[[str, str], None],
        controller: Callable[[], Client],
    ) -> None:
        self._site = site
        self._node = node
        self._environ = context.environ
        self._now_s = context.now_s
        self._log = log
        self._controller = controller

    def consider(self, kept: DrainRecord, now: Node, failed: Sequence[CheckResult]) -> None:
        """Take the next step for a node that we have drained and that is still faulty.

        Args:
            kept: the record of its drain.
            now: the node in Slurm.
            failed: the faults that its checks have just measured; empty if no check can clear it.
        """
        if why_not := why_not_ours(now, kept.reason):
            self._log("info", f"not repaired: {why_not}")
            return
        try:
            self.end_last(kept, failed)
            why, attempt = self._reserve(kept, now, failed)
            if attempt is None:
                self._log("info", f"not repaired: {why}")
            elif attempt.outcome is Outcome.DRY_RUN:
                self._log("info", f"dry run: {attempt.step.value} would be next: {why}")
            else:
                self._log("info", f"repair: {attempt.step.value}: {why}")
                self._begin(kept, attempt, failed)
        except StoreUnusable as err:
            self._log("warning", f"not repaired: {err}")

    def _reserve(
        self, kept: DrainRecord, now: Node, failed: Sequence[CheckResult]
    ) -> tuple[str, RepairAttempt | None]:
        """Choose a step and count it before it is taken, so that no two nodes take the last one.

        Return why it is that step; why none is taken, without one.
        """
        settings = self._site.repair
        first = repair.first_step(failed, settings)
        texts = "; ".join(result.finding.text for result in failed)
        outcome = Outcome.DRY_RUN if settings.dry_run else Outcome.BEGUN

        def change(ledger: DrainLedger) -> tuple[DrainLedger, tuple[str, RepairAttempt | None]]:
            tripped = tripped_for(ledger, now.name, now.partitions)
            if tripped is not None:
                return ledger, (f"the breaker of {tripped} has tripped", None)
            chosen = repair.next_repair(
                first,
                ledger.repairs,
                node=kept.node,
                drain=kept.reason,
                settings=settings,
                now_s=self._now_s,
            )
            if chosen.step is None:
                return ledger, (chosen.why, None)
            attempt = self._attempt(kept, chosen.step, texts, outcome)
            repairs = repair.with_attempt(ledger.repairs, attempt)
            return msgspec.structs.replace(ledger, repairs=repairs), (chosen.why, attempt)

        return shared.change_ledger(self._site, change, tuple[str, RepairAttempt | None])

    def _begin(
        self, kept: DrainRecord, attempt: RepairAttempt, failed: Sequence[CheckResult]
    ) -> None:
        if attempt.step is RepairStep.ADMINISTRATOR:
            text = "; ".join(result.finding.text for result in failed) or kept.reason
            lines = [f"check {result.name}: {result.finding.text}" for result in failed]
            self._call_administrator(kept, text, lines)
            save_attempt(self._site, msgspec.structs.replace(attempt, outcome=Outcome.DONE))
            return
        if attempt.step is RepairStep.RESET:
            devices = [result.finding.devices for result in failed]
            # If one is not known, all GPUs are reset.
            buses = {bus: None for some in devices for bus in some} if all(devices) else {}
            self._start(attempt, tuple(buses))
            return
        controller = self._controller()
        try:
            why_not = why_not_ours(controller.node(kept.node), kept.reason)
            if not why_not:
                controller.reboot(kept.node, kept.reason)
                return
        except SlurmError as err:
            self._fail(attempt, f"it could not be begun: {err}")
            return
        save_attempt(self._site, _ended(attempt, Outcome.FAILED, why_not))
        self._log("info", f"not repaired: {why_not}")

    def _start(self, attempt: RepairAttempt, devices: tuple[str, ...]) -> None:
        """Start the process that takes a step."""
        words = [self._site.path, msgspec.json.encode(attempt).decode(), *devices]
        argv = processes.own_module("slurm_health.node.repair", *words)
        try:
            processes.start_detached(argv, self._environ)
        except OSError as err:
            self._fail(attempt, f"it could not be begun: {err}")

    def end_last(self, kept: DrainRecord, failed: Sequence[CheckResult]) -> None:
        """Save how the last step ended: a reboot is over, or the fault is still there.

        Args:
            kept: the record of the node's drain.
            failed: the faults that its checks have just measured; none if they pass.

        Raises:
            StoreUnusable: it cannot be saved.
        """
        last = repair.unfinished(read_attempts(self._site), kept.node, kept.reason)
        if last is None:
            return
        # A reboot is over when Slurm has the node back, idle, as it has now.
        is_reboot = last.step is RepairStep.REBOOT
        is_over = last.outcome is Outcome.DONE or is_reboot
        if not failed:
            if last.outcome is Outcome.BEGUN and is_reboot:
                save_attempt(self._site, _ended(last, Outcome.DONE, "it is back"))
        elif is_over or self._now_s >= last.until_s:
            texts = "; ".join(result.finding.text for result in failed)
            self._fail(
                last, f"the fault is still there: {texts}" if is_over else "it did not end in time"
            )

    def may_return(self, kept: DrainRecord, now: Node) -> bool:
        """Return whether a node that passes its checks may return to service; test it first if not.

        Without a test in `[repair]` it may. A test that fails makes the node an administrator's.
        """
        settings = self._site.repair
        if not settings.test or not now.drained or drain_note.unsigned(now.reason) != kept.reason:
            return True
        try:
            attempts = read_attempts(self._site)
            gate, last = repair.gate(
                attempts, node=kept.node, drain=kept.reason, settings=settings, now_s=self._now_s
            )
            if gate is Gate.OPEN:
                return True
            if gate is Gate.TESTING:
                self._log("info", "not released: the test of [repair] is running")
            elif gate is Gate.TEST_FAILED and last is not None:
                why = last.text if last.outcome is Outcome.FAILED else "it did not end, twice"
                why = f"the test of [repair] failed: {why}"
                self._log("warning", f"not released: {why}")
                call = self._attempt(kept, RepairStep.ADMINISTRATOR, why, Outcome.DONE)
                if not any((a.drain, a.step) == (call.drain, call.step) for a in attempts):
                    save_attempt(self._site, call)
                    self._call_administrator(kept, why, [])
            elif why_not := why_not_ours(now, kept.reason):
                self._log("info", f"not released: it has to be tested first, and {why_not}")
            else:
                why = "before it returns to service"
                test = self._attempt(kept, RepairStep.TEST, why, Outcome.BEGUN)
                save_attempt(self._site, test)
                self._log("info", "its checks pass: the test of [repair] begins")
                self._start(test, ())
        except StoreUnusable as err:
            self._log("warning", f"not released: whether it passed its test is not known: {err}")
        return False

    def _attempt(
        self, kept: DrainRecord, step: RepairStep, text: str, outcome: Outcome
    ) -> RepairAttempt:
        test_s = 60 * self._site.repair.test_limit_min if step is RepairStep.TEST else 0.0
        return RepairAttempt(
            node=kept.node,
            step=step,
            time_s=self._now_s,
            drain=kept.reason,
            outcome=outcome,
            until_s=self._now_s + test_s + repair.STEP_LIMIT_S,
            text=text,
        )

    def report_missing(self) -> None:
        """Notify of nodes that are not back in time from a reboot."""
        try:
            overdue = [
                attempt
                for attempt in read_attempts(self._site)
                if attempt.outcome is Outcome.BEGUN
                and attempt.step is RepairStep.REBOOT
                and self._now_s > attempt.until_s
            ]
            nodes = self._controller().nodes() if overdue else {}
            for late in overdue:
                now = nodes.get(late.node)  # one that Slurm no longer has is not back either
                if now is not None and not (
                    any(word.startswith(_AWAY) for word in now.states) or "*" in now.state
                ):
                    save_attempt(self._site, _ended(late, Outcome.DONE, "it is back"))
                    continue
                why = f"{late.node} is not back from its reboot"
                save_attempt(self._site, _ended(late, Outcome.FAILED, why))
                self._log("warning", f"repair: {why}")
                names, lines = (late.step.value,), (f"drained with: {late.drain}",)
                for kind in (EventKind.STEP_FAILED, EventKind.ADMINISTRATOR):
                    event = NodeEvent(
                        kind, late.node, self._now_s, why, checks=names, evidence=lines
                    )
                    notify.send(self._site, event)
        except (SlurmError, StoreUnusable) as err:
            text = f"nodes that reboot could not be looked up: {err}"
            self._log("warning", text)

    def _fail(self, attempt: RepairAttempt, why: str) -> None:
        save_attempt(self._site, _ended(attempt, Outcome.FAILED, why))
        self._log("warning", f"repair: {attempt.step.value} failed: {why}")
        step = attempt.step.value
        failed = NodeEvent(
            EventKind.STEP_FAILED, self._node, self._now_s, f"{step}: {why}", checks=(step,)
        )
        notify.send(self._site, failed)

    def _call_administrator(self, kept: DrainRecord, text: str, lines: Sequence[str]) -> None:
        """Send the drain, the faults and the steps of a node."""
        steps = repair.of_last_day(read_attempts(self._site), self._now_s).get(kept.node, [])
        taken = [
            f"{attempt.step.value} at {attempt.time_s:.0f}: {attempt.outcome.value}: {attempt.text}"
            for attempt in steps
            if attempt.step is not RepairStep.ADMINISTRATOR
        ]
        evidence = (f"drained with: {kept.reason}", *lines, *taken)
        kind, checks = EventKind.ADMINISTRATOR, kept.retest
        event = NodeEvent(kind, self._node, self._now_s, text, checks=checks, evidence=evidence)
        notify.send(self._site, event)


# --- the process that takes a step ---------------------------------------------------------------


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
        return _ended(attempt, Outcome.FAILED, refusal)
    try:
        if attempt.step is RepairStep.TEST:
            text = _run(site.repair.test, 60 * site.repair.test_limit_min)
        else:
            buses = ",".join(_free_gpus(look(), devices))
            argv = [word.replace("{gpus}", buses) for word in site.repair.reset]
            text = _run(argv, repair.STEP_LIMIT_S)
            # Lines that the kernel wrote before the reset no longer count.
            with contextlib.suppress(OSError, Unmeasured):
                place = CheckContext(now_s=time.time(), state=site.state)
                state.save_return(site.state, place.boot_time())
    except StepRefused as err:
        return _ended(attempt, Outcome.FAILED, str(err))
    return _ended(attempt, Outcome.DONE, text)


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
    """Return this machine's GPUs, read in a child.

    Raises:
        StepRefused: NVML does not answer.
    """
    answer = run_one(lambda: msgspec.msgpack.encode(read_gpus()), _NVML_LIMIT_S)
    if isinstance(answer, Answered):
        return from_msgpack(answer.data, Gpus)
    why = getattr(answer, "reason", f"no answer within {_NVML_LIMIT_S:g} s")
    raise StepRefused(f"the GPUs cannot be asked: {why}")


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
    # Tests print what is wrong at the end.
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

    with held(site.state / LOCK) as free:
        if not free:
            return 1
        ended = take(site, attempt, devices, why_not=why_not, look=ask_nvml)
        line = f"{attempt.step.value}: {ended.outcome.value}: {ended.text}"
        try:
            save_attempt(site, ended)
        except StoreUnusable as err:
            line += f" (not saved: {err})"
        send_line("warning", f"slurm-health: repair: node={attempt.node} {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
