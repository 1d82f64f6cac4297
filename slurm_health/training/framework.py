# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of a training, in the names of DLRover's design, for built-in parts and a site's.

    DataCollector   collects one kind of data
    DataManager     keeps what collectors have collected, by kind and time
    Diagnostician   observes a problem and resolves it to a `DiagnosisAction`
    InferenceChain  leads from an `Inference` to its causes, by `InferenceOperator`s

Built-in operators are rules: a function of an inference and the data. A site registers classes as
entry points; `training.monitor` runs each in a child process with a time limit.
docs/reference/plugins.md shows how.
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
KEEP_S = 600.0
MOST_KEPT = 10_000  # of one kind
MOST_STEPS = 64  # of a walk: the built-in chains have three, and a site's may lead in a circle


class NothingCollected(Exception):
    """There is nothing to collect, for the reason that this says. That is no failure."""


class OperatorFailed(Exception):
    """An operator hung, or answered with something else than inferences; says which of them."""


class DataCollector(ABC):
    """Collects one kind of data. It runs in a child process with a time limit, and may raise.

    Attributes:
        kind: under which its data is kept, and what reports call it; its class's name unless set.
        data: the type of what it collects, None for what JSON carries by itself.
        environ: of the job; set before it is asked anything.
    """

    kind: str = ""
    data: type | None = None
    environ: Mapping[str, str] = MappingProxyType({})

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.kind = cls.__dict__.get("kind") or cls.__name__

    def is_enabled(self) -> bool:
        """Tell whether it can collect here."""
        return True

    @abstractmethod
    def collect_data(self) -> object:
        """Return what there is, None where there is nothing.

        Raises:
            NothingCollected: there is nothing, and why.
        """


@dataclass(frozen=True)
class Kept:
    """One thing that was collected, and when, in seconds by the manager's clock."""

    kind: str
    time_s: float
    data: Any


class DataManager:
    """Keeps what was collected, by kind: the name of its type, or of the collector.

    Args:
        data: what is known already.
        missing: by collector, why it has no data.
        failed: by collector or operator, what happened to those that raised or hung.
        clock: seconds, as of `time.time`; without one nothing gets older.
        keep_s: what is older than this is forgotten.
        most: so many of one kind are kept, the latest.
    """

    def __init__(
        self,
        data: Iterable[object] = (),
        *,
        missing: Mapping[str, str] | None = None,
        failed: Mapping[str, str] | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        keep_s: float = KEEP_S,
        most: int = MOST_KEPT,
    ) -> None:
        self.missing = dict(missing or {})
        self.failed = dict(failed or {})
        self._clock = clock
        self._keep_s = keep_s
        self._most = most
        self._kept: dict[str, deque[Kept]] = {}
        for item in data:
            self.store(item)

    def store(self, data: object, kind: str = "", *, time_s: float | None = None) -> None:
        """Keep something, as collected now unless `time_s` says otherwise."""
        kind = kind or type(data).__name__
        of_kind = self._kept.setdefault(kind, deque(maxlen=self._most))
        of_kind.append(Kept(kind, self._clock() if time_s is None else time_s, data))

    @overload
    def get(self, kind: type[T], /) -> T | None: ...
    @overload
    def get(self, kind: str, /) -> Any: ...
    def get(self, kind: type[T] | str, /) -> Any:
        """Return the latest data of a kind, None where there is none."""
        kept = self.history(kind)
        return kept[-1].data if kept else None

    def history(self, kind: type | str) -> list[Kept]:
        """Return all that is kept of a kind, in the order in which it was stored."""
        of_kind = self._kept.get(kind if isinstance(kind, str) else kind.__name__, deque())
        oldest_s = self._clock() - self._keep_s
        while of_kind and of_kind[0].time_s < oldest_s:
            of_kind.popleft()
        return list(of_kind)

    @property
    def all(self) -> tuple[Any, ...]:
        """The latest data of each kind."""
        return tuple(kept[-1].data for kind in self._kept if (kept := self.history(kind)))


