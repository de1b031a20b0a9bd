"""What ``model.stage_need`` says, from sums: what a task brings to a stage is worked out once, not with every set. Pure.

All that the model asks of a set of tasks are sums, maxima and one order among them, so a set costs a few additions a task.
The bytes are the same to the last one (a property test compares them); the model itself stays the readable text.
"""

from __future__ import annotations

import sys
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from mlora_operator.memory.fit import LEAST_INTERVAL, StageFit
from mlora_operator.memory.model import (
    Demand,
    MemoryModel,
    activation_bytes,
    adapter_bytes,
    adapter_parameters,
    dense_bytes,
    product_bytes,
    widest_shape,
)
from mlora_worker.protocol import ModelFacts, StageReport
from mlora_worker.stream.footprint import (
    ModuleGroup,
    Shape,
    copied,
    floor_bytes,
    input_groups,
    low_rank,
)
from mlora_worker.stream.planner import tokens_held
from mlora_worker.stream.targets import kept_of

_WIDTHS = 10_000  # that are remembered

ReportedGroups = tuple[
    int, tuple[tuple[str, ...], ...]
]  # number of a stage, its input groups as it reports them


class Brought(NamedTuple):
    """By one task to one stage."""

    low: int  # low-rank activations of a token, over all layers. First: the widest task is the largest tuple
    less_low: int  # minus those of a layer, as ``StageLayout.brought`` says
    step_tokens: int
    longest_row: int
    adapter: int  # bytes, with gradients and moments
    parameters: int
    groups: int  # input groups that it adapts: a bit each; and one behind them with DoRA
    by_layer: tuple[int, ...]  # low-rank activations of a token in each layer; only with recomputation


