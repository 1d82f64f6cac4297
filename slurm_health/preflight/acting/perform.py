# SPDX-License-Identifier: Apache-2.0
"""Carry out what was decided: record the intent, do it, record the result; leave last.

A requeue ends the process that performs it, so whatever is to be known afterwards is in the journal
and on the job before.
"""

from __future__ import annotations

import logging
import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec

from slurm_health.node.drain import Cause, DrainStatus, drain_node
from slurm_health.node.site import load
from slurm_health.preflight import config
from slurm_health.preflight.acting.job_facts import cause, read_facts
from slurm_health.preflight.acting.release_elsewhere import Move, helper_name
from slurm_health.preflight.decide.decide import Decision, Drain, decide, decide_unasked, unwanted
from slurm_health.preflight.decide.facts import (
    JobFacts,
    leaving_note,
    own_comment,
    submit_without,
    with_own_comment,
)
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records.errors import ConfigError, SlurmError
from slurm_health.records.nodeset import fold
from slurm_health.records.records import (
    Action,
    ActionDone,
    ActionIntended,
    Disposition,
    JobOutcome,
    Record,
    RunStarted,
    VerdictReached,
)
from slurm_health.system.processes import own_command
from slurm_health.system.slurm.client import Client
from slurm_health.system.slurm.command import clean_environ

log = logging.getLogger(__name__)

RecordAppender = Callable[[Record], None]
# The ten minutes of `release_elsewhere.PENDING_S`, and as long as its tries may take.
HELPER_MINUTES = 15
HELPER_MEMORY_MB = 100


@dataclass(frozen=True, kw_only=True)
class Acting:
    """For which run, and by what means, a verdict is acted on.

    `started` began the run, whose journal is in `directory`; `append` writes there. `environ` is
    that of this process, whose user is `uid`. A user who may drain does so as root's hooks do, by
    the rules of the config file.
    """

    started: RunStarted
    directory: Path
    policy: Policy
    environ: Mapping[str, str]
    append: RecordAppender
    uid: int = field(default_factory=os.getuid)
    clock: Callable[[], float] = time.time

    @cached_property
    def client(self) -> Client:
        """Slurm, for the user whose job it is."""
        return Client(self.environ)

    @property
    def job(self) -> str:
        """What Slurm's commands call the job."""
        return self.started.slurm_name


def act(verdict: VerdictReached, acting: Acting) -> JobOutcome:
    """Act on the verdict of a run; return what becomes of the job.

    When the job is requeued, this process is ended by Slurm shortly after the return.

    Raises:
        JournalError: an intent or a result cannot be recorded; nothing is done unrecorded.
    """
    batch_node = acting.started.master_node
    facts = JobFacts(job_id=acting.started.job_id, batch_node=batch_node)
    avoid = unwanted(verdict, acting.policy, batch_node=batch_node)
    if avoid:  # if all is well there is nothing to ask Slurm about
        try:
            facts = read_facts(
                acting.policy,
                started=acting.started,
                directory=acting.directory,
                client=acting.client,
                uid=acting.uid,
            )
        except SlurmError as err:
            return decide_unasked(verdict, avoid, str(err))
    performer = _Performer(acting, verdict, facts)
    decision = decide(verdict, acting.policy, facts)
    for drain in decision.drain:
        performer.drain(drain)
    nodes, why = decision.left_alone
    if nodes:
        log.warning("%s is not drained: %s", fold(nodes), why)
        performer.done(Action.DRAIN, nodes, problem=why)
    problem = performer.give_back(decision)
    if problem:
        decision = decide(verdict, acting.policy, replace(facts, cannot_drop=problem))
    if decision.outcome.disposition is Disposition.REQUEUE:
        return performer.requeue(decision)
    return performer.going_on(decision.outcome)


