"""Every supported architecture, packed and cut into stages, computes what transformers does; and one that had lost a
feature of its own, on whichever stage, would not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mlora_worker.model.architecture import SUPPORTED_TYPES
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.load import load_stage
from mlora_worker.model.scores import part_scores
from mlora_worker.model.stage import Stage
from tests.equivalence import dropped_features as without
from tests.fixtures.model_options import FAMILY, MIXTURES, VARIANTS
from tests.fixtures.small_models import Saved, save_small_model

CPU = torch.device("cpu")
# Windows of five tokens, and longer frequencies from nine on, matter to some rows alone.
LENGTHS = (7, 1, 13, 2)
ROWS = PackedRows(LENGTHS, CPU)
IDS = torch.randint(3, 97, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
LAYERS = 4
KINDS: dict[str, tuple[str, dict[str, Any]]] = {one: (one, FAMILY.get(one, {})) for one in SUPPORTED_TYPES}
KINDS |= VARIANTS
# With as many stages as layers, borders lie behind each layer that makes keys and each that uses them.
SHARING = [kind for kind, (_, options) in KINDS.items() if options.get("num_kv_shared_layers")]
HAVING_INPUTS = [kind for kind, (_, options) in KINDS.items() if options.get("hidden_size_per_layer_input")]
_GEMMA3N = ["gemma3n", "gemma3n_text"]
_GEMMA4 = ["gemma4", "gemma4_text"]
_GEMMA4 += [kind for kind in dict.fromkeys([*SHARING, *HAVING_INPUTS]) if kind not in _GEMMA3N]


def load(saved: Saved, stage: int, stages: int) -> Stage:
    return load_stage(saved.folder, saved, stage, stages, torch.float32, CPU)


class Known(Saved):
    """A model that several tests look at. What they read is theirs: they may change it."""

    def tensor(self, name: str) -> Tensor:
        return super().tensor(name).clone()

    @functools.cached_property
    def logits(self) -> Tensor:
        return transformers_logits(self)

    @functools.cached_property
    def parts(self) -> list[Stage]:
        """On two stages, which nobody changes."""
        return [load(self, stage, 2) for stage in range(2)]


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    """``known(kind)``: making a model, and transformers' way through it, take most of a test."""

    @functools.cache
    def made(kind: str) -> Known:
        model_type, options = KINDS[kind]
        saved = save_small_model(
            tmp_path_factory.mktemp("model"), model_type, **({"num_hidden_layers": LAYERS} | options)
        )
        return Known(saved.folder, saved.model)

    return made


def last_hidden(parts: list[Stage], rows: PackedRows = ROWS) -> Tensor:
    hidden = parts[0].embed(IDS, rows)
    for part in parts:
        hidden = part.run_layers(hidden, rows)
    return hidden


def packed_logits(parts: list[Stage], rows: PackedRows = ROWS) -> Tensor:
    return parts[-1].logits(last_hidden(parts, rows))


@torch.no_grad()
def transformers_logits(saved: Saved) -> Tensor:
    """[tokens, vocabulary], row by row."""
    return torch.cat([saved.model(input_ids=row[None]).logits[0] for row in by_row(IDS)])


