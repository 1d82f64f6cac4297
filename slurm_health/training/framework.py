# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of a training, in the names of DLRover's design, for built-in parts and a site's.

    DataCollector   collects one kind of data
    DataManager     stores the data of collectors, by kind
    Diagnostician   observes a problem and resolves it to a `DiagnosisAction`
    InferenceChain  leads from an `Inference` to its causes, by `InferenceOperator`s

Built-in operators are rules: a function of an inference and the data. A site registers classes as
entry points; `training.monitor` runs every one in a child process with a time limit. See
docs/reference/plugins.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar, overload

from slurm_health.records.script_records import Attribution as Attribution
from slurm_health.records.script_records import Diagnosed
from slurm_health.records.script_records import Sureness as Sureness
from slurm_health.records.verdict import NodeVerdict

T = TypeVar("T")
MOST_STEPS = 64  # of a walk: the built-in chains have three, and a site's may lead in a circle


class NothingCollected(Exception):
    """There is nothing to collect, for the reason in the text. That is no failure."""


class OperatorFailed(Exception):
    """An operator hung, or its answer is no list of inferences; the text has the reason."""


class DataCollector(ABC):
    """Collects one kind of data. It runs in a child process with a time limit, and may raise.

    Attributes:
        kind: the name of its data, also in reports; its class's name unless set.
        data: the type of its data, None for plain JSON values.
        environ: of the job; set before any call.
    """

    kind: str = ""
    data: type | None = None
    environ: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.kind = cls.__dict__.get("kind") or cls.__name__

    def is_enabled(self) -> bool:
        """Return whether it can collect here."""
        return True

    @abstractmethod
    def collect_data(self) -> object:
        """Return the data, None without any.

        Raises:
            NothingCollected: there is no data, for the reason in its text.
        """


class DataManager:
    """Stores the latest data by kind: the name of its type, or of the collector.

    Args:
        data: the first items.
        missing: by collector, why it has no data.
        failed: by collector or operator, the errors of those that raised or hung.
    """

    def __init__(
        self,
        data: Iterable[object] = (),
        *,
        missing: Mapping[str, str] | None = None,
        failed: Mapping[str, str] | None = None,
    ) -> None:
        self.missing = dict(missing or {})
        self.failed = dict(failed or {})
        self._data: dict[str, Any] = {}
        for item in data:
            self.store(item)

    def store(self, data: object, kind: str = "") -> None:
        """Store an item, in place of an earlier one of its kind."""
        self._data[kind or type(data).__name__] = data

    @overload
    def get(self, kind: type[T], /) -> T | None: ...
    @overload
    def get(self, kind: str, /) -> Any: ...
    def get(self, kind: type[T] | str, /) -> Any:
        """Return the data of a kind, None without any."""
        return self._data.get(kind if isinstance(kind, str) else kind.__name__)

    @property
    def all(self) -> tuple[Any, ...]:
        """The data of all kinds."""
        return tuple(self._data.values())


@dataclass(frozen=True)
class Inference:
    """A problem, a failure, or its cause: one step towards the root cause.

    Attributes:
        name: its name, by which operators recognize it: `rank-failed`.
        attribution: the blame, an `Attribution`. Your own words reach your operators unchanged,
            are part of the inference's identity, and blame neither node nor user.
        description: the same in words, the end of a sentence.
        configs: options from an operator to the next ones.
        sureness: of this step.
        nodes: where it happened, without blame.
        ranks: the ranks concerned.
        evidence: lines and figures.
        advice: what a person can do about it.
        advises_process: the advice is about a living process.
    """

    name: str = ""
    attribution: str = Attribution.UNDECIDED
    description: str = ""
    configs: dict[str, str] = field(default_factory=dict)
    _: KW_ONLY
    sureness: Sureness = Sureness.POSSIBLE
    nodes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    evidence: tuple[str, ...] = ()
    advice: str = ""
    advises_process: bool = False

    @property
    def blame(self) -> Attribution:
        """The blame; undecided if its words are no `Attribution`."""
        known = self.attribution in list(Attribution)
        return Attribution(self.attribution) if known else Attribution.UNDECIDED

    @property
    def accused(self) -> tuple[str, ...]:
        """The nodes at fault: none unless a fault of a node is likely."""
        at_fault = self.blame is Attribution.NODE and self.sureness >= Sureness.LIKELY
        return self.nodes if at_fault else ()

    @property
    def key(self) -> tuple[str, ...]:
        """Its identity in a walk."""
        if not self.attribution or self.attribution in list(Attribution):
            return (self.name,)
        return self.name, self.attribution, self.description


