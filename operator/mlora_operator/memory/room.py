"""The memory model as the scheduler asks it: thousands of sets that are alike, decision after decision. Pure.

What the model says depends on what tasks ask for, not on who they are, and a decision asks much the same as the one before
it. So answers are remembered by what was asked for, as long as the model itself stays the same. And most questions are
whether one task more fits beside others. Two answers need no reckoning:

* it does not, when its adapter alone is larger than what the others leave free on some stage;
* it does not, when a task that asks for no more in anything was refused beside the same others.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from mlora_operator.memory.fit import StageFit
from mlora_operator.memory.model import Demand, MemoryModel, adapter_bytes
from mlora_operator.scheduling.admission import Verdict
from mlora_worker.protocol import ModelFacts, StageReport

_MODELS = 256  # that are remembered: those of all pipelines
_ANSWERS = 100_000  # of one of them, before all are forgotten

Kind = tuple[int, int, int, float, tuple[str, ...]]  # what a task asks for, as far as memory goes


class Held(NamedTuple):
    """Some tasks, and what they ask for; both in no order that matters. ``beside`` and ``added``: the same as others and
    one task more."""

    uids: tuple[str, ...]
    kinds: tuple[int, ...]  # numbers of kinds, sorted
    beside: Held | None = None
    added: str | None = None


@dataclass(slots=True)
class Answers:
    """About one model."""

    numbers: dict[Kind, int] = field(default_factory=dict)
    known: dict[int, tuple[Demand, int]] = field(
        default_factory=dict
    )  # numbers by the identity of the demand
    fits: dict[tuple[int, ...], bool] = field(default_factory=dict)  # by numbers of kinds, sorted
    left: dict[tuple[int, ...], tuple[int, ...]] = field(
        default_factory=dict
    )  # bytes per stage beside such a set
    refused: dict[tuple[int, ...], list[Demand]] = field(default_factory=dict)  # beside such a set
    adapters: dict[int, tuple[int, ...]] = field(
        default_factory=dict
    )  # bytes per stage, by number of the kind

    def forget(self) -> None:
        """The sets and the demands; there are many more of them than of kinds."""
        for of_sets in (self.fits, self.left, self.refused, self.known):
            of_sets.clear()


@dataclass(frozen=True, slots=True)
class ModelRoom:
    """``scheduling.room.Memory`` of one pipeline, for one decision."""

    model: MemoryModel
    answers: Answers

    def held(self, uids: Iterable[str]) -> Held:
        listed = tuple(uids)
        return Held(listed, tuple(sorted(self._number(uid) for uid in listed)))

    def plus(self, held: Held, uid: str) -> Held:
        number = self._number(uid)
        at = bisect(held.kinds, number)
        kinds = (*held.kinds[:at], number, *held.kinds[at:])
        return Held((*held.uids, uid), kinds, Held(held.uids, held.kinds), uid)

    def fits_alone(self, uid: str) -> bool:
        known = self.answers.fits.get((self._number(uid),))
        return self.fits(self.held((uid,))) if known is None else known

    def fits(self, held: Held) -> bool:
        answers = self.answers.fits
        known = answers.get(held.kinds)
        if known is None:
            if len(answers) >= _ANSWERS:
                self.answers.forget()
            known = answers[held.kinds] = not self._is_refused(held) and self.verdict(held).fits
            if not known and held.beside is not None and held.added is not None:
                refused = self.answers.refused.setdefault(held.beside.kinds, [])
                refused.append(self.model.demands[held.added])
        return known

    def _is_refused(self, held: Held) -> bool:
        """Whether that is certain without asking the model."""
        if held.beside is None or held.added is None or not held.beside.uids:
            return False
        added = self.model.demands[held.added]
        if any(_asks_no_more(one, added) for one in self.answers.refused.get(held.beside.kinds, ())):
            return True
        adapters = self._adapters(held.added)
        return any(own > left for own, left in zip(adapters, self._left(held.beside), strict=True))

    def _left(self, held: Held) -> tuple[int, ...]:
        left = self.answers.left.get(held.kinds)
        if left is None:
            verdicts = self.model.by_stage(held.uids)
            left = self.answers.left[held.kinds] = tuple(one.budget - one.needed for one in verdicts)
        return left

    def _adapters(self, uid: str) -> tuple[int, ...]:
        number = self._number(uid)
        known = self.answers.adapters.get(number)
        if known is None:
            lora, facts = self.model.demands[uid].lora, self.model.facts
            known = tuple(adapter_bytes(lora, facts, stage.stage) for stage in self.model.stages)
            self.answers.adapters[number] = known
        return known

    def verdict(self, held: Held) -> Verdict:
        return self.model.verdict(held.uids)

    def _number(self, uid: str) -> int:
        demand = self.model.demands[uid]
        known = self.answers.known.get(id(demand))
        if known is None or known[0] is not demand:
            if len(self.answers.known) >= _ANSWERS:
                self.answers.forget()
            numbers = self.answers.numbers
            known = demand, numbers.setdefault(_kind(demand), len(numbers))
            self.answers.known[id(demand)] = known
        return known[1]


def room_of(model: MemoryModel) -> ModelRoom:
    """The model, with what it was asked before."""
    return ModelRoom(
        model,
        _answers(
            model.facts,
            model.stages,
            model.microbatch_tokens,
            model.budget,
            model.margin,
            model.recompute,
            _as_tuple(model.learned),
        ),
    )


@lru_cache(maxsize=_MODELS)
def _answers(
    facts: ModelFacts,
    stages: tuple[StageReport, ...],
    microbatch_tokens: int,
    budget: int | None,
    margin: float,
    recompute: bool,
    learned: tuple[tuple[int, StageFit], ...],
) -> Answers:
    del facts, stages, microbatch_tokens, budget, margin, recompute, learned
    return Answers()


def _as_tuple(learned: Mapping[int, StageFit]) -> tuple[tuple[int, StageFit], ...]:
    return tuple(sorted(learned.items(), key=lambda item: item[0]))


def _kind(demand: Demand) -> Kind:
    lora = demand.lora
    return demand.step_tokens, demand.longest_row, lora.rank, lora.dropout, lora.target_modules


def _asks_no_more(one: Demand, other: Demand) -> bool:
    """In anything; so that ``other`` takes at least as much memory."""
    return (
        one.step_tokens <= other.step_tokens
        and one.longest_row <= other.longest_row
        and one.lora.rank <= other.lora.rank
        and set(one.lora.target_modules) <= set(other.lora.target_modules)
    )
