"""Prediction of a stage's peak memory from the tasks in it. Pure.

    bytes(stage) = resident + sum over tasks of adapter + kept (T - M) / M + peak(M)

``resident`` are the frozen weights, as the worker measured them. An adapter's bytes are exact: for each targeted module of
the stage, ``rank * (in + out)`` numbers, and as many for each expert where those of a layer are adapted (parameter,
gradient and the optimizer's moments in float32, and a copy in the base's type where that is another one). ``T`` is the
number of tokens whose activations the stage holds at most, ``M`` those of one microbatch: what it keeps of a microbatch and
what it needs at most for one are learned (``fit``). Before anything was measured, they come from the model's shape
(``prior``).

A microbatch is taken to be as bad as it can be: as wide as it may be, all rows as long as the longest may be, all of it
supervised, and of the tasks with the widest adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby

from mlora_operator.memory.fit import NONE_BELOW, StageFit
from mlora_operator.memory.prior import prior
from mlora_operator.scheduling.admission import MemoryCheck, MemoryNeed
from mlora_worker.protocol import AdapterType, LoRAConfig, ModelFacts, Optimizer, StageReport, Training
from mlora_worker.stream import planner
from mlora_worker.stream.footprint import (
    MOST_EXPERT_ROWS,
    UNPACKING_BYTES,
    ModuleGroup,
    Ranks,
    Shape,
    dense_numbers,
    exact_parts,
    floor_bytes,
    input_groups,
    low_rank,
    most_loss_rows,
)
from mlora_worker.stream.modules import adaptable_of, modules_of
from mlora_worker.stream.targets import kept_of, ranks_of

_MASTER_BYTES = 4  # parameters, gradients and moments are float32, whatever the base is
_HELD = 2  # parameter and gradient; the moments come on top
_DERIVED = 3  # numbers of each output (mlora_worker.lora.magnitudes)
_ALIGNMENT = 16  # elements: matrices start on a cache line (mlora_worker.lora.adapter)


@dataclass(frozen=True, slots=True)
class Demand:
    """What one task asks for. Worst case: every row, or each of a pair, as long as it may be."""

    lora: LoRAConfig
    step_tokens: int
    longest_row: int
    moments: int = 2  # that its optimizer keeps of each parameter


def demand_of(lora: LoRAConfig, training: Training, max_positions: int) -> Demand:
    longest = min(training.max_seq_length, max_positions)
    if training.preference is not None and training.preference.paired:  # two rows, which travel together
        longest *= 2
    rows = training.batch_size * training.gradient_accumulation_steps
    moments = (training.optimizer or Optimizer()).moments
    return Demand(lora, rows * longest, longest, moments)


def adapter_parameters(lora: LoRAConfig, facts: ModelFacts, stage: int) -> int:
    """Of a task on ``stage``, with the gaps between matrices."""
    return _parameters_by_stage(lora, facts).get(stage, 0)


@lru_cache(maxsize=4096)
def _parameters_by_stage(lora: LoRAConfig, facts: ModelFacts) -> Mapping[int, int]:
    ranks, vera = ranks_of(facts, lora), lora.type is AdapterType.VERA
    found: dict[int, int] = {}
    for module in adaptable_of(facts):
        rank = ranks.get(module.path)
        if rank is not None:
            rows = rank * module.matrices
            own = _padded(rows * module.in_features) + _padded(rows * module.out_features)
            if vera:
                own = _padded(rank)
            own += _padded(module.out_features) if lora.use_dora or vera else 0
            found[module.stage] = found.get(module.stage, 0) + own
    return found


def adapter_bytes(lora: LoRAConfig, facts: ModelFacts, stage: int, moments: int = 2) -> int:
    """Bytes of a task's adapter, gradients and optimizer state on ``stage``: exact."""
    copy = 0 if facts.dtype_bytes == _MASTER_BYTES else facts.dtype_bytes
    if lora.type is AdapterType.VERA:
        vectors = adapter_parameters(lora, facts, stage) * (_HELD + moments) * _MASTER_BYTES
        return vectors + _vera_bytes(lora, facts, stage)
    own = adapter_parameters(lora, facts, stage) * ((_HELD + moments) * _MASTER_BYTES + copy)
    return own + _derived_bytes(lora, facts, stage)


