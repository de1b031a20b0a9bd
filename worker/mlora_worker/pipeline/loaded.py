"""A task on a stage: its adapter and optimizer, how they begin, and what is copied of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mlora_worker.frozen.experts import FrozenExperts
from mlora_worker.lora.adapter import Adapter
from mlora_worker.lora.bound import TaskPart, TaskProducts
from mlora_worker.lora.experts import ExpertsPart, StackedPart
from mlora_worker.lora.linear import InputGroup
from mlora_worker.lora.magnitudes import GroupMagnitudes, Magnitude
from mlora_worker.lora.optimizer import TaskOptimizer
from mlora_worker.lora.stacked import Stacked
from mlora_worker.lora.vera import AnyAdapter, VeraAdapter, projections
from mlora_worker.model.facts import resolve_targets
from mlora_worker.pipeline.results import OutOfOrder, StageState
from mlora_worker.protocol import STACKED, AdapterType, LoRAConfig, ModelFacts, Objective
from mlora_worker.storage.artifacts.aside import Aside
from mlora_worker.storage.artifacts.task_state import PREFIXES
from mlora_worker.stream.items import Load
from mlora_worker.stream.targets import Target, widest


@dataclass(frozen=True, slots=True)
class Adapted:
    """Modules of one input group that a task gives the same rank and scale."""

    group: int
    positions: tuple[int, ...]  # in the group
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class LoadedTask:
    lora: LoRAConfig
    seed: int
    adapter: AnyAdapter
    optimizer: TaskOptimizer
    targets: tuple[Adapted, ...]  # in the order of the adapter's groups
    products: TaskProducts
    preference: Objective | None = None  # of a task that learns to prefer

    @property
    def bytes(self) -> int:
        """Of parameters, gradients and moments, and of what follows from them."""
        derived = sum(one.bytes for own in self.products.magnitudes for one in own.each)
        return self.adapter.bytes + self.optimizer.bytes + derived

    def exported(self, aside: Aside) -> dict[str, Tensor]:
        """The adapter: float32 on the CPU, by PEFT's names with global layer indices."""
        adapter = self.adapter
        return adapter.named(adapter.to_files(aside.copy(adapter.parameters.detach())))

    def snapshot(self, aside: Aside) -> StageState:
        """A copy, on the CPU, of all that is needed to take the task up again after its last update."""
        return StageState(
            self.optimizer.updates,
            {
                prefix + name: view
                for prefix, flat in _flats(self.adapter, self.optimizer).items()
                for name, view in self.adapter.named(self.adapter.to_files(aside.copy(flat))).items()
            },
        )


def load_task(
    load: Load,
    state: Mapping[str, Tensor] | None,
    groups: Sequence[InputGroup],
    experts: Mapping[str, FrozenExperts],
    facts: ModelFacts,
    dtype: torch.dtype,
    device: torch.device,
) -> LoadedTask:
    """With fresh parameters, or with those and the moments of ``state`` (as ``snapshot`` gives them; this stage's part at
    least), or at 0 updates with the parameters that ``state`` has by PEFT's names.

    Raises UnknownTargetModule, InvalidTarget, OutOfOrder.
    """
    targets = adapted_of(groups, facts, load.lora)
    stacked = stacked_of(experts, facts, load.lora)
    adapter = _adapter(load, targets, [target for target, _ in stacked], groups, facts, dtype, device)
    products = _products(adapter, targets, stacked, groups, load.lora)
    optimizer = TaskOptimizer(adapter, load.training, load.lora.loraplus_lr_ratio)
    if load.updates is not None:
        if state is None and not targets and not stacked:
            state = {}  # nothing of it lies on this stage
        if state is None:
            raise OutOfOrder(f"task {load.task} is to be resumed, but its state is missing")
        if load.updates == 0:
            adapter.restore(state)
        else:
            _take_up(adapter, optimizer, load.updates, state)
    return LoadedTask(
        load.lora,
        load.training.seed,
        adapter,
        optimizer,
        targets,
        products,
        load.training.preference,
    )


def _adapter(
    load: Load,
    targets: Sequence[Adapted],
    stacked: Sequence[Target],
    groups: Sequence[InputGroup],
    facts: ModelFacts,
    dtype: torch.dtype,
    device: torch.device,
) -> AnyAdapter:
    shapes = [
        {groups[one.group].paths[j]: groups[one.group].shapes[j] for j in one.positions} for one in targets
    ]
    lora, seed = load.lora, load.training.seed
    if lora.type is AdapterType.VERA:
        a, b = projections(seed, lora.rank, *widest(resolve_targets(facts, lora)))
        return VeraAdapter(shapes, a, b, start=lora.vera_start, dtype=dtype, device=device)
    return Adapter(
        shapes,
        rank=[one.rank for one in targets],
        seed=seed,
        dtype=dtype,
        device=device,
        start=lora.init_lora_weights,
        magnitudes=lora.use_dora,
        stacked=[
            Stacked(
                one.path,
                one.file_path,
                one.module.experts,
                one.module.in_features,
                one.module.out_features,
                one.rank,
                one.module.swapped,
            )
            for one in stacked
        ],
    )


