"""The memory model as the scheduler asks it: thousands of sets that are alike, decision after decision. Pure.

What the model says depends on what tasks ask for, not on who they are, and a decision asks much the same as the one before
it. So answers are remembered by what was asked for, as long as the model itself stays the same.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from mlora_operator.memory.fit import StageFit
from mlora_operator.memory.model import Demand, MemoryModel
from mlora_operator.scheduling.admission import Verdict
from mlora_worker.protocol import ModelFacts, StageReport

_MODELS = 256  # that are remembered: those of all pipelines
_ANSWERS = 100_000  # of one of them, before all are forgotten

Kind = tuple[int, int, int, float, tuple[str, ...]]  # what a task asks for, as far as memory goes


class Held(NamedTuple):
    """Some tasks, and what they ask for; both in no order that matters."""

    uids: tuple[str, ...]
    kinds: tuple[int, ...]  # numbers of kinds, sorted


@dataclass(slots=True)
class Answers:
    """About one model."""

    numbers: dict[Kind, int] = field(default_factory=dict)
    fits: dict[tuple[int, ...], bool] = field(default_factory=dict)  # by numbers of kinds, sorted


@dataclass(frozen=True, slots=True)
class ModelRoom:
    """``scheduling.room.Memory`` of one pipeline, for one decision."""

    model: MemoryModel
    answers: Answers
    numbers: dict[str, int] = field(default_factory=dict)  # by uid

    def held(self, uids: Iterable[str]) -> Held:
        listed = tuple(uids)
        return Held(listed, tuple(sorted(self._number(uid) for uid in listed)))

    def plus(self, held: Held, uid: str) -> Held:
        number = self._number(uid)
        at = bisect(held.kinds, number)
        return Held((*held.uids, uid), (*held.kinds[:at], number, *held.kinds[at:]))

    def fits_alone(self, uid: str) -> bool:
        known = self.answers.fits.get((self._number(uid),))
        return self.fits(self.held((uid,))) if known is None else known

    def fits(self, held: Held) -> bool:
        answers = self.answers.fits
        known = answers.get(held.kinds)
        if known is None:
            if len(answers) >= _ANSWERS:
                answers.clear()
            known = answers[held.kinds] = self.verdict(held).fits
        return known

    def verdict(self, held: Held) -> Verdict:
        return self.model.verdict(held.uids)

    def _number(self, uid: str) -> int:
        number = self.numbers.get(uid)
        if number is None:
            known = self.answers.numbers
            number = self.numbers[uid] = known.setdefault(_kind(self.model.demands[uid]), len(known))
        return number


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
