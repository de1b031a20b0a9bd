"""What is estimated of a stage before anything was measured is no less than what its engine takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mlora_operator.memory.fit import shape_of
from mlora_operator.memory.prior import WORKING_BYTES, prior
from mlora_worker.frozen.grouped import GroupedExperts
from mlora_worker.model import experts as experts_of
from mlora_worker.model.facts import facts_of
from mlora_worker.model.load import load_stage
from mlora_worker.pipeline.metered import MeteredEngine
from mlora_worker.protocol import LoRAConfig, MemorySample, StageReport, Training
from mlora_worker.stream.footprint import FEWEST_LOSS_ROWS
from mlora_worker.stream.items import Load, Segment, Train
from tests.fixtures.model_options import FAMILY, TARGETS
from tests.fixtures.small_models import small_model  # noqa: F401

CPU = torch.device("cpu")
SLACK = 1.1 * WORKING_BYTES  # that no estimate may need, with its interval
SmallModel = Callable[..., Any]
_DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 24}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 24, "mamba_chunk_size": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "delta nets": ("qwen3_5_text", FAMILY["qwen3_5_text"] | _DELTA),
    "delta nets with fused projections": ("qwen3_next", FAMILY["qwen3_next"] | _DELTA),
    "mamba, of experts": ("granitemoehybrid", FAMILY["granitemoehybrid"] | _MAMBA),
    "mamba": ("granitemoehybrid", FAMILY["granitemoehybrid"] | _MAMBA | {"num_local_experts": 0}),
    "short convolutions": ("lfm2", FAMILY["lfm2"]),
    "experts": ("qwen3_moe", FAMILY["qwen3_moe"]),
    "experts with biases": ("gpt_oss", FAMILY["gpt_oss"]),
    "latent attention": ("deepseek_v3", FAMILY["deepseek_v3"]),
}
LENGTHS = (200, 150, 40, 122)


def measured(
    saved: Any,
    lora: LoRAConfig,
    dtype: torch.dtype = torch.float32,
    *,
    recompute: bool = False,
    tasks: Sequence[Sequence[int]] = (LENGTHS,),
    labels: Tensor | None = None,
) -> tuple[MeteredEngine, MemorySample]:
    """The second of two alike microbatches of ``tasks``, by the lengths of their rows, on a stage that is all of it."""
    samples: list[MemorySample] = []
    stage = load_stage(saved.folder, saved, 0, 1, dtype, CPU)
    engine = MeteredEngine(stage, samples.append, recompute=recompute)
    for number in range(len(tasks)):
        engine.load(Load(number=0, task=str(number), lora=lora, training=Training()))
    for number in (1, 2):
        segments = tuple(
            Segment(task=str(task), step=1, lengths=tuple(rows), first_row=0, weight=1, closes_step=False)
            for task, rows in enumerate(tasks)
        )
        item = Train(number=number, segments=segments)
        ids = torch.arange(item.tokens) % 90
        engine.forward(item, token_ids=ids, hidden=None, labels=ids if labels is None else labels)
        engine.backward(number, None)
    return engine, samples[-1]


def report_of(engine: MeteredEngine, device: str = "cpu") -> StageReport:
    layers = engine.stage.layer_range
    return StageReport(
        stage=0, first_layer=layers.start, last_layer=layers.stop - 1, device=device, resident_bytes=0,
        capacity_bytes=2**40, input_groups=engine.group_names,
    )  # fmt: skip


def of_model(name: str, make: SmallModel) -> tuple[Any, LoRAConfig]:
    kind, options = MODELS[name]
    saved = make(kind, **options, num_hidden_layers=4, max_position_embeddings=512)
    targets = TARGETS.get(kind, ("all-linear",))
    return saved, LoRAConfig(rank=4, alpha=4, target_modules=targets)


@pytest.mark.parametrize(
    ("dtype", "recompute"),
    [(torch.float32, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16, recomputed"],
)
@pytest.mark.parametrize("name", MODELS)
def test_no_model_takes_more_than_is_estimated(
    small_model: SmallModel,  # noqa: F811
    name: str,
    dtype: torch.dtype,
    recompute: bool,
) -> None:
    saved, lora = of_model(name, small_model)
    engine, sample = measured(saved, lora, dtype, recompute=recompute)
    facts, shape = facts_of(engine.stage.architecture, 1, dtype), shape_of(sample)
    estimate = prior(facts, report_of(engine), 1, recompute=recompute)
    bound = estimate.peak_bytes(shape) - SLACK
    assert sample.peak_bytes <= bound
    assert sample.kept_bytes <= estimate.kept_bytes(shape)
    assert bound < 8 * sample.peak_bytes, "an estimate that is far too high admits nobody"


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_nor_do_experts_that_are_multiplied_together(
    small_model: SmallModel,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    recompute: bool,
) -> None:
    """As on a GPU: all choices of a token are there at once, and in float32, too."""
    monkeypatch.setattr(experts_of, "grouped_where_it_can", GroupedExperts)
    options = {
        "num_experts": 12,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 16,
        "intermediate_size": 32,
    }
    saved = small_model(
        "qwen3_moe", **options, num_hidden_layers=2, max_position_embeddings=512, hidden_size=64
    )
    lora = LoRAConfig(rank=4, alpha=4, target_modules=("q_proj", "v_proj"))
    engine, sample = measured(saved, lora, torch.bfloat16, recompute=recompute)
    facts = facts_of(engine.stage.architecture, 1, torch.bfloat16)
    estimate = prior(facts, report_of(engine, "cuda:0"), 1, recompute=recompute)
    assert sample.peak_bytes <= estimate.peak_bytes(shape_of(sample)) - SLACK


@pytest.mark.parametrize("counts", [(5, 5, 5, 5), (1,), (20,), (15, 1, 40), (16, 16), (3, 0, 2)], ids=str)
def test_few_supervised_positions_of_each_of_several_tasks_are_filled_up(
    small_model: SmallModel,  # noqa: F811
    counts: tuple[int, ...],
) -> None:
    """Logits are what is largest here: two of them for each row that exists at once."""
    vocabulary, rows = 20_000, 42
    saved = small_model(vocab_size=vocabulary, num_hidden_layers=1)
    labels = torch.cat([torch.where(torch.arange(rows) < count, 7, -100) for count in counts])
    lora = LoRAConfig(rank=4, alpha=4, target_modules=("q_proj",))
    engine, sample = measured(saved, lora, tasks=[(rows,)] * len(counts), labels=labels)
    filled = max(3 * FEWEST_LOSS_ROWS - one if one < FEWEST_LOSS_ROWS else one for one in counts if one)
    assert (sample.supervised, sample.loss_rows) == (sum(counts), filled)
    facts = facts_of(engine.stage.architecture, 1, torch.float32)
    estimate = prior(facts, report_of(engine), 1)
    assert sample.forward_bytes <= estimate.peak_bytes(shape_of(sample)) - SLACK


def test_a_sample_says_how_many_rows_of_one_expert_were_worked_on_at_a_time(
    small_model: SmallModel,  # noqa: F811
) -> None:
    """With one expert for all, that is every token, as far as a CPU takes so many."""
    options = {"num_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 20}
    saved = small_model("qwen3_moe", **options, num_hidden_layers=2, max_position_embeddings=512)
    lora = LoRAConfig(rank=4, alpha=4, target_modules=("q_proj",))
    assert measured(saved, lora, tasks=[(40, 60)])[1].expert_rows == 100
    assert measured(saved, lora, tasks=[(300,)])[1].expert_rows == 150
    assert measured(small_model(num_hidden_layers=1), lora, tasks=[(40,)])[1].expert_rows is None