@dataclass(frozen=True)
class Inference:
    """A problem, a failure, or what is behind it: one step towards the cause.

    Attributes:
        name: what it is, as operators recognize it: `rank-failed`.
        attribution: whose doing it is, an `Attribution`. Your own words reach your operators
            unchanged, belong to what an inference is known by, and blame nobody.
        description: the same in words, the end of a sentence.
        configs: what an operator passes on to the next ones.
        sureness: how sure this step is of itself.
        nodes: where it happened. That is no accusation.
        ranks: which ranks it happened to.
        evidence: the lines and figures that it rests on.
        advice: what a person can do about it.
        advises_process: the advice is about a process that lives.
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
        """Whose doing it is; undecided in words that are no `Attribution`."""
        known = self.attribution in list(Attribution)
        return Attribution(self.attribution) if known else Attribution.UNDECIDED

    @property
    def accused(self) -> tuple[str, ...]:
        """The nodes at fault: none unless a fault of a node is likely."""
        at_fault = self.blame is Attribution.NODE and self.sureness >= Sureness.LIKELY
        return self.nodes if at_fault else ()

    @property
    def key(self) -> tuple[str, ...]:
        """What tells it from others in a walk."""
        if not self.attribution or self.attribution in list(Attribution):
            return (self.name,)
        return self.name, self.attribution, self.description


class InferenceOperator(ABC):
    """Infers what is behind an inference, from what was collected. It may raise.

    Attributes:
        name: what reports call it; its class's name unless set.
    """

    name: str = ""

    def __init_subclass__(cls, **more: object) -> None:
        super().__init_subclass__(**more)
        cls.name = cls.__dict__.get("name") or cls.__name__

    def __init__(self, data_manager: DataManager) -> None:
        self._data_manager = data_manager

    @abstractmethod
    def is_compatible(self, inference: Inference) -> bool:
        """Tell whether it can lead on from this inference."""

    @abstractmethod
    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Return what is behind inferences, none where it sees no cause; a chain gives it one."""


OperatorMaker = Callable[[DataManager], InferenceOperator]


@dataclass(frozen=True)
class Rule:
    """Makes a built-in operator of a function.

    Args:
        name: what reports call it.
        leads_on_from: the names of these inferences.
        cause: returns what is behind one of them, None where it sees nothing or lacks data.
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
    """One operator led from one inference to another."""

    operator: str
    before: Inference
    after: Inference


@dataclass(frozen=True, kw_only=True)
class Walk:
    """Where a chain led: all of its steps, and by name the operators that failed."""

    symptom: Inference
    steps: tuple[ChainStep, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def ends(self) -> tuple[Inference, ...]:
        """The inferences from which nothing led on, in the order in which they were reached."""
        led_on = [step.before for step in self.steps]
        reached = [self.symptom, *(step.after for step in self.steps)]
        return tuple(inference for inference in reached if inference not in led_on)

    @property
    def conclusion(self) -> Inference:
        """The surest end; undecided where ends that are as sure name different culprits.

        Of ends that are as sure, what was inferred comes before what diagnosticians ask for.
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
        """Return the steps that led to an inference, first step first."""
        way: list[ChainStep] = []
        while step := next((s for s in self.steps if s.after == end and s not in way), None):
            way.insert(0, step)
            end = step.before
        return tuple(way)


class InferenceChain:
    """Runs operators until nothing new follows; one that raises is named and leads nowhere."""

    def __init__(self, operators: Sequence[InferenceOperator]) -> None:
        self._operators = tuple(operators)

    def infer(self, inferences: list[Inference]) -> list[Inference]:
        """Return what these lead to: themselves where nothing is behind them."""
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
                except Exception as err:  # a boundary: what the others infer must still be said
                    ours = isinstance(err, OperatorFailed)
                    failed[operator.name] = str(err) if ours else f"{type(err).__name__}: {err}"
                    continue
                for after in new[: MOST_STEPS - len(steps)]:
                    steps.append(ChainStep(operator=operator.name, before=before, after=after))
                    if after.key not in behind:
                        behind[after.key] = behind[before.key] | {after.key}
                        queue.append(after)
        return Walk(symptom=symptom, steps=tuple(steps), failed=failed)


