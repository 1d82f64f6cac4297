# SPDX-License-Identifier: Apache-2.0
"""Carry out what was decided: record the intent, do it, record the result; leave last.

A requeue and a hold end the process that performs them, so whatever is to be known afterwards is in
the journal and on the job before.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slurm_health.node.drain import Cause, DrainStatus, drain_node
from slurm_health.node.site import load
from slurm_health.preflight import config
from slurm_health.preflight.acting.job_facts import cause, kept_off, read_case
from slurm_health.preflight.acting.requeue_helper import Helper, Move
from slurm_health.preflight.decide.decide import Case, decide
from slurm_health.preflight.decide.decision import Decision, Drain, Ending, LeaveAlone, Shrink
from slurm_health.preflight.decide.facts import (
    JobFacts,
    leaving_note,
    own_comment,
    waiting_note,
    with_own_comment,
)
from slurm_health.preflight.decide.policy import Policy
from slurm_health.records import records
from slurm_health.records.errors import ConfigError, SlurmError
from slurm_health.records.nodeset import fold
from slurm_health.system.processes import own_command
from slurm_health.system.slurm.client import Client

log = logging.getLogger(__name__)

RecordAppender = Callable[[records.Record], None]


@dataclass(frozen=True, kw_only=True)
class Acting:
    """For which run, and by what means, a verdict is acted on.

    `started` began the run, whose journal is in `directory`; `append` writes there. Whoever may
    drain does so as root's hooks do, by the rules of `site_file`; `uid` is this process's user.
    """

    started: records.RunStarted
    directory: Path
    policy: Policy
    client: Client
    uid: int
    append: RecordAppender
    helper: Helper
    site_file: Path
    clock: Callable[[], float] = time.time

    @classmethod
    def as_owner(
        cls,
        started: records.RunStarted,
        directory: Path,
        policy: Policy,
        environ: Mapping[str, str],
        append: RecordAppender,
    ) -> Acting:
        """Return how this process acts, for the user whose job it is in."""
        helper = Helper(
            command=own_command("requeue-helper"),
            directory=directory,
            environ=environ,
            uid=os.getuid(),
        )
        return cls(
            started=started,
            directory=directory,
            policy=policy,
            client=Client(environ),
            uid=os.getuid(),
            append=append,
            helper=helper,
            site_file=config.site_file(environ),
        )

    @property
    def job(self) -> str:
        """What Slurm's commands call the job."""
        return self.started.slurm_name


def act(verdict: records.VerdictReached, acting: Acting) -> records.RunFinished:
    """Act on the verdict of a run; return how it ends.

    When the job is requeued, this process is ended by Slurm shortly after the return.

    Raises:
        JournalError: an intent or a result cannot be recorded; nothing is done unrecorded.
    """
    case = read_case(
        verdict,
        acting.policy,
        started=acting.started,
        directory=acting.directory,
        client=acting.client,
        uid=acting.uid,
        clock=acting.clock,
    )
    if isinstance(case, Ending):
        return case.recorded()
    return _Performer(acting, case).perform(decide(case))


