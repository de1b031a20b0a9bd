"""Tasks on small random models, and the pipeline that trains them."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from mlora_worker.coordinator.task.prepared import PreparedTask
from mlora_worker.coordinator.task.run import TaskRun
from mlora_worker.data.prepare import TokenRow
from mlora_worker.data.training_rows.step_order import StepPlan
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.frozen.weight import FrozenWeight
from mlora_worker.model.load import load_stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import DataCounts, Dataset, LoRAConfig, TaskPhase, TaskPlan, Training
from mlora_worker.stream.items import Load
from mlora_worker.stream.planner import load_of, rows_per_step
from tests.fixtures.threaded import ThreadedPipeline

IGNORED = -100
CPU = torch.device("cpu")
VOCABULARY = 211


@dataclass(frozen=True)
class Row:
    """``labels[i]`` is the target at position i, -100 where nothing is predicted. A pair has two sequences, of which the
    chosen one has ``split`` tokens."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]
    weight: float = 1.0
    split: int = 0
    desirable: bool | None = None

    @property
    def masked(self) -> Row:
        """The same row, of which nothing is to be learnt."""
        return Row(self.ids, (IGNORED,) * len(self.ids), self.weight)

    @property
    def supervised(self) -> int:
        return sum(label != IGNORED for label in self.labels)

    @property
    def tokens(self) -> TokenRow:
        ids, labels = np.array(self.ids, np.int32), np.array(self.labels, np.int32)
        return TokenRow(ids, labels, self.weight, self.split, self.desirable)


@dataclass(frozen=True)
class Base:
    """A model with its folder; also the source of its tensors."""

    folder: Path
    model: PreTrainedModel

    def names(self) -> Collection[str]:
        tied = self.model.config.tie_word_embeddings
        return [name for name in self._stored if not (tied and name == "lm_head.weight")]

    def tensor(self, name: str) -> Tensor:
        return self._stored[name]

    @functools.cached_property
    def _stored(self) -> dict[str, Tensor]:
        """Once: to collect all tensors for each that is read takes longer than all else that a stage is made of."""
        return dict(self.model.state_dict())


@dataclass(frozen=True)
class Task:
    """Trains ``steps`` optimizer steps; an epoch's last step takes the rows that are left."""

    name: str
    lora: LoRAConfig
    training: Training
    rows: Sequence[Row]
    steps: int

    @property
    def plan(self) -> StepPlan:
        return StepPlan(len(self.rows), self.training.model_copy(update={"max_steps": self.steps}))

    def batch(self, step: int) -> list[Row]:
        """Rows of an optimizer step, all its mini-batches."""
        return [self.rows[index] for index in self.plan.rows_of_step(step)]

    def supervised(self, step: int) -> int:
        """Tokens that the step's loss is the mean over."""
        return sum(row.supervised for row in self.batch(step))

    def weighted(self, step: int) -> float:
        """The same, each as its row weighs."""
        return sum(row.weight * row.supervised for row in self.batch(step))

    @property
    def load(self) -> Load:
        return Load(number=0, task=self.name, lora=self.lora, training=self.training)

    def prepared(self) -> TaskRun:
        """As the coordinator has it once its rows are tokenised and it is admitted."""
        training = self.training.model_copy(update={"max_steps": self.steps})
        plan = TaskPlan(
            uid=self.name, namespace="test", name=self.name, admitted=True, base_model="tiny", lora=self.lora,
            dataset=Dataset(inline="{}"), training=training, output_uri="file:///nowhere",
        )  # fmt: skip
        rows = [row.tokens for row in self.rows]
        load = load_of([len(row.ids) for row in rows], rows_per_step(training))
        counts = DataCounts(rows=len(rows), used=len(rows))
        run = TaskRun(plan, phase=TaskPhase.PREPARED)
        run.prepared = PreparedTask(rows, counts, self.plan, self.lora.target_modules, load)
        return run


@dataclass
class Trained:
    start: dict[str, Tensor]
    adapter: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float | None] = field(default_factory=list)  # mean over the step's supervised tokens, if any
    norms: list[float] = field(
        default_factory=list
    )  # of the gradients, where they are clipped (PEFT's alone)
    microbatches: list[int] = field(default_factory=list)  # of each step
    logs: list[dict[str, float]] = field(default_factory=list)  # of each step (TRL's alone)


def engines_of(
    base: Base,
    stages: int,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    freeze: Freeze = PlainWeight,
    freeze_head: Freeze = PlainWeight,
) -> list[StageEngine]:
    return [
        StageEngine(
            load_stage(base.folder, base, stage, stages, dtype, CPU, freeze, freeze_head), recompute=recompute
        )
        for stage in range(stages)
    ]


