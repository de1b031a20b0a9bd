"""Computes one stage: forward and backward of microbatches, the adapters' lives. No communication.

The order of calls is the stream's. A task's update comes only after all its microbatches have come back (rank
0 issues step k+1 after step k has returned), so parameters never change between a microbatch's forward and
its backward; the engine refuses anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.lora.experts import adapt_experts
from mlora_worker.lora.groups import Products
from mlora_worker.lora.linear import Bound, adapt_linears
from mlora_worker.lora.select import products_for
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.facts import facts_of
from mlora_worker.model.scores import part_scores
from mlora_worker.model.stage import Stage
from mlora_worker.model.transfer import to_device
from mlora_worker.pipeline.binding import bound_groups, position_weights
from mlora_worker.pipeline.loaded import LoadedTask, load_task
from mlora_worker.pipeline.objective_losses import answers_correct, segment_losses_of, summed_parts
from mlora_worker.pipeline.results import Backwarded, Evaluated, Forwarded, OutOfOrder, StageState
from mlora_worker.runtime.allocator import give_back_small_blocks
from mlora_worker.storage.artifacts.aside import Aside
from mlora_worker.stream.items import Evaluate, Load, Segment, Train, Update


@dataclass(frozen=True, slots=True)
class _Flight:
    """A microbatch between its forward and its backward."""

    input: Tensor  # what gradients go back for: a leaf; requires one but on stage 0
    output: Tensor  # what gradients come back for, or the sum of all losses on the last stage
    segments: tuple[Segment, ...]
    tasks: tuple[LoadedTask, ...]


class StageEngine:
    """Not thread-safe: one thread calls it. ``recompute``: keep less for the backward, which then computes each
    layer's forward again. ``products``: others than those of the stage's device. ``aside``: where copies of what tasks
    have learnt go.
    """

    def __init__(
        self,
        stage: Stage,
        *,
        recompute: bool = False,
        products: Products | None = None,
        aside: Aside | None = None,
    ) -> None:
        self.stage = stage
        self._aside = aside if aside is not None else Aside()
        self._recompute = recompute
        self._products = products if products is not None else products_for(stage.device)
        self._bound = Bound()
        self._groups = adapt_linears(
            stage.layers, stage.linears, stage.input_groups(), self._products, self._bound
        )
        adapt_experts(stage.experts, self._bound)
        self._facts = facts_of(stage.architecture, stage.stages, stage.dtype)
        self._tasks: dict[str, LoadedTask] = {}
        self._flights: dict[int, _Flight] = {}

    def load(self, load: Load, state: Mapping[str, Tensor] | None = None) -> None:
        """A task joins with fresh parameters, or with those and the moments of ``state`` (as ``snapshot`` gives them; this
        stage's part at least), or at 0 updates with the parameters that ``state`` has by PEFT's names. Raises
        UnknownTargetModule, InvalidTarget.
        """
        if load.task in self._tasks:
            raise OutOfOrder(f"task {load.task} is already loaded")
        stage = self.stage
        self._tasks[load.task] = load_task(
            load, state, self._groups, stage.experts, self._facts, stage.dtype, stage.device
        )

    def unload(self, task: str) -> None:
        """A task leaves; its microbatches in flight may still come back. All that it held is free then."""
        self._tasks.pop(task, None)
        self._bound.clear()  # of the newest microbatch, which may be its last one
        self._tidy()

    def apply(self, task: str, update: Update) -> None:
        """Close a step of ``task``."""
        own = self._task(task)
        if any(own is other for flight in self._flights.values() for other in flight.tasks):
            raise OutOfOrder(
                f"update of step {update.step} of task {task} while a microbatch of it is in flight"
            )
        own.optimizer.apply(update)

    def discard(self, task: str) -> None:
        """Forget what the open step of ``task`` has added so far: it is issued again."""
        own = self._task(task)
        if any(own is other for flight in self._flights.values() for other in flight.tasks):
            raise OutOfOrder(f"a step of task {task} is discarded while a microbatch of it is in flight")
        own.adapter.forget_gradients()

    def settle(self, segment: Segment) -> None:
        """What a segment asks for before its forward: the former step's update, or the open step's discard."""
        if segment.update is not None:
            self.apply(segment.task, segment.update)
        if segment.discard:
            self.discard(segment.task)

    def export(self, task: str) -> dict[str, Tensor]:
        """This stage's part of the adapter: float32 on the CPU, by PEFT's names with global layer indices."""
        return self._task(task).exported(self._aside)

    def snapshot(self, task: str) -> StageState:
        """A copy, on the CPU, of all that this stage needs to take the task up again after its last update."""
        return self._task(task).snapshot(self._aside)

    def restore(self, task: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace this stage's parameters by ``tensors`` (by PEFT's names; those of other stages are passed over)."""
        self._task(task).adapter.restore(tensors)

    def task_bytes(self, task: str) -> int:
        """Of the task's parameters, gradients and moments on this stage."""
        return self._task(task).bytes

    def forward(
        self, item: Train, *, token_ids: Tensor | None, hidden: Tensor | None, labels: Tensor | None
    ) -> Forwarded:
        """Settle the segments, then run one microbatch.

        token_ids [tokens] int64 on stage 0, hidden [tokens, ``Stage.entering.width``] on the others; labels [tokens] int64
        on the last: the target at each position, -100 where nothing is predicted.
        """
        if item.number in self._flights:
            raise OutOfOrder(f"microbatch {item.number} is already in flight")
        for segment in item.segments:
            self.settle(segment)
        tasks = tuple(self._task(segment.task) for segment in item.segments)
        stage = self.stage
        rows = _packed(item.segments, stage.device)
        if stage.first:
            assert token_ids is not None
            source, inputs = stage.entering.divided(stage.embed(to_device(token_ids, stage.device), rows))
        else:
            assert hidden is not None
            source, inputs = stage.entering.divided(hidden.detach().to(stage.device, stage.dtype))
            source = source.detach().requires_grad_()
        if len(source) != rows.tokens:
            raise OutOfOrder(f"microbatch {item.number} has {len(source)} tokens, its segments {rows.tokens}")

        bind = self._binder(item.segments, tasks)
        bind()
        output = stage.through_layers(source, inputs, rows, bind if self._recompute else None)
        if not stage.last:
            self._flights[item.number] = _Flight(source, output, item.segments, tasks)
            return Forwarded(hidden=stage.leaving.joined(output.detach(), inputs))
        assert labels is not None
        parts = summed_parts(item.segments)
        sums = stage.losses(output, labels, parts, position_weights(item.segments), rows.segments)
        found = segment_losses_of(item.segments, [task.preference for task in tasks], sums, labels)
        # Plain sums: each adapter weighs its own gradients (lora/function.py).
        self._flights[item.number] = _Flight(source, found.losses.sum(), item.segments, tasks)
        return Forwarded(losses=found.losses.detach(), rewards=found.rewards)

    @torch.no_grad()
    def evaluate(
        self, item: Evaluate, *, token_ids: Tensor | None, hidden: Tensor | None, labels: Tensor | None
    ) -> Evaluated:
        """Apply the update that comes along, then run one microbatch forward, without dropout; of the base's own reference,
        without the adapter, too. Arguments as ``forward``."""
        if item.update is not None:
            self.apply(item.task, item.update)
        stage, rows = self.stage, PackedRows(item.lengths, self.stage.device)
        if stage.first:
            assert token_ids is not None
            source = stage.embed(to_device(token_ids, stage.device), rows)
        else:
            assert hidden is not None
            source = hidden.to(stage.device, stage.dtype)
        if item.reference == "base":
            self._bound.clear()
        else:
            self._binder([_evaluated(item)], [self._task(item.task)], evaluating=True)()
        output = stage.run_layers(source, rows)
        if not stage.last:
            return Evaluated(hidden=output)
        assert labels is not None
        return Evaluated(scores=self._scores(item, output, labels))

    def _scores(self, item: Evaluate, output: Tensor, labels: Tensor) -> Tensor:
        """See ``Evaluated``."""
        stage, segment = self.stage, _evaluated(item)
        assert stage.norm is not None
        assert stage.head_weight is not None
        end = stage.normed, stage.head_weight, stage.logit_cap
        if item.reference is not None:
            return -part_scores(output, labels, item.lengths, *end)[:, 0]
        parts, weights = summed_parts([segment]), position_weights([segment])
        sums, correct = part_scores(output, labels, parts, *end, weights).T.contiguous()
        found = segment_losses_of([segment], [self._task(item.task).preference], sums, labels)
        if found.rewards is None:
            return torch.stack([found.losses[0], correct.sum()])
        return torch.cat([found.losses, answers_correct(segment, correct)[None], found.rewards[0]])

    @torch.no_grad()
    def logits(self, item: Train, token_ids: Tensor) -> Tensor:
        """[tokens, vocabulary] of a microbatch, where one stage holds the whole model: to compare with other
        programs, never while training.
        """
        stage = self.stage
        assert stage.first
        rows = _packed(item.segments, stage.device)
        self._binder(item.segments, tuple(self._task(segment.task) for segment in item.segments))()
        return stage.logits(stage.run_layers(stage.embed(token_ids.to(stage.device), rows), rows))

    def backward(self, number: int, grad: Tensor | None) -> Backwarded:
        """Backward of microbatch ``number``; grad [tokens, ``Stage.leaving.learnt``] of its output, None on the last
        stage."""
        flight = self._flights.pop(number)
        # On stage 0 nothing below the lowest adapted module has a graph, and without adapters there is none
        # at all.
        if flight.output.requires_grad:
            if grad is not None:
                grad = grad.to(flight.output)
            torch.autograd.backward(flight.output, grad)
        nothing = torch.zeros((), dtype=torch.float64, device=self.stage.device)
        norms = [
            task.adapter.squared_norm() if segment.closes_step else nothing
            for segment, task in zip(flight.segments, flight.tasks, strict=True)
        ]
        return Backwarded(
            gradient=None if self.stage.first else flight.input.grad,
            squared_norms=torch.stack(norms),
        )

    def abandon(self, number: int) -> None:
        """Forget a microbatch that will not come back, and what a forward or backward that failed has left."""
        self._flights.pop(number, None)
        self._bound.clear()
        for group in self._groups:
            group.forget()
        self._tidy()

    def _tidy(self) -> None:
        """Much was let go of: what the heap keeps of it goes back to the kernel, where that counts it."""
        if self._aside.is_counted:
            give_back_small_blocks()

    def blank(self, tokens: int, width: int) -> Tensor:
        """[tokens, width] zeros: what travels in the place of what could not be computed."""
        return torch.zeros(tokens, width, dtype=self.stage.dtype, device=self.stage.device)

    def _task(self, task: str) -> LoadedTask:
        try:
            return self._tasks[task]
        except KeyError:
            raise OutOfOrder(f"task {task} is not loaded") from None

    def _binder(
        self, segments: Iterable[Segment], tasks: Iterable[LoadedTask], *, evaluating: bool = False
    ) -> Callable[[], None]:
        """What gives the linear modules the products of this microbatch. ``evaluating``: without dropout."""
        groups = bound_groups(self._groups, segments, tasks, evaluating=evaluating)
        prepared, magnitudes = self._products.prepare(groups), groups.magnitudes()
        experts, rows = groups.experts(), [placed.rows for placed in groups.placed]

        def bind() -> None:
            bound = self._bound
            bound.tasks, bound.groups, bound.magnitudes, bound.experts = rows, prepared, magnitudes, experts

        return bind


def _evaluated(item: Evaluate) -> Segment:
    """What is evaluated, as a segment of no step."""
    return Segment(
        task=item.task,
        step=0,
        lengths=item.lengths,
        first_row=0,
        weight=0.0,
        row_weights=item.row_weights,
        pairs=item.pairs,
        unpaired=item.unpaired,
        closes_step=False,
    )


def _packed(segments: Iterable[Segment], device: torch.device) -> PackedRows:
    own = tuple(segments)
    lengths = tuple(length for segment in own for length in segment.lengths)
    return PackedRows(lengths, device, tuple(segment.tokens for segment in own))
