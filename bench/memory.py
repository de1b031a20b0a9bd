"""``python -m bench memory``: how well is the memory of a microbatch predicted?

Random microbatches of random tasks (rank, target modules, dropout, number and length of rows, supervised part) go
through both stages of a model. The operator's own fit sees the first 10 of them and predicts the other 40: the most bytes
that each takes of each stage. Measured are the blocks of torch's allocator, as a worker does. The same is done with the
process's RSS, above what it was before the first microbatch.

Three models: SmolLM2-135M, and two shapes with random weights, one as Qwen2's (biases, wide feed-forward), one with a large
vocabulary, where the logits are what is largest. --quantization keeps their matrices in 4 or 8 bits. --model moe takes a
mixture of experts instead, once with adapters on attention alone and once with adapters on the experts, too.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bench.base import CPU, cut_folder, smollm2_folder
from bench.options import parser
from bench.report import last_line, table
from mlora_operator.memory.fit import StageFit, fit_stage, shape_of
from mlora_operator.memory.prior import prior
from mlora_worker.frozen.linear import Freeze
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.model.facts import facts_of
from mlora_worker.model.load import load_stage
from mlora_worker.model.quantisation import freeze_of
from mlora_worker.pipeline.allocations import resident_set_bytes
from mlora_worker.pipeline.metered import MeteredEngine
from mlora_worker.protocol import (
    LoRAConfig,
    MemorySample,
    ModelSource,
    Quantization,
    StageReport,
    StorageAccess,
    Training,
)
from mlora_worker.runtime.allocator import give_back_small_blocks
from mlora_worker.storage.base_model.model_source import ModelFiles
from mlora_worker.storage.object_store.store import open_store
from mlora_worker.stream.items import Load, Segment, Train

FITTED, PREDICTED, STAGES = 10, 40, 2
GOAL = 0.25  # per cent

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen2-like": {
        "model_type": "qwen2", "hidden_size": 256, "intermediate_size": 1376, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32_000,
    },
    "large vocabulary": {
        "model_type": "llama", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 5,
        "num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 128_256,
    },
}  # fmt: skip
MIXTURE: Mapping[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 128, "intermediate_size": 384, "moe_intermediate_size": 64,
    "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_experts": 64,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "vocab_size": 16_000,
}  # fmt: skip
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = (("q_proj", "v_proj"), ATTENTION, ("all-linear",), ("gate_proj", "down_proj"))
_DOWN, _GATE_UP = "experts.down_proj", "experts.gate_up_proj"


@dataclass(frozen=True)
class Kind:
    """Of tasks, by what they adapt."""

    modules: tuple[str, ...]
    parameters: tuple[str, ...] = ()


ON_MODULES = tuple(map(Kind, TARGETS))
ON_ATTENTION = tuple(map(Kind, (("q_proj", "v_proj"), ATTENTION, ("o_proj",), ("k_proj", "o_proj"))))
ON_EXPERTS = (
    Kind(("q_proj", "v_proj")),
    Kind(ATTENTION, (_DOWN, _GATE_UP)),
    Kind((), (_DOWN,)),
    Kind(("o_proj",), (_GATE_UP,)),
)


@dataclass(frozen=True)
class Measured:
    """A model, and the tasks that it is measured with."""

    name: str
    folder: Path
    longest_row: int
    kinds: tuple[Kind, ...] = ON_MODULES


@dataclass(frozen=True)
class Errors:
    """Of one stage, in per cent of what was measured."""

    mape: float
    worst: float
    rss: float  # mean, of a fit to RSS
    exceeded: int  # predictions whose upper bound was too low


def main(arguments: list[str]) -> int:
    made = parser("memory", __doc__)
    made.add_argument("--quantization", choices=("none", "nf4", "int8"), default="none")
    made.add_argument("--model", choices=("dense", "moe"), default="dense")
    options = made.parse_args(arguments)
    freeze = freeze_of(Quantization(type=options.quantization)) or PlainWeight
    torch.set_num_threads(options.threads)
    models: dict[str, list[Errors]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        found = _mixture if options.model == "moe" else _models
        for one in found(Path(scratch), quick=options.quick):
            models[one.name] = judge(one.folder, one.longest_row, seed=0, freeze=freeze, kinds=one.kinds)
            print(show(one.name, models[one.name]), flush=True)
    every = [one for errors in models.values() for one in errors]
    result = {
        "mape": max(one.mape for one in every),
        "rss_mape": max(one.rss for one in every),
        "worst": max(one.worst for one in every),
        "exceeded": sum(one.exceeded for one in every),
        "goal": GOAL,
        "quantization": options.quantization,
        "models": {
            name: [{"mape": one.mape, "worst": one.worst, "rss_mape": one.rss} for one in errors]
            for name, errors in models.items()
        },
        "fitted": FITTED,
        "predicted": PREDICTED,
    }  # fmt: skip
    print(last_line("memory", result, repetitions=1, threads=options.threads, quick=options.quick))
    return 0


def judge(
    folder: Path,
    longest_row: int,
    seed: int,
    freeze: Freeze = PlainWeight,
    kinds: Sequence[Kind] = ON_MODULES,
) -> list[Errors]:
    """The errors of both stages of the model in ``folder``."""
    samples: list[list[MemorySample]] = [[] for _ in range(STAGES)]
    engines = _engines(folder, [stage.append for stage in samples], freeze, kinds)
    give_back_small_blocks()  # what a former model has left would hide what this one takes
    before = resident_set_bytes()
    for number in range(FITTED + PREDICTED):
        _run(engines, number, random.Random(f"{seed}/{number}"), longest_row, len(_tasks(kinds)))
    facts = facts_of(engines[0].stage.architecture, STAGES, torch.float32)
    errors = []
    for stage, own in enumerate(samples):
        layers = engines[stage].stage.layer_range
        report = StageReport(
            stage=stage, first_layer=layers.start, last_layer=layers.stop - 1, device="cpu",
            resident_bytes=engines[stage].stage.resident_bytes, capacity_bytes=2**40,
            quantized=engines[stage].stage.quantised,
        )  # fmt: skip
        errors.append(errors_of(own, prior(facts, report, STAGES), before))
    return errors


def errors_of(samples: Sequence[MemorySample], start: StageFit, rss_before: int) -> Errors:
    """Fitted to the first samples, judged by the others."""
    fit = fit_stage(tuple(samples[:FITTED]), start)
    off = [
        (fit.expected_peak(shape_of(one)) - one.peak_bytes) / one.peak_bytes * 100 for one in samples[FITTED:]
    ]
    by_rss = [_as_rss(one, rss_before) for one in samples]
    rss = fit_stage(tuple(by_rss[:FITTED]), start)
    rss_off = [
        abs(rss.expected_peak(shape_of(one)) - one.peak_bytes) / one.peak_bytes * 100
        for one in by_rss[FITTED:]
    ]
    return Errors(
        mape=sum(map(abs, off)) / len(off),
        worst=max(map(abs, off)),
        rss=sum(rss_off) / len(rss_off),
        exceeded=sum(fit.peak_bytes(shape_of(one)) < one.peak_bytes for one in samples[FITTED:]),
    )


def _as_rss(sample: MemorySample, before: int) -> MemorySample:
    """The same microbatch as RSS saw it; only what it added to the process."""
    grown = max(1, sample.rss_bytes - before)
    return sample.model_copy(
        update={
            "kept_bytes": grown,
            "forward_bytes": grown,
            "backward_bytes": grown,
            "exact_bytes": 0,
            "layer_bytes": 0,
        }
    )


def show(name: str, errors: Sequence[Errors]) -> str:
    head = [name, "MAPE %", "worst %", "RSS: MAPE %", "above the bound"]
    rows = [
        [f"stage {stage}", one.mape, one.worst, one.rss, one.exceeded] for stage, one in enumerate(errors)
    ]
    return table(head, rows) + "\n"


def _models(scratch: Path, *, quick: bool) -> Iterator[Measured]:
    whole = smollm2_folder()
    if quick:
        yield Measured("SmolLM2-135M, two layers", cut_folder(whole, 2, scratch / "cut"), 80)
    else:
        yield Measured("SmolLM2-135M", whole, 64)
    for name, shape in SHAPES.items():
        folder = scratch / name.replace(" ", "-")
        yield Measured(name, _random_model(shape, folder, quick=quick), 80 if quick else 400)


def _mixture(scratch: Path, *, quick: bool) -> Iterator[Measured]:
    folder = _random_model(MIXTURE, scratch / "mixture", quick=quick)
    for name, kinds in (("adapters on attention", ON_ATTENTION), ("adapters on experts", ON_EXPERTS)):
        yield Measured(f"mixture of experts, {name}", folder, 80 if quick else 400, kinds)


def _random_model(shape: Mapping[str, Any], folder: Path, *, quick: bool) -> Path:
    config = AutoConfig.for_model(
        **(dict(shape) | ({"num_hidden_layers": 2} if quick else {})), pad_token_id=0
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def _engines(
    folder: Path,
    deliver: Sequence[Callable[[MemorySample], None]],
    freeze: Freeze,
    kinds: Sequence[Kind],
) -> list[MeteredEngine]:
    """Both stages, with tasks of every kind."""
    store = open_store(StorageAccess(), allow_files=True)
    source = ModelSource(name="base", uri=f"file://{folder}", dtype="float32")
    files = ModelFiles(store, source, folder)
    engines = [
        MeteredEngine(load_stage(folder, files, index, STAGES, torch.float32, CPU, freeze), deliver[index])
        for index in range(STAGES)
    ]
    for engine in engines:
        engine.measures_all = True
        for number, (rank, kind) in enumerate(_tasks(kinds)):
            dropout = 0.0 if kind.parameters else 0.05 * (rank % 3)
            lora = LoRAConfig(
                rank=rank,
                alpha=rank,
                dropout=dropout,
                target_modules=kind.modules,
                target_parameters=kind.parameters,
            )
            engine.load(Load(number=0, task=str(number), lora=lora, training=Training(seed=number)))
    return engines


def _tasks(kinds: Sequence[Kind]) -> list[tuple[int, Kind]]:
    """Rank, and what it is of."""
    return [(rank, kind) for rank in (4, 16, 64) for kind in kinds]


def _run(
    engines: Sequence[MeteredEngine], number: int, chance: random.Random, longest: int, tasks: int
) -> None:
    """One random microbatch there and back."""
    segments = tuple(
        Segment(
            task=str(task),
            step=1,
            lengths=tuple(chance.randint(8, longest) for _ in range(chance.randint(1, 3))),
            first_row=0,
            weight=0.01,
            closes_step=True,
        )
        for task in chance.sample(range(tasks), chance.randint(1, 3))
    )
    item = Train(number=number, segments=segments)
    first, last = engines
    vocabulary = last.stage.architecture.vocab_size
    ids = torch.tensor([chance.randrange(vocabulary) for _ in range(item.tokens)])
    supervised = chance.uniform(0.3, 1.0)
    labels = torch.where(torch.tensor([chance.random() < supervised for _ in ids]), ids, -100)
    there = first.forward(item, token_ids=ids, hidden=None, labels=None)
    last.forward(item, token_ids=None, hidden=there.hidden, labels=labels)
    first.backward(number, last.backward(number, None).gradient)