@dataclass(frozen=True)
class _Performer:
    """Carries out what is decided about one case."""

    acting: Acting
    case: Case

    @property
    def facts(self) -> JobFacts:
        """What is known of the job."""
        return self.case.facts

    def perform(self, decision: Decision) -> records.RunFinished:
        """Drain, make the job smaller, and end; return how."""
        for each in decision.drains:
            match each:
                case Drain():
                    self._drain(each)
                case LeaveAlone(nodes=nodes, reason=reason):
                    log.warning("%s is not drained: %s", fold(nodes), reason)
                    self._done(records.Action.DRAIN, nodes, problem=reason)
        if decision.shrink is not None:
            return self._shrink(decision.shrink, decision.ending)
        ending = decision.ending
        match ending.disposition:
            case records.Disposition.REQUEUE:
                return self._requeue(ending)
            case records.Disposition.HOLD:
                return self._hold(ending)
            case records.Disposition.PROCEED:
                return self._proceed(ending)
            case records.Disposition.STOP:
                return ending.recorded()

    def _proceed(self, ending: Ending) -> records.RunFinished:
        """Go on with all nodes that were checked."""
        nodes = [node.node for node in self.case.verdict.nodes]
        wanted = self.case.policy.nodes_wanted
        # Slurm 22.05 gives a job that was made smaller while it waited its earlier task count.
        smaller = wanted is not None and len(nodes) < wanted
        return ending.recorded(nodes=nodes if smaller else ())

    def _stay(self, ending: Ending, problem: str) -> records.RunFinished:
        """Go on with nodes that the job would leave, and cannot."""
        nodes = fold(ending.nodes)
        left = f"could not move the job off {nodes}: {problem}; continuing anyway"
        if self.facts.held_for.issuperset(ending.nodes):
            left += f": it was held for {nodes}, and a person released it"
        reason = f"{ending.reason}; {left}"
        return self._proceed(
            replace(ending, disposition=records.Disposition.PROCEED, reason=reason)
        )

    def _drain(self, drain: Drain) -> None:
        self._intend(records.Action.DRAIN, (drain.node,), drain.reason)
        cause = Cause(
            checks=(drain.component,),
            text=drain.reason,
            job=self.facts.job_id,
            uid=self.acting.uid,
            hook="check",
        )
        try:
            site = load(self.acting.site_file)
        except ConfigError as err:
            problem = f"the site's rules for drains cannot be read: {err}"
        else:
            result = drain_node(
                site, drain.node, cause, controller=self.acting.client, now_s=self.acting.clock()
            )
            problem = "" if result.status is DrainStatus.DRAINED else result.text
        self._done(records.Action.DRAIN, (drain.node,), problem=problem)
        if problem:
            log.warning("%s is not drained: %s", drain.node, problem)
        else:
            log.warning("drained %s: %s", drain.node, drain.reason)

    def _shrink(self, shrink: Shrink, ending: Ending) -> records.RunFinished:
        """Give nodes back; a job that cannot leaves faulty ones in another way, or stops."""
        if not shrink.drop:
            return ending.recorded(nodes=shrink.keep, spares=shrink.spares)
        nodes = fold(shrink.drop)
        self._intend(records.Action.DROP, shrink.drop, shrink.reason)
        problem = self._given_back(shrink)
        self._done(records.Action.DROP, shrink.drop, problem=problem)
        if problem:
            log.warning("could not give %s back: %s", nodes, problem)
        if problem and ending.may_stay:
            return self._proceed(ending)
        if problem:  # what is to be drained has been
            instead = decide(self.case.keeping_all(problem))
            return self.perform(replace(instead, drains=()))
        reason = f"continuing on {fold(shrink.keep)}, without {nodes}: {shrink.reason}"
        return replace(ending, reason=reason).recorded(nodes=shrink.keep, spares=shrink.spares)

    def _given_back(self, shrink: Shrink) -> str:
        """Give nodes back; return what stood in the way, empty if the job has what it keeps."""
        refusal = ""
        held_on = (*shrink.keep, *shrink.spares)
        try:
            before = self.acting.client.job(self.acting.job).nodes
            if before and set(before).isdisjoint(shrink.drop):
                return ""  # Slurm lost them, and took them out of the job itself
            self.acting.client.shrink(self.acting.job, held_on, self.acting.directory)
        except SlurmError as err:
            refusal = str(err)
        try:
            # Asked whatever the answer was: Slurm 24.11 drops the nodes of a job with
            # --ntasks-per-gpu, and answers that it cannot.
            held = self.acting.client.job(self.acting.job).nodes
        except SlurmError as err:
            return refusal or str(err)
        if set(held) == set(held_on):
            return ""
        return refusal or f"the job holds {fold(held)} afterwards"

    def _requeue(self, ending: Ending) -> records.RunFinished:
        """Requeue the job without some nodes.

        Where no helper can be had, a job that has to leave waits for a person; another stays, and
        so does one that a person has released because of these nodes.
        """
        self._intend(records.Action.EXCLUDE, ending.nodes, ending.reason)
        try:
            comment = own_comment(self.acting.client.comment(self.acting.job))
            move = Move(
                job=self.acting.job,
                attempt=self.acting.started.attempt,
                exclude=tuple(dict.fromkeys((*ending.nodes, *self.facts.left_behind))),
                comment=comment,
                least=self.acting.policy.nodes_needed,
                keep_size=ending.keep_size,
            )
            client = self.acting.client
            helper_id = self.acting.helper.ensure_submitted(
                client,
                move,
                job_id=self.facts.job_id,
                placement=self.facts.placement,
                nodes=self.facts.least_there,
                avoid=kept_off(
                    self.acting.job, client, self.facts.room, nodes=self.facts.least_there
                ),
            )
        except SlurmError as err:
            self._done(records.Action.EXCLUDE, (), problem=str(err))
            if ending.may_stay:
                return self._stay(ending, str(err))
            reason = f"could not submit the helper job: {cause(err)}; {ending.reason}"
            return self._hold(replace(ending, disposition=records.Disposition.HOLD, reason=reason))
        self._done(records.Action.EXCLUDE, ending.nodes, detail=f"by the helper job {helper_id}")
        self._annotate(ending, comment)
        self._intend(records.Action.REQUEUE, (), ending.reason)
        nodes = fold(ending.nodes)
        log.warning("requeueing job %s without %s: %s", self.acting.job, nodes, ending.reason)
        finished = replace(ending, reason=f"{nodes}: {ending.reason}").recorded()
        problem = self._leave(records.Action.REQUEUE, finished, comment)
        if not problem:
            return finished
        self.acting.helper.withdraw(self.acting.client, helper_id)
        return self._stay(ending, problem) if ending.may_stay else _refused(ending, problem)

    def _hold(self, ending: Ending) -> records.RunFinished:
        """Requeue and hold the job, with a comment that says why and what to do."""
        self._intend(records.Action.HOLD, ending.nodes, ending.reason)
        comment = ""
        try:
            comment = own_comment(self.acting.client.comment(self.acting.job))
        except SlurmError as err:
            log.warning("could not read the comment of job %s: %s", self.acting.job, err)
        self._annotate(ending, comment)
        what_to_do = f"see the comment of the job: scontrol show job {self.acting.job}"
        log.warning("holding job %s: %s; %s", self.acting.job, ending.reason, what_to_do)
        finished = replace(ending, reason=f"{ending.reason}; {what_to_do}").recorded()
        problem = self._leave(records.Action.HOLD, finished, comment)
        return _refused(ending, problem) if problem else finished

    def _annotate(self, ending: Ending, comment: str) -> None:
        """Say on the job why it is held and what to do. It moves without that too, if need be."""
        held = ending.disposition is records.Disposition.HOLD
        note = waiting_note if held else leaving_note
        text = note(self.acting.job, ending.nodes, self.facts.excluded, ending.reason)
        self._set_comment(with_own_comment(text, comment))

    def _leave(self, action: records.Action, finished: records.RunFinished, comment: str) -> str:
        """Requeue and hold the job; return what stood in the way, with the job as it was before."""
        self.acting.append(finished)
        try:
            self.acting.client.requeue_held(self.acting.job)
        except SlurmError as err:
            self._done(action, (), problem=str(err))
            self._set_comment(comment)
            return str(err)
        return ""

    def _set_comment(self, text: str) -> None:
        try:
            self.acting.client.update_job(self.acting.job, Comment=text)
        except SlurmError as err:
            log.warning("could not set the comment of job %s to %r: %s", self.acting.job, text, err)

    def _intend(self, action: records.Action, nodes: Sequence[str], reason: str) -> None:
        self.acting.append(records.ActionIntended(action=action, nodes=list(nodes), reason=reason))

    def _done(
        self, action: records.Action, nodes: Sequence[str], *, problem: str = "", detail: str = ""
    ) -> None:
        self.acting.append(
            records.ActionDone(
                action=action,
                succeeded=not problem,
                nodes=list(nodes),
                detail=problem or detail,
            )
        )


def _refused(ending: Ending, problem: str) -> records.RunFinished:
    """End for a job that Slurm does not put back into the queue."""
    nodes = fold(ending.nodes)
    refused = f"the requeue was refused: {problem}"
    reason = f"{nodes} cannot be used: {ending.reason}; {refused}; {_again(nodes)}"
    return replace(ending, disposition=records.Disposition.STOP, reason=reason).recorded()


def _again(nodes: str) -> str:
    return f"submit the job again with --exclude={nodes}"