def by_row(packed: Tensor) -> tuple[Tensor, ...]:
    return torch.split(packed, list(LENGTHS))


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_through_stages_equal_transformers_row_by_row(
    known: Callable[[str], Known], kind: str
) -> None:
    model = known(kind)
    splits = [model.parts]
    more = (1, 3, 4) if kind in SHARING else (1, 3) if kind in SUPPORTED_TYPES else ()
    splits += [[load(model, stage, stages) for stage in range(stages)] for stages in more]
    for parts in splits:
        torch.testing.assert_close(packed_logits(parts), model.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", SUPPORTED_TYPES)
def test_rows_that_were_taken_for_one_would_be_seen(known: Callable[[str], Known], model_type: str) -> None:
    model = known(model_type)
    found = by_row(packed_logits(model.parts, PackedRows((sum(LENGTHS),), CPU)))
    for own, wanted in list(zip(found, by_row(model.logits), strict=True))[1:]:
        assert differ(own, wanted)


@pytest.mark.parametrize(
    "model_type",
    [
        "cohere",
        "cohere2",
        "gemma2",
        "gemma3_text",
        "granite",
        "granitemoe",
        "granitemoehybrid",
        "phi",
        "phimoe",
        "falcon_h1",
    ],
)
def test_losses_and_scores_know_factors_caps_and_biases_of_logits(
    known: Callable[[str], Known], model_type: str
) -> None:
    parts = known(model_type).parts
    hidden, logits = last_hidden(parts), known(model_type).logits.double()
    labels = IDS.flip(0)
    labels[0] = logits[0].argmax()  # at least one is right
    wanted = cross_entropy(logits, labels, reduction="sum")
    last = parts[-1]
    assert last.head_weight is not None
    (loss,) = last.losses(hidden, labels, (len(IDS),))
    ((total, right),) = part_scores(
        hidden, labels, [len(labels)], last.normed, last.head_weight, last.logit_cap
    )
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    torch.testing.assert_close(total, wanted, rtol=1e-6, atol=0)
    assert right == (logits.argmax(dim=1) == labels).sum() > 0


def differ(found: Tensor, wanted: Tensor) -> bool:
    """By a hundred times what is taken for equal, at least."""
    return bool(((found - wanted).abs() > 1e-3 * (1 + wanted.abs())).any())


FIRST, LAST, EACH = (0,), (1,), (0, 1)
TIED = ["ernie4_5", "gemma", "smollm3", "starcoder2"]  # unless they are told otherwise
TIED += [kind for kind, (_, options) in KINDS.items() if options.get("tie_word_embeddings")]
_QWEN3_5 = ["qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"]
_DELTA_NETS = [*_QWEN3_5, "qwen3_next"]
_MAMBAS = [
    "falcon_h1", "falcon_h1, a gate for the norm, tied", "granitemoehybrid",
    "granitemoehybrid without experts, with positions", "nemotron_h",
]  # fmt: skip
_WITH_STATES = [*_DELTA_NETS, *_MAMBAS]
_HYBRIDS = ["lfm2", "lfm2 with biases", "lfm2_vl", "lfm2_moe", *_WITH_STATES]
_NORMS_OF_HEADS = [
    "cohere", "exaone4", "gemma3", "gemma3_text", *_GEMMA3N, *_GEMMA4, "glm4_moe", "lfm2_moe", "olmo2", "olmo3",
    "olmoe", "qwen3",
    "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", *_DELTA_NETS, "apertus", "dots1", "hunyuan_v1_dense", "hunyuan_v1_moe",
    "internvl", "minimax_m2", "afmoe", "exaone_moe", "flex_olmo", "phi with norms of q and k",
    "stablelm, parallel, norms of heads",
]  # fmt: skip
_LLAMA4 = ["llama4", "llama4_text"]
_ALL_LLAMA4 = [kind for kind, (model_type, _) in KINDS.items() if model_type in _LLAMA4]
_LLAMA4_TIED, _MAVERICK, _CHUNKS_ELSEWHERE, _LLAMA4_LONG = sorted({*_ALL_LLAMA4} - {*_LLAMA4})
_LLAMA4.append(_LLAMA4_TIED)
_GEMMA4_MOE = ["gemma4 of experts", "gemma4_text of experts"]
_LONG_ROPE = ["phi3", "phi3, longrope in part, as published configurations say it", "phimoe", _LLAMA4_LONG]
_GATED = [*MIXTURES, *_GEMMA4_MOE]
_MIXTURES = [*_GATED, "nemotron_h of experts"]
# What is dropped, on which of two stages alone, and which models have it.
FEATURES: list[tuple[Callable[[Stage], Stage], tuple[int, ...], list[str]]] = [
    (without.parts_of_activations, EACH, ["apertus"]),
    (without.windows, EACH, [
        "cohere2", "exaone4", "gemma2", "gemma2 without caps", "gemma3", "gemma3_text", *_GEMMA3N, *_GEMMA4,
        "llava of mistral", "ministral",
        "mistral", "mistral3", "gpt_oss", "mixtral", "olmo3", "phi3, partly rotated, windows", "qwen2",
        "qwen2_5_vl with windows", "qwen3 with windows", "qwen3_moe, experts in each second layer, windows",
        "smollm3 with windows", "starcoder2", "dots1", "aya_vision", "cohere2_vision", "afmoe", "exaone_moe",
        "phimoe, a plain head, windows", "vaultgemma"]),
    (without.chunks, EACH, _ALL_LLAMA4),
    (without.starts_of_chunks, EACH, _ALL_LLAMA4),
    (without.temperatures, EACH, [*_LLAMA4, _MAVERICK, _LLAMA4_LONG]),
    (without.starts_of_temperatures, EACH, [*_LLAMA4, _MAVERICK, _LLAMA4_LONG]),
    (without.norms_after_rotation, EACH, [*_LLAMA4, _CHUNKS_ELSEWHERE, _LLAMA4_LONG]),
    (without.rotation_of_pairs, EACH, _ALL_LLAMA4),
    (without.weights_before_experts, EACH, _ALL_LLAMA4),
    (without.capped_scores, EACH, ["gemma2", "vaultgemma"]),
    (without.scale_of_scores, EACH, [
        "gemma2", "gemma3", "gemma3_text", "gpt2", "gpt2, scores not scaled, a head of its own", "granite",
        "granitemoe", "granitemoehybrid", "granitemoeshared", "vaultgemma"]),
    (without.norms_of_queries, EACH, _NORMS_OF_HEADS),
    (without.norms_of_keys, EACH, [kind for kind in _NORMS_OF_HEADS if kind not in SHARING]),
    (without.biases, EACH, [
        "deepseek_v3, queries in one step, halves rotated", "ernie4_5 with biases", "gemma2 with biases", "glm", "glm4",
        "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss",
        "granitemoehybrid", "lfm2 with biases", "llama with biases", "llava of qwen2", "llava_onevision", "qwen2",
        "qwen2_5_vl",
        "qwen2_vl", "seed_oss", "starcoder2", "hunyuan_v1_dense", "qwen2_moe", "glm4v", "internvl of qwen2",
        "glm4v_moe", "nemotron with biases, tied", "phi", "phimoe", "stablelm", "falcon_h1", "nemotron_h", _MAVERICK]),
    (without.further_experts, EACH, _MIXTURES),
    (without.thresholds_of_choices, EACH, ["phimoe"]),
    (without.weights_of_experts, EACH, _MIXTURES),
    (without.norm_of_experts_weights, EACH, [
        "deepseek_v3", "glm4_moe", "olmoe", "olmoe, weights that add up to 1", "qwen3_moe", "qwen3_next", "lfm2_moe",
        "dots1", "glm4_moe_lite", "qwen2_moe", "exaone_moe", "glm4v_moe", "nemotron_h of experts"]),
    (without.correction_of_choices, EACH, ["deepseek_v3", "glm4_moe", "lfm2_moe", "dots1", "ernie4_5_moe",
        "glm4_moe_lite", "minimax_m2", "afmoe", "exaone_moe", "glm4v_moe", "nemotron_h of experts"]),
    (without.groups_of_experts, EACH, ["deepseek_v3", "glm4_moe", "deepseek_v2", "dots1", "glm4_moe_lite", "exaone_moe",
        "glm4v_moe", "nemotron_h of experts"]),
    (without.scale_of_experts, EACH, ["deepseek_v3", "glm4_moe", "lfm2_moe", "deepseek_v2", "dots1", "glm4_moe_lite",
        "afmoe", "exaone_moe", "glm4v_moe", "nemotron_h of experts"]),
    (without.shared_experts, EACH, ["deepseek_v3", "glm4_moe", "granitemoehybrid", "qwen3_5_moe", "qwen3_5_moe_text",
        "qwen3_next", "deepseek_v2", "dots1", "ernie4_5_moe", "glm4_moe_lite", "hunyuan_v1_moe", "granitemoeshared",
        "qwen2_moe", "afmoe", "exaone_moe", "glm4v_moe", "nemotron_h of experts", *_ALL_LLAMA4]),
    (without.gates_of_shared_experts, EACH, ["qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next", "qwen2_moe"]),
    (without.scales_of_experts, EACH, _GEMMA4_MOE),
    (without.scales_of_routers, EACH, _GEMMA4_MOE),
    (without.sinks, EACH, ["gpt_oss"]),
    (without.biases_of_experts, EACH, ["gpt_oss"]),
    (without.biases_of_routers, EACH, ["gpt_oss"]),
    (without.limits_of_experts, EACH, ["gpt_oss"]),
    (without.norms_of_latents, EACH, ["deepseek_v3", "deepseek_v2", "glm4_moe_lite"]),
    (without.interleaved_rotation, EACH, ["deepseek_v3", "deepseek_v3, queries in one step, halves rotated"]),
    (without.scale_of_latent_scores, EACH, ["deepseek_v3", "deepseek_v2"]),
    (without.order_of_experts, EACH, _MIXTURES),
    (without.order_of_gate_and_up, EACH, _GATED),
    (without.order_of_fused_parts, EACH, ["glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neox", "granitemoehybrid",
        "lfm2_moe", "phi3", "qwen3_next", "falcon_h1", "nemotron_h"]),
    (without.turned_weights, EACH, ["gpt2"]),
    (without.parallel_residuals, EACH, ["gpt_neox"]),
    (without.factor_of_residuals, EACH, ["granite", "granitemoe", "granitemoehybrid", "granitemoeshared"]),
    (without.layers_without_positions, EACH, ["cohere2", "exaone4", "smollm3", "aya_vision", "cohere2_vision", "exaone_moe",
        "afmoe", *_ALL_LLAMA4]),
    (without.scaled_frequencies, EACH, [
        "deepseek_v3", "gemma3", "gemma3_text", *_GEMMA4, "llama", "llama, linear", "llama, yarn",
        "olmo3", "deepseek_v2", "hunyuan_v1_dense", "hunyuan_v1_moe", *_LLAMA4]),
    (without.scale_of_rotations, EACH, ["gpt_oss", "llama, yarn"]),
    (without.partial_rotation, EACH, [
        "glm", "glm4", "glm4_moe", "gpt_neox", "phi3, partly rotated, windows", *_DELTA_NETS, "minimax_m2", "nemotron"]),
    (without.frequencies_of_long_rows, EACH, _LONG_ROPE),
    (without.frequencies_of_short_rows, EACH, _LONG_ROPE),
    (without.frequencies_by_layer, EACH, ["gemma3", "gemma3_text", *_GEMMA3N, "olmo3"]),
    (without.norms_of_values, EACH, ["gemma4", "gemma4_text", "gemma4_text, inputs of layers alone"]),
    (without.norms_of_values, FIRST, SHARING),
    (without.norms_of_keys, FIRST, SHARING),
    (without.keys_of_others, EACH, SHARING),
    (without.values_of_others, EACH, SHARING),
    (without.inputs_of_layers, EACH, HAVING_INPUTS),
    (without.table_of_layers, FIRST, HAVING_INPUTS),
    (without.scale_of_table_of_layers, FIRST, HAVING_INPUTS),
    (without.projection_to_layers, FIRST, HAVING_INPUTS),
    (without.norm_of_projection_to_layers, FIRST, HAVING_INPUTS),
    (without.activation_of_inputs, EACH, HAVING_INPUTS),
    (without.norm_behind_inputs, EACH, HAVING_INPUTS),
    (without.scalars_of_layers, EACH, _GEMMA4),
    (without.sparse_activations, EACH, _GEMMA3N),
    (without.augmented_residuals, EACH, _GEMMA3N),
    (without.predicted_copies, EACH, _GEMMA3N),
    (without.corrected_copies, EACH, _GEMMA3N),
    (without.scale_of_corrections, EACH, _GEMMA3N),
    (without.scale_of_what_mixes, EACH, _GEMMA3N),
    (without.norm_of_what_mixes, EACH, _GEMMA3N),
    (without.projections_of_copies, EACH, _GEMMA3N),
    (without.lengths_of_copies, EACH, _GEMMA3N),
    (without.growing_scale_of_scores, EACH, ["ministral3", "mistral3 of ministral3"]),
    (without.states_of_their_own, EACH, _HYBRIDS),
    (without.convolutions, EACH, _HYBRIDS),
    (without.decay_of_states, EACH, _WITH_STATES),
    (without.bias_of_decay, EACH, _WITH_STATES),
    (without.skips_of_states, EACH, _MAMBAS),
    (without.limits_of_steps, EACH, ["granitemoehybrid", "nemotron_h"]),
    (without.gates_of_states, EACH, _QWEN3_5),
    (without.ones_beside_weights_of_norms, EACH, ["nemotron"]),
    *((without.factor_of(name), EACH, ["falcon_h1"]) for name in (
        "key_multiplier", "attention_in_multiplier", "attn_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier",
        "gate_multiplier", "down_multiplier")),
    (without.factors_of_projections, EACH, ["falcon_h1", "falcon_h1, a gate for the norm, tied"]),
    (without.squares_of_activations, EACH, ["arcee", "nemotron", "nemotron_h, dense feed-forwards",
        "nemotron_h of experts"]),
    (without.gates_of_attention, EACH, ["afmoe"]),
    (without.norms_after_parts, EACH, ["afmoe", "flex_olmo"]),
    (without.learned_positions, FIRST, ["gpt2", "gpt_bigcode"]),
    (without.scale_of_embeddings, FIRST, ["gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", *SHARING, "granite",
        "granitemoe", "granitemoehybrid", "granitemoeshared", "afmoe", "vaultgemma", "falcon_h1"]),
    (without.tied_head, LAST, TIED),
    (without.factor_of_logits, LAST, ["cohere", "cohere2", "granite", "granitemoe", "granitemoehybrid",
        "granitemoeshared", "falcon_h1"]),
    (without.capped_logits, LAST, ["gemma2", "gemma3_text", *_GEMMA3N, *_GEMMA4, "vaultgemma"]),
    (without.bias_of_head, LAST, ["phi", "phimoe"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "drop", "where"),
    [
        pytest.param(kind, drop, where, id=f"{kind}: {drop.__name__}")
        for drop, where, kinds in FEATURES
        for kind in kinds
    ],
)
def test_a_feature_that_was_dropped_on_any_stage_would_be_seen(
    known: Callable[[str], Known], kind: str, drop: Callable[[Stage], Stage], where: tuple[int, ...]
) -> None:
    model = known(kind)
    for index in where:
        parts = list(model.parts)
        parts[index] = drop(load(model, index, 2))
        assert differ(packed_logits(parts), model.logits), f"on stage {index}"