def _vera_bytes(lora: LoRAConfig, facts: ModelFacts, stage: int) -> int:
    """Of the matrices that the vectors make, with their gradients, and of the two random ones where a module needs them."""
    ranks = ranks_of(facts, lora)
    adapted = [module for module in modules_of(facts) if module.path in ranks]
    own = [module for module in adapted if module.stage == stage]
    if not own:
        return 0
    numbers = sum(
        _padded(lora.rank * module.in_features) + _padded(lora.rank * module.out_features) for module in own
    )
    sides = max(module.in_features for module in adapted) + max(module.out_features for module in adapted)
    return numbers * (facts.dtype_bytes + _MASTER_BYTES) + lora.rank * sides * _MASTER_BYTES


def _derived_bytes(lora: LoRAConfig, facts: ModelFacts, stage: int) -> int:
    """Of lengths and factors, which follow from a DoRA adapter's parameters."""
    if not lora.use_dora:
        return 0
    ranks = ranks_of(facts, lora)
    outputs = (m.out_features for m in modules_of(facts) if m.stage == stage and m.path in ranks)
    return _DERIVED * _MASTER_BYTES * sum(outputs)


def dense_bytes(facts: ModelFacts, stage: StageReport) -> int:
    """The most that quantised matrices take at once while they are dense: those of the largest input group, and what making
    them takes. Where products are taken in a wider type, in both types. On a GPU it is part of what is measured, too."""
    if not stage.quantized:
        return 0
    wide = product_bytes(facts, stage)
    width = wide if wide == facts.dtype_bytes else wide + facts.dtype_bytes
    making = 0 if stage.device.startswith("cuda") else UNPACKING_BYTES
    return width * dense_numbers(facts, stage.stage, stage.input_groups) + making


@dataclass(frozen=True, slots=True)
class Worst:
    """The most that a stage holds of some tasks. ``tokens``: of all microbatches; ``microbatch``: one of them."""

    tokens: int
    microbatch: Shape


def worst_case(
    demands: Sequence[Demand],
    facts: ModelFacts,
    stage: StageReport,
    stages: int,
    microbatch_tokens: int,
    *,
    recompute: bool = False,
) -> Worst:
    """Microbatches are taken to be as wide as they may be; how many a stage holds, the planner says."""
    if not demands:
        return Worst(0, Shape(0, 0))
    longest = max(demand.longest_row for demand in demands)
    steps = sum(demand.step_tokens for demand in demands)
    tokens = min(max(microbatch_tokens, longest), steps)  # a longer single row travels alone
    groups = input_groups(facts, stage.stage, stage.input_groups)
    exact, layer = exact_parts(
        _widest(demands, facts, groups, tokens, recompute=recompute), tokens, groups,
        input_bytes=facts.dtype_bytes, low_bytes=product_bytes(facts, stage), recompute=recompute,
        copies=any(demand.lora.use_dora for demand in demands),
    )  # fmt: skip
    parameters = max(adapter_parameters(one.lora, facts, stage.stage) for one in demands)
    shape = widest_shape(facts, stage, stages, tokens, longest, exact, layer, parameters)
    return Worst(planner.tokens_held(steps, tokens, stages)[stage.stage], shape)


def widest_shape(
    facts: ModelFacts,
    stage: StageReport,
    stages: int,
    tokens: int,
    longest: int,
    exact: int,
    layer: int,
    parameters: int,
) -> Shape:
    """Of a microbatch whose rows all have ``longest`` tokens, all of which are learnt. ``exact`` and ``layer``: see
    ``exact_parts``; ``parameters``: of the largest adapter on this stage.
    """
    learnt = tokens if stage.stage == stages - 1 else 0
    return Shape(
        tokens=tokens,
        squared_tokens=tokens * longest,
        supervised=learnt,
        loss_rows=most_loss_rows(learnt, facts.vocab_size, stage.device),
        exact_bytes=exact,
        layer_bytes=layer,
        floor_bytes=floor_bytes(parameters, tokens * facts.hidden_size * facts.dtype_bytes, stage.device),
        lowest_group=0 if stage.stage == 0 else NONE_BELOW,
        expert_rows=_expert_rows(facts, stage, tokens),
    )


def _expert_rows(facts: ModelFacts, stage: StageReport, tokens: int) -> int:
    """All tokens may choose the same expert."""
    if not any(one.stage == stage.stage for one in facts.experts or ()):
        return 0
    return tokens if stage.device.startswith("cuda") else min(tokens, MOST_EXPERT_ROWS)


def activation_bytes(fit: StageFit, shape: Shape, held: int) -> int:
    """The most that activations take while a stage holds ``held`` tokens: one microbatch at its peak, of the others what
    they keep."""
    others = fit.kept_bytes(shape) * (held - shape.tokens) / shape.tokens if shape.tokens else 0.0
    return int((others + fit.peak_bytes(shape)) * fit.correction)


