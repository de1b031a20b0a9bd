"""A driver that chains stage engines by hand, without links or processes, and PEFT with a plain loop to
compare with.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from peft.utils.save_and_load import get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, get_scheduler

from mlora_worker.data.schedule import learning_rate
from mlora_worker.lora.dropout import dropout_mask, token_keys
from mlora_worker.model.load import load_stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.stream.items import Load, Segment, Train, Update

IGNORED = -100


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Row:
    """``labels[i]`` is the target at position i, -100 where nothing is predicted."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Base:
    """A model with its folder; also the source of its tensors."""

    folder: Path
    model: PreTrainedModel

    def names(self) -> Collection[str]:
        tied = self.model.config.tie_word_embeddings
        return [name for name in self.model.state_dict() if not (tied and name == "lm_head.weight")]

    def tensor(self, name: str) -> Tensor:
        return self.model.state_dict()[name]


@dataclass(frozen=True)
class Task:
    name: str
    lora: LoRAConfig
    training: Training
    rows: Sequence[Row]
    steps: int

    def batch(self, step: int) -> list[Row]:
        """Rows of an optimizer step, all its mini-batches; the rows go round."""
        size = self.training.batch_size * self.training.gradient_accumulation_steps
        first = (step - 1) * size
        return [self.rows[(first + i) % len(self.rows)] for i in range(size)]

    def weight(self, step: int) -> float:
        supervised = sum(label != IGNORED for row in self.batch(step) for label in row.labels)
        return 1 / supervised if supervised else 0.0


@dataclass
class Trained:
    start: dict[str, Tensor]
    adapter: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # mean over the step's supervised tokens