@dataclass(frozen=True)
class _Performer:
    """Carries out what is decided about one verdict."""

    acting: Acting
    verdict: VerdictReached
    facts: JobFacts

    def drain(self, drain: Drain) -> None:
        """Drain a node by the site's rules, and record what came of it."""
        self._intend(Action.DRAIN, (drain.node,), drain.reason)
        cause = Cause(
            checks=(drain.component,),
            text=drain.reason,
            job=self.facts.job_id,
            uid=self.acting.uid,
            hook="check",
        )
        try:
            site = load(config.site_file(self.acting.environ))
        except ConfigError as err:
            problem = f"the site's rules for drains cannot be read: {err}"
        else:
            result = drain_node(
                site, drain.node, cause, controller=self.acting.client, now_s=self.acting.clock()
            )
            problem = "" if result.status is DrainStatus.DRAINED else result.text
        self.done(Action.DRAIN, (drain.node,), problem=problem)
        if problem:
            log.warning("%s is not drained: %s", drain.node, problem)
        else:
            log.warning("drained %s: %s", drain.node, drain.reason)

    def give_back(self, decision: Decision) -> str:
        """Give nodes back as decided; return what stood in the way, empty for nothing."""
        drop, reason = decision.drop
        if not drop:
            return ""
        self._intend(Action.DROP, drop, reason)
        problem = self._shrunk_to((*decision.outcome.nodes, *decision.outcome.spares), drop)
        self.done(Action.DROP, drop, problem=problem)
        if problem:
            log.warning("could not give %s back: %s", fold(drop), problem)
        return problem

    def _shrunk_to(self, keep: Sequence[str], drop: Sequence[str]) -> str:
        """Let the job go on with these nodes; return what stood in the way, if anything did."""
        refusal = ""
        try:
            before = self.acting.client.job(self.acting.job).nodes
            if before and set(before).isdisjoint(drop):
                return ""  # Slurm lost them, and took them out of the job itself
            self.acting.client.shrink(self.acting.job, keep, self.acting.directory)
        except SlurmError as err:
            refusal = str(err)
        try:
            # Asked whatever the answer was: Slurm 24.11 drops the nodes of a job with
            # --ntasks-per-gpu, and answers that it cannot.
            held = self.acting.client.job(self.acting.job).nodes
        except SlurmError as err:
            return refusal or str(err)
        if set(held) == set(keep):
            return ""
        return refusal or f"the job holds {fold(held)} afterwards"

    def going_on(self, outcome: JobOutcome) -> JobOutcome:
        """Return the outcome of a job that stays, with its nodes if there are fewer than wanted.

        Slurm 22.05 gives a job that was made smaller while it waited its earlier task count.
        """
        nodes = [node.node for node in self.verdict.nodes]
        wanted = self.acting.policy.nodes_wanted
        fewer = wanted is not None and len(nodes) < wanted
        if outcome.nodes or not fewer or outcome.disposition is not Disposition.PROCEED:
            return outcome
        return msgspec.structs.replace(outcome, nodes=nodes)

    def requeue(self, decision: Decision) -> JobOutcome:
        """Requeue the job without some nodes; a job that cannot be requeued stays, or stops."""
        leave, reason, acting = decision.leave, decision.outcome.reason, self.acting
        self._intend(Action.EXCLUDE, leave, reason)
        try:
            comment = own_comment(acting.client.comment(acting.job))
            move = Move(
                job=acting.job,
                attempt=acting.started.attempt,
                exclude=tuple(dict.fromkeys((*leave, *self.facts.left_behind))),
                comment=comment,
                least=acting.policy.nodes_needed,
                leave=tuple(leave),
                reason=reason,
            )
            helper_id = self._submit_helper(move)
        except SlurmError as err:
            self.done(Action.EXCLUDE, (), problem=str(err))
            return self._refused(decision, f"could not submit the helper job: {cause(err)}")
        self.done(Action.EXCLUDE, leave, detail=f"by the helper job {helper_id}")
        note = leaving_note(acting.job, leave, self.facts.excluded, reason)
        self._set_comment(with_own_comment(note, comment))
        self._intend(Action.REQUEUE, (), reason)
        log.warning("requeueing job %s without %s: %s", acting.job, fold(leave), reason)
        outcome = msgspec.structs.replace(decision.outcome, reason=f"{fold(leave)}: {reason}")
        acting.append(outcome)
        try:
            acting.client.requeue_held(acting.job)
        except SlurmError as err:
            self.done(Action.REQUEUE, (), problem=str(err))
            self._set_comment(comment)
            try:
                acting.client.cancel(helper_id)
            except SlurmError as again:  # it gives up by itself
                log.warning("could not cancel helper job %d: %s", helper_id, again)
            return self._refused(decision, f"the requeue was refused: {err}")
        return outcome

    def _submit_helper(self, move: Move) -> int:
        """Submit the job that releases this one, or find that of an interrupted master.

        Raises:
            SlurmError: it was refused, or Slurm does not answer.
        """
        acting, facts = self.acting, self.facts
        name = helper_name(facts.job_id, move.attempt)
        if present := acting.client.jobs_named(name, acting.uid):
            return present[0]
        # One small task beside the job, not on a bad node; on several, Slurm wants one on each.
        nodes, directory = facts.least_there, acting.directory
        arguments = [
            f"--job-name={name}",
            f"--nodes={nodes}",
            f"--ntasks={nodes}",
            f"--mem={HELPER_MEMORY_MB}M",
            f"--time={min(HELPER_MINUTES, facts.longest_there_min or HELPER_MINUTES)}",
            "--no-requeue",
            f"--exclude={fold((*move.exclude, *self._kept_off()))}",
            f"--chdir={directory}",
            f"--output={directory / 'requeue.log'}",
            *(f"--{option}={value}" for option, value in facts.placement.items()),
        ]
        encoded = msgspec.json.encode(move).decode()
        command = own_command("requeue-helper", f"--directory={directory}", f"--move={encoded}")
        script = f"#!/bin/sh\nexec {shlex.join(command)}\n"
        return acting.client.submit(arguments, script, clean_environ(acting.environ))

    def _kept_off(self) -> Sequence[str]:
        """Return nodes of the job that its helper must not run on: all, or none.

        The job starts where the helper ends. On a Slurm whose nodes forget an ended attempt late
        (`Client.forgets_late`), those that had one are left to the job, if the helper can start on
        others at once. In a reservation it is not known to be able to.
        """
        elsewhere = len(self.facts.idle) >= self.facts.least_there
        if not elsewhere or "reservation" in self.facts.placement:
            return ()
        if not self.acting.client.forgets_late():
            return ()
        return [node.node for node in self.verdict.nodes]

    def _refused(self, decision: Decision, problem: str) -> JobOutcome:
        """Return the outcome of a job that cannot be requeued."""
        leave, reason = decision.leave, decision.outcome.reason
        if decision.may_stay:
            why = f"could not move the job off {fold(leave)}: {problem}; continuing anyway"
            disposition = Disposition.PROCEED
        else:
            why = f"{problem}; {submit_without(leave, self.facts)}"
            reason = f"{fold(leave)} cannot be used: {reason}"
            disposition = Disposition.STOP
        outcome = msgspec.structs.replace(
            decision.outcome, disposition=disposition, reason=f"{reason}; {why}"
        )
        return self.going_on(outcome)

    def _set_comment(self, text: str) -> None:
        try:
            self.acting.client.update_job(self.acting.job, Comment=text)
        except SlurmError as err:
            log.warning("could not set the comment of job %s to %r: %s", self.acting.job, text, err)

    def _intend(self, action: Action, nodes: Sequence[str], reason: str) -> None:
        self.acting.append(ActionIntended(action=action, nodes=list(nodes), reason=reason))

    def done(
        self, action: Action, nodes: Sequence[str], *, problem: str = "", detail: str = ""
    ) -> None:
        """Record how an act ended."""
        self.acting.append(
            ActionDone(
                action=action, succeeded=not problem, nodes=list(nodes), detail=problem or detail
            )
        )