class InferenceOperator(ABC):
    """Infers the causes of an inference from collected data. It may raise.

    Attributes:
        name: its name in reports; its class's name unless set.
    """

    name: str = ""

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        cls.name = cls.__dict__.get("name") or cls.__name__

    def __init__(self, data_manager: DataManager) -> None:
        self._data_manager = data_manager

    @abstractmethod
    def is_compatible(self, inference: Inference) -> bool:
        """Return whether it can infer causes of this inference."""

    @abstractmethod
    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Return the causes of inferences, none if it knows none; a chain passes one at a time."""


OperatorMaker = Callable[[DataManager], InferenceOperator]


@dataclass(frozen=True)
class Rule:
    """Makes a built-in operator of a function.

    Args:
        name: its name in reports.
        leads_on_from: the names of the inferences whose causes it knows.
        cause: returns the cause of one of them, None without a cause or data.
    """

    name: str
    leads_on_from: tuple[str, ...]
    cause: Callable[[Inference, DataManager], Inference | None]

    def __call__(self, data_manager: DataManager) -> InferenceOperator:
        """Return the operator for this data."""
        return _RuleOperator(data_manager, self)


class _RuleOperator(InferenceOperator):
    def __init__(self, data_manager: DataManager, rule: Rule) -> None:
        super().__init__(data_manager)
        self.name = rule.name
        self._rule = rule

    def is_compatible(self, inference: Inference) -> bool:
        return inference.name in self._rule.leads_on_from

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        causes = (self._rule.cause(inference, self._data_manager) for inference in inferences)
        return [cause for cause in causes if cause is not None]


@dataclass(frozen=True, kw_only=True)
class ChainStep:
    """The step of one operator from an inference to another."""

    operator: str
    before: Inference
    after: Inference


@dataclass(frozen=True, kw_only=True)
class Walk:
    """All steps of a chain, and the errors of operators by name."""

    symptom: Inference
    steps: tuple[ChainStep, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[Inference, ...]:
        """The inferences without a further cause, in their order."""
        led_on = [step.before for step in self.steps]
        reached = [self.symptom, *(step.after for step in self.steps)]
        return tuple(inference for inference in reached if inference not in led_on)

    @property
    def conclusion(self) -> Inference:
        """The surest end; undecided if equally sure ends have different blame.

        Of equally sure ends, inferences come before the requests of diagnosticians.
        """
        most = max(end.sureness for end in self.ends)
        surest = [end for end in self.ends if end.sureness == most]
        decided = [end for end in surest if end.blame is not Attribution.UNDECIDED]
        if len({end.blame for end in decided}) > 1:
            return Inference(
                name="contradiction",
                description="the signs contradict each other: "
                + "; or ".join(f"{end.description} ({end.blame})" for end in decided),
                evidence=tuple(line for end in decided for line in end.evidence[:2]),
                advice="read the evidence; check the nodes (slurm-health check) before the next"
                " start",
            )
        return min(decided or surest, key=lambda end: ASKS_FOR in end.configs)

    def way_to(self, end: Inference) -> tuple[ChainStep, ...]:
        """Return the steps to an inference, first step first."""
        way: list[ChainStep] = []
        while step := next((s for s in self.steps if s.after == end and s not in way), None):
            way.insert(0, step)
            end = step.before
        return tuple(way)


class InferenceChain:
    """Runs operators until nothing new follows; one that raises is reported and skipped."""

    def __init__(self, operators: Sequence[InferenceOperator]) -> None:
        self._operators = tuple(operators)

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Return the ends of their chains: themselves without a further cause."""
        ends: list[Inference] = []
        for inference in inferences:
            ends += [end for end in self.walk(inference).ends if end not in ends]
        return ends

    def walk(self, symptom: Inference) -> Walk:
        """Return all steps from one inference, and the operators that failed."""
        steps: list[ChainStep] = []
        failed: dict[str, str] = {}
        behind = {symptom.key: {symptom.key}}
        queue = deque([symptom])
        while queue and len(steps) < MOST_STEPS:
            before = queue.popleft()
            for operator in self._operators:
                if operator.name in failed:
                    continue
                try:
                    inferred = operator.infer([before]) if operator.is_compatible(before) else []
                    new = [after for after in inferred if after.key not in behind[before.key]]
                except Exception as err:  # a boundary: the other operators still count
                    ours = isinstance(err, OperatorFailed)
                    failed[operator.name] = str(err) if ours else f"{type(err).__name__}: {err}"
                    continue
                for after in new[: MOST_STEPS - len(steps)]:
                    steps.append(ChainStep(operator=operator.name, before=before, after=after))
                    if after.key not in behind:
                        behind[after.key] = behind[before.key] | {after.key}
                        queue.append(after)
        return Walk(symptom=symptom, steps=tuple(steps), failed=failed)