class Inputs(NamedTuple):
    """Lengths of the inputs that are kept for a token."""

    whole: int
    last: int  # of the last group
    copied: int  # of a copy of gradients, see ``footprint.copied``
    by_layer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The modules of one stage: what a task brings to it, whatever the memory is like."""

    facts: ModelFacts
    stage: int
    recompute: bool
    groups: tuple[ModuleGroup, ...]
    layers: tuple[tuple[int, ...], ...]  # positions of each layer's groups
    inputs: dict[int, Inputs] = field(default_factory=dict)  # what was reckoned already

    def brought(self, demand: Demand) -> Brought:
        """A layer counts what a peak may be without: the last group of one layer; with recomputation all groups of one."""
        lora, stage = demand.lora, self.stage
        kept = kept_of(self.facts, lora)
        lows = [low_rank(kept, group) for group in self.groups]
        by_layer = tuple(sum(lows[index] for index in own) for own in self.layers)
        layer = max(by_layer, default=0) if self.recompute else sum(lows[-1:])
        return Brought(
            low=sum(lows),
            less_low=-layer,
            step_tokens=demand.step_tokens,
            longest_row=demand.longest_row,
            adapter=adapter_bytes(lora, self.facts, stage, demand.moments),
            parameters=adapter_parameters(lora, self.facts, stage),
            groups=sum(1 << index for index, low in enumerate(lows) if low)
            | (lora.use_dora << len(self.groups)),
            by_layer=by_layer if self.recompute else (),
        )

    def inputs_of(self, adapted: int) -> Inputs:
        """Of the groups in ``adapted``, a bit each. Tasks adapt the same few sets, whatever else they ask for."""
        known = self.inputs.get(adapted)
        if known is None:
            widths = [group.inputs if adapted >> index & 1 else 0 for index, group in enumerate(self.groups)]
            by_layer = tuple(sum(widths[index] for index in own) for own in self.layers)
            copy = copied(self.groups) if adapted >> len(self.groups) else 0
            known = self.inputs[adapted] = Inputs(sum(widths), sum(widths[-1:]), copy, by_layer)
        return known


class Sums(NamedTuple):
    """Of the tasks of a set on one stage."""

    tasks: tuple[Brought, ...]  # the narrowest first
    certain: int  # bytes: frozen weights and adapters
    longest_row: int
    step_tokens: int
    parameters: int  # of the largest adapter
    groups: int  # that any of them adapts: a bit each


class _Curve(NamedTuple):
    """A line (``fit``) for microbatches of one width and length of rows: (exact + base + slope * layer) * factor."""

    base: float
    slope: float
    factor: float


class _Width(NamedTuple):
    """What sets have in common whose widest microbatches have as many tokens, in rows as long."""

    kept: _Curve
    forward: _Curve
    backward: _Curve
    hidden_bytes: int
    most_held: int  # tokens, however many a step has


@dataclass(frozen=True, slots=True)
class StageReckoning:
    """One stage under one model."""

    layout: StageLayout
    stage: StageReport
    stages: int
    microbatch_tokens: int
    fit: StageFit
    budget: int  # bytes
    widths: dict[tuple[int, int], _Width] = field(default_factory=dict, compare=False)

    def sums(self, tasks: Iterable[Brought]) -> Sums:
        each = tuple(sorted(tasks))
        groups = 0
        for one in each:
            groups |= one.groups
        return Sums(
            each,
            self.stage.resident_bytes
            + dense_bytes(self.layout.facts, self.stage)
            + sum(one.adapter for one in each),
            max((one.longest_row for one in each), default=0),
            sum(one.step_tokens for one in each),
            max((one.parameters for one in each), default=0),
            groups,
        )

    def fits(self, sums: Sums) -> bool:
        return sums.certain <= self.budget and self.needed(sums) <= self.budget

    def fits_beside(self, sums: Sums, one: Brought) -> bool:
        certain = sums.certain + one.adapter
        if certain > self.budget:
            return False
        tasks = list(sums.tasks)
        insort(tasks, one)
        activations = self._activations(
            tasks,
            max(sums.longest_row, one.longest_row),
            sums.step_tokens + one.step_tokens,
            max(sums.parameters, one.parameters),
            sums.groups | one.groups,
        )
        return certain + activations <= self.budget

    def needed(self, sums: Sums) -> int:
        """Bytes."""
        tasks, certain, longest, steps, parameters, groups = sums
        if not tasks:
            return certain + activation_bytes(self.fit, Shape(0, 0), 0)
        return certain + self._activations(tasks, longest, steps, parameters, groups)

    def _activations(
        self, tasks: Sequence[Brought], longest: int, steps: int, parameters: int, groups: int
    ) -> int:
        """``model.activation_bytes``, in the same floating-point operations."""
        tokens = min(max(self.microbatch_tokens, longest), steps)
        exact, layer = self._exact(tasks, tokens, groups)
        kept, forward, backward, hidden, most_held = self.widths.get((tokens, longest)) or self._width(
            tokens, longest
        )
        in_peak = max(0.0, exact - layer)
        peak = max(
            (in_peak + (forward.base + forward.slope * layer)) * forward.factor,
            (in_peak + (backward.base + backward.slope * layer)) * backward.factor,
            floor_bytes(parameters, hidden, self.stage.device) * (1 + LEAST_INTERVAL),
        )
        others = (exact + (kept.base + kept.slope * layer)) * kept.factor
        return int((others * (min(steps, most_held) - tokens) / tokens + peak) * self.fit.correction)

    def _width(self, tokens: int, longest: int) -> _Width:
        facts, fit, number = self.layout.facts, self.fit, self.stage.stage
        shape = widest_shape(facts, self.stage, self.stages, tokens, longest, 0, 0, 0)
        kept, forward, backward = (
            _Curve(line.coefficients.of(shape), line.coefficients.b5, fit.interval_factor(line, tokens))
            for line in (fit.kept, fit.forward, fit.backward)
        )
        hidden = tokens * facts.hidden_size * facts.dtype_bytes
        whole = sys.maxsize  # tokens of a step that is too long to limit anything
        most_held = tokens_held(whole, tokens, self.stages)[number]
        if len(self.widths) >= _WIDTHS:
            self.widths.clear()
        made = self.widths[tokens, longest] = _Width(kept, forward, backward, hidden, most_held)
        return made

    def _exact(self, tasks: Sequence[Brought], tokens: int, groups: int) -> tuple[int, int]:
        """``footprint.exact_parts`` of the microbatch with the most low-rank activations: all of it, and of a layer."""
        low = last_low = 0
        by_layer = [0] * len(self.layout.layers)
        left = tokens
        for one in reversed(tasks):
            own = min(one.step_tokens, left)
            left -= own
            low += one.low * own
            last_low -= one.less_low * own
            for layer, low_there in enumerate(one.by_layer):
                by_layer[layer] += low_there * own
            if not left:
                break
        inputs = self.layout.inputs_of(groups)
        element, half = tokens * self.layout.facts.dtype_bytes, product_bytes(self.layout.facts, self.stage)
        if self.layout.recompute:
            figures = zip(inputs.by_layer, by_layer, strict=True)
            layer = max((wide * element + own * half for wide, own in figures), default=0)
            return 0, layer + inputs.copied * element
        return (inputs.whole + inputs.copied) * element + low * half, inputs.last * element + last_low * half


def reported_groups(stages: Iterable[StageReport]) -> tuple[ReportedGroups, ...]:
    return tuple((stage.stage, stage.input_groups) for stage in stages)


def layouts(facts: ModelFacts, told: Sequence[ReportedGroups], *, recompute: bool) -> tuple[StageLayout, ...]:
    """One for each stage."""
    made = []
    for stage, names in told:
        groups = input_groups(facts, stage, names)
        by_layer = groupby(enumerate(groups), key=lambda numbered: numbered[1].layer)
        layers = tuple(tuple(index for index, _ in own) for _, own in by_layer)
        made.append(StageLayout(facts, stage, recompute, groups, layers))
    return tuple(made)


def reckonings(model: MemoryModel, laid_out: Sequence[StageLayout] = ()) -> tuple[StageReckoning, ...]:
    """One for each stage. ``laid_out``: the ``layouts`` of the model's stages, where they are there already."""
    own = laid_out or layouts(model.facts, reported_groups(model.stages), recompute=model.recompute)
    return tuple(
        StageReckoning(
            layout=layout,
            stage=stage,
            stages=len(model.stages),
            microbatch_tokens=model.microbatch_tokens,
            fit=model.fit_of(stage),
            budget=model.budget_of(stage),
        )
        for layout, stage in zip(own, model.stages, strict=True)
    )
