"""What ``model.stage_need`` says, from sums: what a task brings to a stage is worked out once, not with every set. Pure.

All that the model asks of a set of tasks are sums, maxima and one order among them, so a set costs a few additions a task.
The bytes are the same to the last one (a property test compares them); the model itself stays the readable text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from mlora_operator.memory.fit import StageFit
from mlora_operator.memory.model import (
    Demand,
    MemoryModel,
    activation_bytes,
    adapter_bytes,
    adapter_parameters,
    product_bytes,
    widest_shape,
)
from mlora_worker.protocol import ModelFacts, StageReport
from mlora_worker.stream.footprint import InputGroup, Shape, input_groups, low_rank
from mlora_worker.stream.planner import tokens_held
from mlora_worker.stream.targets import ranks_of

ToldGroups = tuple[int, tuple[tuple[str, ...], ...]]  # number of a stage, its input groups as it reports them


class Brought(NamedTuple):
    """By one task to one stage."""

    low: int  # low-rank activations of a token, over all layers. First: the widest task is the largest tuple
    less_low: int  # minus those of a layer, as ``StageLayout.brought`` says
    step_tokens: int
    longest_row: int
    adapter: int  # bytes, with gradients and moments
    parameters: int
    groups: int  # input groups that it adapts: a bit each
    by_layer: tuple[int, ...]  # low-rank activations of a token in each layer; only with recomputation


class Inputs(NamedTuple):
    """Lengths of the inputs that are kept for a token."""

    whole: int
    last: int  # of the last group
    by_layer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageLayout:
    """The modules of one stage: what a task brings to it, whatever the memory is like."""

    facts: ModelFacts
    stage: int
    recompute: bool
    groups: tuple[InputGroup, ...]
    layers: tuple[tuple[int, ...], ...]  # positions of each layer's groups
    inputs: dict[int, Inputs] = field(default_factory=dict)  # what was reckoned already

    def brought(self, demand: Demand) -> Brought:
        """A layer counts what a peak may be without: the last group of one layer; with recomputation all groups of one."""
        lora, stage = demand.lora, self.stage
        ranks = ranks_of(self.facts, lora)
        lows = [low_rank(ranks, group) for group in self.groups]
        by_layer = tuple(sum(lows[index] for index in own) for own in self.layers)
        layer = max(by_layer, default=0) if self.recompute else sum(lows[-1:])
        return Brought(
            low=sum(lows),
            less_low=-layer,
            step_tokens=demand.step_tokens,
            longest_row=demand.longest_row,
            adapter=adapter_bytes(lora, self.facts, stage),
            parameters=adapter_parameters(lora, self.facts, stage),
            groups=sum(1 << index for index, low in enumerate(lows) if low),
            by_layer=by_layer if self.recompute else (),
        )

    def inputs_of(self, adapted: int) -> Inputs:
        """Of the groups in ``adapted``, a bit each. Tasks adapt the same few sets, whatever else they ask for."""
        known = self.inputs.get(adapted)
        if known is None:
            widths = [group.inputs if adapted >> index & 1 else 0 for index, group in enumerate(self.groups)]
            by_layer = tuple(sum(widths[index] for index in own) for own in self.layers)
            known = self.inputs[adapted] = Inputs(sum(widths), sum(widths[-1:]), by_layer)
        return known


@dataclass(frozen=True, slots=True)
class StageReckoning:
    """One stage under one model."""

    layout: StageLayout
    stage: StageReport
    stages: int
    microbatch_tokens: int
    fit: StageFit
    budget: int  # bytes

    def fits(self, tasks: Sequence[Brought]) -> bool:
        certain = self.stage.resident_bytes + sum(one.adapter for one in tasks)
        return certain <= self.budget and certain + self._activations(tasks) <= self.budget

    def needed(self, tasks: Sequence[Brought]) -> int:
        """Bytes."""
        return self.stage.resident_bytes + sum(one.adapter for one in tasks) + self._activations(tasks)

    def _activations(self, tasks: Sequence[Brought]) -> int:
        if not tasks:
            return activation_bytes(self.fit, Shape(0, 0), 0)
        longest = max(one.longest_row for one in tasks)
        steps = sum(one.step_tokens for one in tasks)
        tokens = min(max(self.microbatch_tokens, longest), steps)
        exact, layer = self._exact(tasks, tokens)
        shape = widest_shape(
            self.layout.facts, self.stage, self.stages, tokens, longest, exact, layer,
            max(one.parameters for one in tasks),
        )  # fmt: skip
        return activation_bytes(self.fit, shape, tokens_held(steps, tokens, self.stages)[self.stage.stage])

    def _exact(self, tasks: Sequence[Brought], tokens: int) -> tuple[int, int]:
        """``footprint.exact_parts`` of the microbatch with the most low-rank activations: all of it, and of a layer."""
        low = last_low = adapted = 0
        by_layer = [0] * len(self.layout.layers)
        left = tokens
        for one in sorted(tasks, reverse=True):
            own = min(one.step_tokens, left)
            left -= own
            low += one.low * own
            last_low -= one.less_low * own
            adapted |= one.groups
            for layer, low_there in enumerate(one.by_layer):
                by_layer[layer] += low_there * own
        inputs = self.layout.inputs_of(adapted)
        element, half = tokens * self.layout.facts.dtype_bytes, product_bytes(self.layout.facts, self.stage)
        if self.layout.recompute:
            figures = zip(inputs.by_layer, by_layer, strict=True)
            return 0, max((wide * element + own * half for wide, own in figures), default=0)
        return inputs.whole * element + low * half, inputs.last * element + last_low * half


def told_groups(stages: Iterable[StageReport]) -> tuple[ToldGroups, ...]:
    return tuple((stage.stage, stage.input_groups) for stage in stages)


def layouts(facts: ModelFacts, told: Sequence[ToldGroups], *, recompute: bool) -> tuple[StageLayout, ...]:
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
    own = laid_out or layouts(model.facts, told_groups(model.stages), recompute=model.recompute)
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