def product_bytes(facts: ModelFacts, stage: StageReport) -> int:
    """Of a low-rank activation. On a CPU that cannot multiply half-precision numbers, products are taken in float32."""
    return facts.dtype_bytes if stage.device.startswith("cuda") else _MASTER_BYTES


def _widest(
    demands: Sequence[Demand],
    facts: ModelFacts,
    groups: Sequence[ModuleGroup],
    tokens: int,
    *,
    recompute: bool,
) -> list[tuple[Ranks, int]]:
    """A microbatch of ``tokens`` with as many low-rank activations as it can have: first the rows of the task that leaves
    most per token; of such, those that leave least in what a peak may be without. All others are there, too, without a
    token, as each may bring inputs that are kept."""

    def width(adapter: tuple[Ranks, Demand]) -> tuple[int, int]:
        lows = [low_rank(adapter[0], group) for group in groups]
        if not recompute:
            return sum(lows), -sum(lows[-1:])
        layers = groupby(zip(groups, lows, strict=True), key=lambda pair: pair[0].layer)
        return sum(lows), -max((sum(low for _, low in own) for _, own in layers), default=0)

    parts, left = [], tokens
    adapters = [(kept_of(facts, demand.lora), demand) for demand in demands]
    for ranks, demand in sorted(adapters, key=width, reverse=True):
        own = min(demand.step_tokens, left)
        parts.append((ranks, own))
        left -= own
    return parts


def stage_need(
    demands: Sequence[Demand],
    facts: ModelFacts,
    stage: StageReport,
    stages: int,
    microbatch_tokens: int,
    fit: StageFit,
    *,
    recompute: bool = False,
) -> MemoryNeed:
    """The most that one stage needs with these tasks in training, as far as the fit's interval goes."""
    worst = worst_case(demands, facts, stage, stages, microbatch_tokens, recompute=recompute)
    adapters = sum(adapter_bytes(demand.lora, facts, stage.stage, demand.moments) for demand in demands)
    activations = activation_bytes(fit, worst.microbatch, worst.tokens)
    weights = stage.resident_bytes + dense_bytes(facts, stage)
    return MemoryNeed(weights, adapters, activations, worst.tokens)


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The memory of one pipeline, as a rule of what fits."""

    facts: ModelFacts
    stages: tuple[StageReport, ...]
    microbatch_tokens: int
    budget: int | None  # bytes per stage; None: what the device has
    margin: float  # part of the budget that is kept free
    demands: Mapping[str, Demand]  # by uid
    recompute: bool = False  # activations, in the backward
    learned: Mapping[int, StageFit] = field(default_factory=dict)  # by stage; the prior where there is none

    def check(self, uids: Iterable[str]) -> MemoryCheck:
        """Whether these tasks fit together. Raises KeyError for a uid without a demand."""
        return min(self.by_stage(uids), key=lambda check: check.budget - check.needed)

    def by_stage(self, uids: Iterable[str]) -> tuple[MemoryCheck, ...]:
        """The same for each stage by itself."""
        demands = [self.demands[uid] for uid in uids]
        return tuple(self._of_stage(stage, demands) for stage in self.stages)

    def budget_of(self, stage: StageReport) -> int:
        """Bytes that may be used."""
        return int((self.budget if self.budget is not None else stage.capacity_bytes) * (1 - self.margin))

    def fit_of(self, stage: StageReport) -> StageFit:
        """What was learned of it, else the prior."""
        known = self.learned.get(stage.stage)
        return (
            known
            if known is not None
            else prior(self.facts, stage, len(self.stages), recompute=self.recompute)
        )

    def corrected(self, stage: int, uids: Iterable[str]) -> StageFit:
        """The fit of ``stage`` after memory ran out there with these tasks in training: they never fit again."""
        report = self.stages[stage]
        fit = self.fit_of(report)
        check = self._of_stage(report, [self.demands[uid] for uid in uids if uid in self.demands])
        need = check.need
        if not check.fits or need is None or need.activations <= 0:
            return fit
        room = check.budget - need.weights - need.adapters
        return replace(fit, correction=fit.correction * (room / need.activations) * _BEYOND)

    def _of_stage(self, stage: StageReport, demands: Sequence[Demand]) -> MemoryCheck:
        count = len(self.stages)
        need = stage_need(
            demands,
            self.facts,
            stage,
            count,
            self.microbatch_tokens,
            self.fit_of(stage),
            recompute=self.recompute,
        )
        budget = self.budget_of(stage)
        return MemoryCheck(need.total <= budget, stage.stage, need.total, budget, need)


_BEYOND = 1.02  # so much more than the room there was


def _padded(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