class Chain:
    """Stages of one model, joined by hand."""

    def __init__(self, base: Base, stages: int, dtype: torch.dtype = torch.float32) -> None:
        self.engines = [
            StageEngine(load_stage(base.folder, base, stage, stages, dtype, torch.device("cpu")))
            for stage in range(stages)
        ]

    def export(self, task: str) -> dict[str, Tensor]:
        return {name: tensor for engine in self.engines for name, tensor in engine.export(task).items()}

    def base_weights(self) -> Iterator[Tensor]:
        for engine in self.engines:
            yield from engine.stage.layers.state_dict().values()

    def run(self, item: Train, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Losses and squared norms, [segments] each, of one microbatch there and back."""
        token_ids: Tensor | None = torch.tensor([i for row in rows for i in row.ids])
        labels = torch.tensor([label for row in rows for label in row.labels])
        hidden = losses = gradient = None
        for engine in self.engines:
            last = engine.stage.last
            out = engine.forward(item, token_ids=token_ids, hidden=hidden, labels=labels if last else None)
            token_ids, hidden, losses = None, out.hidden, out.losses
        assert losses is not None
        norms = torch.zeros(len(item.segments), dtype=torch.float64)
        for engine in reversed(self.engines):
            back = engine.backward(item.number, gradient)
            gradient = back.gradient
            norms += back.squared_norms
        return losses, norms


def train_together(
    chain: Chain, tasks: Sequence[Task], rows_per_microbatch: int | None = None
) -> dict[str, Trained]:
    """Train ``tasks`` in shared microbatches; microbatch j of a step holds the j-th part of each task's
    rows.
    """
    results = {}
    for task in tasks:
        for engine in chain.engines:
            engine.load(Load(number=0, task=task.name, lora=task.lora, training=task.training))
        results[task.name] = Trained(start=chain.export(task.name))
    updates: dict[str, Update | None] = {}
    number = 0
    for step in range(1, max(task.steps for task in tasks) + 1):
        active = [task for task in tasks if step <= task.steps]
        parts = {task.name: _parts(task.batch(step), rows_per_microbatch) for task in active}
        losses = dict.fromkeys(parts, 0.0)
        norms = dict.fromkeys(parts, 0.0)
        for j in range(max(map(len, parts.values()))):
            number += 1
            segments, rows = [], []
            for task in active:
                if j >= len(parts[task.name]):
                    continue
                own = parts[task.name][j]
                segments.append(
                    Segment(
                        task=task.name,
                        step=step,
                        lengths=tuple(len(row.ids) for row in own),
                        first_row=sum(map(len, parts[task.name][:j])),
                        weight=task.weight(step),
                        closes_step=j == len(parts[task.name]) - 1,
                        update=updates.pop(task.name, None),
                    )
                )
                rows += own
            sums, squares = chain.run(Train(number=number, segments=tuple(segments)), rows)
            for segment, loss, square in zip(segments, sums.tolist(), squares.tolist(), strict=True):
                losses[segment.task] += loss * segment.weight
                norms[segment.task] += square
        for task in active:
            results[task.name].losses.append(losses[task.name])
            if task.weight(step) == 0:
                continue
            limit = task.training.max_grad_norm
            updates[task.name] = Update(
                step=step,
                learning_rate=learning_rate(step, task.steps, task.training),
                clip=min(1.0, limit / (norms[task.name] ** 0.5 + 1e-6)) if limit else 1.0,
            )
    for task in tasks:
        update = updates.pop(task.name, None)
        for engine in chain.engines:
            if update is not None:
                engine.apply(task.name, update)
        results[task.name].adapter = chain.export(task.name)
        for engine in chain.engines:
            engine.unload(task.name)
    return results


def _parts(rows: list[Row], size: int | None) -> list[list[Row]]:
    size = size or len(rows)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


class SameMask(torch.nn.Module):
    """Takes the place of PEFT's dropout on one module: our mask, on padded rows, multiplied by plain
    autograd.
    """

    def __init__(self, task: Task, path: str) -> None:
        super().__init__()
        self.task, self.path = task, path
        self.step, self.first_row, self.lengths = 0, 0, [0]

    def forward(self, x: Tensor) -> Tensor:
        keys = token_keys(self.task.training.seed, self.step, self.first_row, self.lengths, x.device)
        mask = dropout_mask(keys, self.path, x.shape[-1], self.task.lora.dropout)
        kept = (mask.bits(slice(None)) != 0).to(x.dtype) / (1 - self.task.lora.dropout)
        return x * torch.nn.utils.rnn.pad_sequence(kept.split(self.lengths), batch_first=True)


def _first_of_group(path: str) -> str:
    """Modules that share their input share its mask, which bears the name of the first (Llama's names)."""
    parent, _, name = path.rpartition(".")
    first = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
    return f"{parent}.{first.get(name, name)}"


def train_with_peft(base: Base, task: Task, start: Mapping[str, Tensor]) -> Trained:
    """Hugging Face PEFT, one task, padded mini-batches, torch's own clipping and AdamW; dropout by
    ``SameMask``.
    """
    config = LoraConfig(
        r=task.lora.rank,
        lora_alpha=task.lora.alpha,
        target_modules=task.lora.target_modules[0]
        if task.lora.target_modules == ("all-linear",)
        else list(task.lora.target_modules),
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(copy.deepcopy(base.model), config).train()
    set_peft_model_state_dict(model, dict(start))
    masks = []
    if task.lora.dropout:
        for name, module in model.named_modules():
            if isinstance(module, LoraLayer):
                masks.append(SameMask(task, _first_of_group(name.removeprefix("base_model.model."))))
                module.lora_dropout["default"] = masks[-1]
    parameters = [p for p in model.parameters() if p.requires_grad]
    training = task.training
    optimizer = torch.optim.AdamW(parameters, lr=training.learning_rate, weight_decay=training.weight_decay)
    scheduler = get_scheduler(training.schedule.value, optimizer, training.warmup_steps, task.steps)
    result = Trained(start=dict(start))
    for step in range(1, task.steps + 1):
        loss_of_step = 0.0
        for number, rows in enumerate(_parts(task.batch(step), training.batch_size)):
            for dropout in masks:
                dropout.step, dropout.first_row = step, number * training.batch_size
                dropout.lengths = [len(row.ids) for row in rows]
            longest = max(len(row.ids) for row in rows)
            ids = torch.zeros(len(rows), longest, dtype=torch.int64)
            labels = torch.full((len(rows), longest), IGNORED)
            mask = torch.zeros(len(rows), longest, dtype=torch.int64)
            for i, row in enumerate(rows):
                length = len(row.ids)
                ids[i, :length], labels[i, :length] = torch.tensor(row.ids), torch.tensor(row.labels)
                mask[i, :length] = 1
            # In float64, as torch's own float32 cross entropy on the CPU is off by more than all the rest
            # together when the vocabulary is large (docs/contributing/numerics.md).
            logits = model(input_ids=ids, attention_mask=mask).logits.double()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss * task.weight(step)
            loss.backward()
            loss_of_step += loss.item()
        if training.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(parameters, training.max_grad_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        result.losses.append(loss_of_step)
    result.adapter = get_peft_model_state_dict(model)
    return result


def largest_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """Largest norm of a tensor's difference relative to the tensor's norm. The names must be the same."""
    assert sorted(found) == sorted(wanted)
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


@dataclass(frozen=True)
class Kit:
    """What the tests call."""

    chain: Callable[..., Chain] = Chain
    train: Callable[..., dict[str, Trained]] = train_together
    peft: Callable[..., Trained] = train_with_peft
    difference: Callable[..., float] = largest_difference
    task: Callable[..., Task] = Task
    row: Callable[..., Row] = Row
    base: Callable[..., Base] = Base


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    """A tiny random Llama with grouped key heads and a tied head."""
    return tiny_llama(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(scope="session")
def untied_base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return tiny_llama(tmp_path_factory.mktemp("untied"), tied=False)


def tiny_llama(folder: Path, *, tied: bool) -> Base:
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=211,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        initializer_range=0.08,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    config.save_pretrained(folder)
    return Base(folder, model)


@pytest.fixture(scope="session")
def rows() -> Callable[[int, int], list[Row]]:
    """``rows(count, seed)``: random rows of 6 to 24 tokens whose last two thirds are to be learnt."""

    def make(count: int, seed: int) -> list[Row]:
        generator = torch.Generator().manual_seed(seed)
        made = []
        for _ in range(count):
            length = int(torch.randint(6, 25, (), generator=generator))
            ids = torch.randint(0, 211, (length,), generator=generator).tolist()
            prompt = length // 3
            targets = [*ids[1:], IGNORED]
            made.append(Row(tuple(ids), tuple([IGNORED] * prompt + targets[prompt:])))
        return made

    return make