ASKS_FOR = "asks for"  # in `configs` of the inference of a site's diagnostician: its action


@dataclass(frozen=True)
class DiagnosisObservation:
    """A problem for `resolve`, its details, and the symptom from which its chain begins."""

    observation: str
    details: dict[str, str] = field(default_factory=dict)
    symptom: Inference | None = None


@dataclass(frozen=True, kw_only=True)
class DiagnosisAction:
    """The request of a diagnostician, which the job's supervisor carries out.

    Args:
        reason: why, the end of a sentence.
        nodes: those concerned.
        evidence: lines and figures.
        diagnosed: the conclusion of the chain, if there is one.
        failed: why there is no diagnosis, empty if there is one.
    """

    kind: ClassVar[str] = "none"
    reason: str = ""
    nodes: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    diagnosed: Diagnosed | None = None
    failed: str = ""


class NoAction(DiagnosisAction):
    """Do nothing."""


class EventAction(DiagnosisAction):
    """Record and report it."""

    kind = "event"


class RestartRanks(DiagnosisAction):
    """Start the ranks again on their nodes."""

    kind = "restart"


@dataclass(frozen=True, kw_only=True)
class CheckNodes(DiagnosisAction):
    """Check `nodes` before the ranks start again, without those `at_fault`.

    The job uses `last_choice` only if no other nodes are as good.
    """

    kind = "check"
    at_fault: tuple[NodeVerdict, ...] = ()
    last_choice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LeaveNode(DiagnosisAction):
    """Go on without `nodes`, which `evidence` accuses; `at_fault` has the verdicts."""

    kind = "leave"
    at_fault: tuple[NodeVerdict, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes or not self.evidence:
            raise ValueError("LeaveNode needs nodes, and evidence against them")


class StopJob(DiagnosisAction):
    """End the job: the same again would fail again."""

    kind = "stop"


class Diagnostician:
    """Diagnoses one kind of problem; to be subclassed.

    `kwargs` has `data_manager`, the collected data, and for a site's diagnostician `inference`, the
    symptom of the built-in ones.

    Attributes:
        operators: those of its chain; a job adds a site's.
    """

    operators: ClassVar[Sequence[OperatorMaker]] = ()

    def __init__(self, operators: Sequence[OperatorMaker] = ()) -> None:
        self._operators = (*type(self).operators, *operators)

    def observe(self, **_kwargs: Any) -> DiagnosisObservation | None:
        """Return the problem, None without one."""
        return DiagnosisObservation("unknown")

    def resolve(self, problem: DiagnosisObservation, **_kwargs: Any) -> DiagnosisAction:
        """Return the action about a problem."""
        return EventAction(reason=problem.observation)

    def diagnose(self, **kwargs: Any) -> DiagnosisAction:
        """Observe and resolve; a diagnosis that fails is no action, with the reason.

        A diagnostician that observes several times for one failure overrides this.
        """
        try:
            problem = self.observe(**kwargs)
            return NoAction() if problem is None else self.resolve(problem, **kwargs)
        except Exception as err:  # a boundary: a diagnosis costs no training
            return NoAction(failed=f"{type(err).__name__}: {err}")

    def walk(self, symptom: Inference, data_manager: DataManager) -> Walk:
        """Return the walk of its chain from a symptom."""
        made = [operator(data_manager) for operator in self._operators]
        return InferenceChain(made).walk(symptom)