def train(
    base: Base,
    stages: int,
    tasks: Sequence[Task],
    *,
    budget: int = 10_000,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    freeze: Freeze = PlainWeight,
    freeze_head: Freeze = PlainWeight,
) -> dict[str, Trained]:
    """Train ``tasks`` together in one pipeline: the real dispatcher, planner, loops and engines of ``stages`` stages.

    ``budget``: most tokens of a microbatch. ``freeze``: how the base's weights are kept.
    """
    engines = engines_of(
        base, stages, dtype=dtype, recompute=recompute, freeze=freeze, freeze_head=freeze_head
    )
    frozen = [tensor.clone() for tensor in base_weights(engines)]
    results = {task.name: Trained(start=start_of(engines, task)) for task in tasks}
    pipeline = ThreadedPipeline(engines, {task.name: task.prepared() for task in tasks}, budget=budget)
    pipeline.run()
    if pipeline.error is not None:
        raise pipeline.error
    for task in tasks:
        run, result = pipeline.tasks[task.name], results[task.name]
        assert run.phase is TaskPhase.SUCCEEDED, run.failure
        result.adapter = pipeline.adapters[task.name]
        result.losses = [pipeline.losses[task.name][step] for step in range(1, task.steps + 1)]
        travelled = pipeline.microbatches_of(task.name)
        result.microbatches = [len(travelled[step]) for step in range(1, task.steps + 1)]
    assert all(map(torch.equal, frozen, base_weights(engines))), "the base model has changed"
    return results


def base_weights(engines: Sequence[StageEngine]) -> Iterator[Tensor]:
    for engine in engines:
        yield from engine.stage.layers.state_dict().values()
        for module in engine.stage.layers.modules():
            if isinstance(module, FrozenWeight):
                yield module.dense(engine.stage.dtype)


def start_of(engines: Sequence[StageEngine], task: Task) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for engine in engines:
        engine.load(task.load)
        tensors |= engine.export(task.name)
        engine.unload(task.name)
    return tensors


def largest_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest norm of a tensor's difference relative to the tensor's norm. The names must be the same."""
    assert sorted(found) == sorted(wanted)
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


def assert_same(found: Trained, wanted: Trained, *, losses: float, weights: float) -> None:
    """Each step's loss and each tensor's norm of the difference, relative to ``wanted``."""
    assert [loss is None for loss in found.losses] == [loss is None for loss in wanted.losses]
    difference = max(
        abs(one - other) / other
        for one, other in zip(found.losses, wanted.losses, strict=True)
        if one is not None and other is not None
    )
    assert difference < losses
    assert largest_difference(found.adapter, wanted.adapter) < weights


def tiny_llama(folder: Path, *, tied: bool, hidden_size: int = 48, intermediate_size: int = 80) -> Base:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    config.save_pretrained(folder)
    return Base(folder, model)


def random_pairs(count: int, seed: int, shortest: int = 3, longest: int = 12) -> list[Row]:
    """Prompts of ``shortest`` to ``longest`` random tokens, each with two answers as long."""
    generator = torch.Generator().manual_seed(seed)

    def some() -> list[int]:
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

    return [pair_of(some(), some(), some()) for _ in range(count)]


def random_answers(count: int, seed: int, shortest: int = 3, longest: int = 12) -> list[Row]:
    """Prompts and answers as above, of which about every second answer is desirable."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for pair in random_pairs(count, seed, shortest, longest):
        ids, labels = pair.ids[: pair.split], pair.labels[: pair.split]
        made.append(Row(ids, labels, desirable=bool(torch.rand((), generator=generator) < 0.5)))
    return made


def pair_of(prompt: list[int], chosen: list[int], rejected: list[int], weight: float = 1.0) -> Row:
    labels: list[int] = []
    for answer in (chosen, rejected):
        labels += [IGNORED] * (len(prompt) - 1) + answer + [IGNORED]
    return Row((*prompt, *chosen, *prompt, *rejected), tuple(labels), weight, split=len(prompt) + len(chosen))


def random_rows(
    count: int, seed: int, shortest: int = 6, longest: int = 24, vocabulary: int = VOCABULARY
) -> list[Row]:
    """Rows of ``shortest`` to ``longest`` random tokens whose last two thirds are to be learnt."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        ids = torch.randint(0, vocabulary, (length,), generator=generator).tolist()
        prompt = length // 3
        targets = [*ids[1:], IGNORED]
        made.append(Row(tuple(ids), tuple([IGNORED] * prompt + targets[prompt:])))
    return made