ASKS_FOR = "asks for"  # in `configs` of what a site's diagnostician concludes: its action


@dataclass(frozen=True)
class DiagnosisObservation:
    """A problem, as `resolve` recognizes it, what was seen of it, and where its chain begins."""

    observation: str
    details: dict[str, str] = field(default_factory=dict)
    symptom: Inference | None = None


@dataclass(frozen=True, kw_only=True)
class DiagnosisAction:
    """What a diagnostician asks for. The job's supervisor carries out what concerns the whole job,
    the agent on a node what concerns its ranks.

    Args:
        reason: why, the end of a sentence.
        nodes: those that it is about.
        evidence: the lines and figures that this rests on.
        diagnosed: what the problem is, where a chain led to it.
        failed: why no diagnosis was made, where none was.
    """  # noqa: D205 - one sentence

    kind: ClassVar[str] = "none"
    reason: str = ""
    nodes: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    diagnosed: Diagnosed | None = None
    failed: str = ""


class NoAction(DiagnosisAction):
    """Nothing is to be done."""


class EventAction(DiagnosisAction):
    """It is to be recorded and reported."""

    kind = "event"


class RestartRanks(DiagnosisAction):
    """The ranks are to be started again where they ran."""

    kind = "restart"


@dataclass(frozen=True, kw_only=True)
class CheckNodes(DiagnosisAction):
    """`nodes` are to be checked before the ranks start again, without those `at_fault`.

    The job does without `last_choice` if it has other nodes that are as good.
    """

    kind = "check"
    at_fault: tuple[NodeVerdict, ...] = ()
    last_choice: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LeaveNode(DiagnosisAction):
    """The job is to go on without `nodes`, which `evidence` accuses; `at_fault` says of what."""

    kind = "leave"
    at_fault: tuple[NodeVerdict, ...] = ()

    def __post_init__(self) -> None:
        if not self.nodes or not self.evidence:
            raise ValueError("LeaveNode needs nodes, and evidence against them")


class StopJob(DiagnosisAction):
    """The job is to end: the same again would fail again."""

    kind = "stop"


class Diagnostician:
    """Finds out about one kind of problem; to be subclassed.

    In `kwargs` are `data_manager`, what was collected, and for a site's diagnostician `inference`,
    the symptom that the built-in ones have observed.

    Attributes:
        operators: those of its chain; a job adds a site's.
    """

    operators: ClassVar[Sequence[OperatorMaker]] = ()

    def __init__(self, operators: Sequence[OperatorMaker] = ()) -> None:
        self._operators = (*type(self).operators, *operators)

    def observe(self, **_kwargs: Any) -> DiagnosisObservation | None:
        """Return the problem that is there, None where there is none."""
        return DiagnosisObservation("unknown")

    def resolve(self, problem: DiagnosisObservation, **_kwargs: Any) -> DiagnosisAction:
        """Return what is to be done about a problem."""
        return EventAction(reason=problem.observation)

    def diagnose(self, **kwargs: Any) -> DiagnosisAction:
        """Observe and resolve; a diagnosis that fails is no action, and says why.

        A diagnostician that observes several times for one failure overrides this.
        """
        try:
            problem = self.observe(**kwargs)
            return NoAction() if problem is None else self.resolve(problem, **kwargs)
        except Exception as err:  # a boundary: a diagnosis costs no training
            return NoAction(failed=f"{type(err).__name__}: {err}")

    def walk(self, symptom: Inference, data_manager: DataManager) -> Walk:
        """Return where its chain leads from a symptom."""
        made = [operator(data_manager) for operator in self._operators]
        return InferenceChain(made).walk(symptom)