def _products(
    adapter: AnyAdapter,
    targets: Sequence[Adapted],
    stacked: Sequence[tuple[Target, FrozenExperts]],
    groups: Sequence[InputGroup],
    lora: LoRAConfig,
) -> TaskProducts:
    parts = tuple(
        TaskPart(
            group=own.group,
            rank=own.rank,
            members=own.positions,
            a=stack.a,
            b=stack.b,
            grad_a=gradient.a,
            grad_b=gradient.b,
            scale=own.scale,
            mask_name=groups[own.group].name,
        )
        for own, stack, gradient in zip(targets, adapter.compute, adapter.gradients, strict=True)
    )
    return TaskProducts(parts, lora.dropout, _magnitudes(adapter, parts, groups), _experts(adapter, stacked))


def _experts(
    adapter: AnyAdapter, stacked: Sequence[tuple[Target, FrozenExperts]]
) -> Mapping[str, ExpertsPart]:
    if isinstance(adapter, VeraAdapter):
        return {}
    parts: dict[str, dict[str, StackedPart]] = {}
    modules: dict[str, FrozenExperts] = {}
    pairs = zip(stacked, adapter.stacked_values, adapter.stacked_gradients, strict=True)
    for (target, module), values, gradient in pairs:
        path, _, name = target.path.rpartition(".")
        parts.setdefault(path, {})[name] = StackedPart(values, gradient, target.scale)
        modules[path] = module
    gate_up, down = STACKED
    return {
        path: ExpertsPart(own.get(gate_up), own.get(down), *modules[path].halves)
        for path, own in parts.items()
    }


def _magnitudes(
    adapter: AnyAdapter, parts: Sequence[TaskPart], groups: Sequence[InputGroup]
) -> tuple[GroupMagnitudes, ...]:
    """As long as the base's rows; from now on they follow the adapter. Without DoRA there are none."""
    if isinstance(adapter, VeraAdapter) or not adapter.with_magnitudes:
        return ()
    made = []
    values = adapter.layout.of(adapter.parameters.detach())
    for part, own, gradient in zip(parts, values, adapter.gradients, strict=True):
        each = tuple(
            Magnitude.of(
                groups[part.group].weights[position],
                part.a[j * part.rank : (j + 1) * part.rank],
                part.b[j],
                part.scale,
                own.magnitudes[j],
                gradient.magnitudes[j],
            )
            for j, position in enumerate(part.members)
        )
        made.append(GroupMagnitudes(part.group, part.members, each))
    for group in made:
        for one in group.each:
            one.start()
            adapter.followed_by(one.refresh)
    adapter.refresh()
    return tuple(made)


def adapted_of(groups: Sequence[InputGroup], facts: ModelFacts, lora: LoRAConfig) -> tuple[Adapted, ...]:
    """In the order of the input groups. Raises UnknownTargetModule, InvalidTarget."""
    targets = {target.path: target for target in resolve_targets(facts, lora)}
    adapted = []
    for index, group in enumerate(groups):
        alike: dict[tuple[int, float], list[int]] = {}
        for position, path in enumerate(group.paths):
            if path in targets:
                alike.setdefault((targets[path].rank, targets[path].scale), []).append(position)
        adapted += [Adapted(index, tuple(own), *figures) for figures, own in alike.items()]
    return tuple(adapted)


def stacked_of(
    experts: Mapping[str, FrozenExperts], facts: ModelFacts, lora: LoRAConfig
) -> tuple[tuple[Target, FrozenExperts], ...]:
    """Parameters of ``experts`` that ``lora`` adapts, each with its module. Raises UnknownTargetModule, InvalidTarget."""
    found = ((target, target.path.rpartition(".")[0]) for target in resolve_targets(facts, lora))
    return tuple(
        (target, experts[path]) for target, path in found if target.module.experts and path in experts
    )


def _take_up(
    adapter: AnyAdapter, optimizer: TaskOptimizer, updates: int, state: Mapping[str, Tensor]
) -> None:
    for prefix, flat in _flats(adapter, optimizer).items():
        adapter.fill(flat, state, prefix)
    adapter.refresh()
    optimizer.restore(updates, *optimizer.moments)


def _flats(adapter: AnyAdapter, optimizer: TaskOptimizer) -> dict[str, Tensor]:
    """Parameters and moments, which are laid out alike, by what their names begin with in a checkpoint."""
    flats = (adapter.parameters.detach(), *optimizer.moments)
    return dict(zip(PREFIXES[: len(flats)], flats, strict=True))
