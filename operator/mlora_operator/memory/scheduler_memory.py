"""The memory model as the scheduler asks it: thousands of sets that are alike, decision after decision. Pure.

What the model says depends on what tasks ask for, not on who they are, and a decision asks much the same as the one before
it. So answers are remembered by what was asked for, as long as the model itself stays the same; what is not remembered is
added up (``reckoning``).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from mlora_operator.memory.fit import StageFit
from mlora_operator.memory.model import Demand, MemoryModel
from mlora_operator.memory.reckoning import (
    Brought,
    ReportedGroups,
    StageLayout,
    StageReckoning,
    Sums,
    layouts,
    reckonings,
    reported_groups,
)
from mlora_operator.scheduling.admission import MemoryCheck
from mlora_worker.protocol import ModelFacts, StageReport

_MODELS = 256  # that are remembered: those of all pipelines
_ANSWERS = 10_000  # of one of them, before all are forgotten

ByKind = Mapping[int, tuple[Brought, ...]]  # what kinds bring to each stage, by number
Kind = tuple[object, ...]  # what a task asks for, as far as memory goes


@dataclass(slots=True)
class KindSet:
    """What is known of a set of kinds, whoever asks for it."""

    fits: dict[int, bool] = field(default_factory=dict)  # whether one of a kind fits beside it
    sums: tuple[Sums, ...] | None = None  # by stage; None: nobody has asked yet


class TaskSet(NamedTuple):
    """Some tasks, and what they ask for; both in no order that matters."""

    uids: tuple[str, ...]
    kinds: tuple[int, ...]  # numbers of kinds, sorted
    beside: KindSet  # all such sets share it


@dataclass(slots=True)
class DemandKinds:
    """What tasks bring to the stages of one base model, each kind once. That outlives what is learned of the memory, and
    pipelines of the same model share it."""

    layouts: tuple[StageLayout, ...]
    most: int = _ANSWERS  # tasks that are remembered, beside those of one question
    brought: dict[int, tuple[Brought, ...]] = field(default_factory=dict)  # to each stage, by number
    _numbers: dict[Kind, int] = field(default_factory=dict)
    _known: dict[int, tuple[int, Demand]] = field(
        default_factory=dict
    )  # numbers by the identity of the demand, which each entry keeps alive
    _asked: dict[int, tuple[Mapping[str, Demand], Mapping[str, int]]] = field(
        default_factory=dict
    )  # what was asked and answered last, in the same way
    _next: int = 0  # a number is never given twice: answers about forgotten kinds are about nobody

    def numbers_of(self, demands: Mapping[str, Demand]) -> Mapping[str, int]:
        """The number of what each asks for, by uid. A mapping that was asked about must not be changed any more."""
        asked = self._asked.get(id(demands))
        if asked is not None:
            return asked[1]
        known = self._known
        for demand in [one for one in demands.values() if id(one) not in known]:
            if len(known) >= self.most + len(demands):
                self._forget()
                return self.numbers_of(demands)
            known[id(demand)] = self._number(demand), demand
        if len(self._asked) >= _MODELS:
            self._asked.clear()
        numbers = {uid: known[id(demand)][0] for uid, demand in demands.items()}
        self._asked[id(demands)] = demands, numbers
        return numbers

    def _number(self, demand: Demand) -> int:
        kind = _kind(demand)
        number = self._numbers.get(kind)
        if number is None:
            number = self._numbers[kind] = self._next
            self._next += 1
            self.brought[number] = tuple(layout.brought(demand) for layout in self.layouts)
        return number

    def _forget(self) -> None:
        self._known.clear()
        self._numbers.clear()
        self.brought = {}  # another one: a memory that was made before still has its own
        self._asked.clear()


@dataclass(slots=True)
class MemoryAnswers:
    """About one model."""

    kinds: DemandKinds
    stages: tuple[StageReckoning, ...]
    fits: dict[tuple[int, ...], bool] = field(default_factory=dict)  # by numbers of kinds, sorted
    beside: dict[tuple[int, ...], KindSet] = field(default_factory=dict)  # in the same way
    checks: dict[tuple[int, ...], MemoryCheck] = field(default_factory=dict)  # as ``fits``, with figures

    def memory(self, model: MemoryModel, lingering: tuple[int, ...] = ()) -> SchedulerMemory:
        numbers = self.kinds.numbers_of(model.demands)
        return SchedulerMemory(model, self, numbers, self.kinds.brought, self.of(()), lingering)

    def of(self, kinds: tuple[int, ...]) -> KindSet:
        known = self.beside.get(kinds)
        if known is None:
            known = self.beside[kinds] = KindSet()
        return known

    def fit(self, kinds: tuple[int, ...], brought: ByKind) -> bool:
        known = self.fits.get(kinds)
        if known is None:
            parts = zip(self.stages, self._sums(kinds, brought), strict=True)
            known = all(stage.fits(sums) for stage, sums in parts)
            self._note(kinds, known)
        return known

    def fit_beside(self, kinds: tuple[int, ...], number: int, beside: KindSet, brought: ByKind) -> bool:
        """``beside``: of ``kinds``."""
        together = _with(kinds, number)
        known = self.fits.get(together)
        if known is None:
            if beside.sums is None:
                beside.sums = self._sums(kinds, brought)
            parts = zip(self.stages, beside.sums, brought[number], strict=True)
            known = all(stage.fits_beside(sums, one) for stage, sums, one in parts)
            self._note(together, known)
        beside.fits[number] = known
        return known

    def _sums(self, kinds: tuple[int, ...], brought: ByKind) -> tuple[Sums, ...]:
        each = [brought[number] for number in kinds]
        return tuple(stage.sums(one[index] for one in each) for index, stage in enumerate(self.stages))

    def _note(self, kinds: tuple[int, ...], known: bool) -> None:
        if len(self.fits) >= _ANSWERS:
            self.fits.clear()
            self.beside.clear()
        self.fits[kinds] = known


@dataclass(frozen=True, slots=True)
class SchedulerMemory:
    """``scheduling.memory.Memory`` of one pipeline, for one decision."""

    model: MemoryModel
    answers: MemoryAnswers
    numbers: Mapping[str, int]  # of kinds, by uid
    brought: ByKind  # by these
    nobody: KindSet  # of the empty set
    lingering: tuple[int, ...] = ()  # bytes on each stage that tasks hold which are out; none: nothing

    def says_the_same_as(self, other: SchedulerMemory) -> bool:
        """Of the same model about the same tasks."""
        return (
            self.answers is other.answers
            and self.numbers is other.numbers
            and self.lingering == other.lingering
        )

    def held(self, uids: Iterable[str]) -> TaskSet:
        listed = tuple(uids)
        return self._held(listed, tuple(sorted(self.numbers[uid] for uid in listed)))

    def plus(self, held: TaskSet, uid: str) -> TaskSet:
        return self._held((*held.uids, uid), _with(held.kinds, self.numbers[uid]))

    def fits_alone(self, uid: str) -> bool:
        number = self.numbers[uid]
        known = self.nobody.fits.get(number)
        return self._asked((), number, self.nobody) if known is None else known

    def fits(self, held: TaskSet) -> bool:
        return self.answers.fit(held.kinds, self.brought)

    def fits_beside(self, held: TaskSet, uid: str) -> bool:
        number = self.numbers[uid]
        known = held.beside.fits.get(number)
        return self._asked(held.kinds, number, held.beside) if known is None else known

    def _asked(self, kinds: tuple[int, ...], number: int, beside: KindSet) -> bool:
        return self.answers.fit_beside(kinds, number, beside, self.brought)

    def fits_already(self, held: TaskSet) -> bool:
        if not any(self.lingering):
            return True
        each = zip(self.model.by_stage(held.uids), self.lingering, strict=False)
        return all(check.needed + left <= check.budget for check, left in each)

    def check(self, held: TaskSet) -> MemoryCheck:
        known = self.answers.checks.get(held.kinds)
        if known is None:
            if len(self.answers.checks) >= _ANSWERS:
                self.answers.checks.clear()
            known = self.answers.checks[held.kinds] = self.model.check(held.uids)
        return known

    def _held(self, uids: tuple[str, ...], kinds: tuple[int, ...]) -> TaskSet:
        return TaskSet(uids, kinds, self.answers.of(kinds))


def scheduler_memory(model: MemoryModel, lingering: tuple[int, ...] = ()) -> SchedulerMemory:
    """The model, with what it was asked before. ``lingering``: bytes on each stage that tasks hold which are out."""
    learned = tuple(sorted(model.learned.items(), key=lambda item: item[0]))
    answers = _answers(
        model.facts,
        model.stages,
        model.microbatch_tokens,
        model.budget,
        model.margin,
        model.recompute,
        learned,
    )
    return answers.memory(model, lingering)


@lru_cache(maxsize=_MODELS)
def _answers(
    facts: ModelFacts,
    stages: tuple[StageReport, ...],
    microbatch_tokens: int,
    budget: int | None,
    margin: float,
    recompute: bool,
    learned: tuple[tuple[int, StageFit], ...],
) -> MemoryAnswers:
    model = MemoryModel(facts, stages, microbatch_tokens, budget, margin, {}, recompute, dict(learned))
    kinds = _kinds(facts, reported_groups(stages), recompute)
    return MemoryAnswers(kinds, reckonings(model, kinds.layouts))


@lru_cache(maxsize=_MODELS)
def _kinds(facts: ModelFacts, told: tuple[ReportedGroups, ...], recompute: bool) -> DemandKinds:
    return DemandKinds(layouts(facts, told, recompute=recompute))


def _with(kinds: tuple[int, ...], number: int) -> tuple[int, ...]:
    at = bisect(kinds, number)
    return (*kinds[:at], number, *kinds[at:])


def _kind(demand: Demand) -> Kind:
    lora = demand.lora
    ranks = lora.rank, tuple(sorted(lora.rank_pattern.items()))
    held = lora.type, lora.use_dora, demand.moments
    return demand.step_tokens, demand.longest_row, lora.dropout, lora.choice, ranks, held
