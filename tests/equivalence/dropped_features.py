"""Stages of a model that have lost one of its features, as an error of packing or staging would make them.

Each function takes a stage that has just been read and gives it back without what its name says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from mlora_worker.frozen.biased import BiasedWeight
from mlora_worker.frozen.experts import CutRouter, FrozenExperts
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.model.altup import CutAltUp
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.llama4 import PackedLlama4Attention, RoutedLlama4Moe
from mlora_worker.model.recurrent.layers import (
    PackedDeltaNet,
    PackedFalconMamba,
    PackedMamba,
    PackedNemotronMamba,
    PackedNextDeltaNet,
    PackedShortConv,
)
from mlora_worker.model.rotary import LongRope
from mlora_worker.model.stage import Stage


def _modules(stage: Stage, attribute: str) -> Iterator[Any]:
    return (one for one in stage.layers.modules() if getattr(one, attribute, None) is not None)


def _modules_of(stage: Stage, *kinds: type[nn.Module]) -> Iterator[Any]:
    return (one for one in stage.layers.modules() if isinstance(one, kinds))


_MAMBAS = (PackedFalconMamba, PackedMamba, PackedNemotronMamba)
_NETS = (PackedDeltaNet, PackedNextDeltaNet, *_MAMBAS)


def parts_of_activations(stage: Stage) -> Stage:
    for one in _modules(stage, "alpha_p"):
        one.alpha_p = nn.Parameter(torch.zeros_like(one.alpha_p), requires_grad=False)
    return stage


def windows(stage: Stage) -> Stage:
    for one in _modules(stage, "sliding_window"):
        one.sliding_window = 1000
    for one in _modules(stage, "config"):
        one.config.sliding_window = 1000
    return stage


def chunks(stage: Stage) -> Stage:
    for one in _modules_of(stage, PackedLlama4Attention):
        one.config.attention_chunk_size = 1000
    return stage


class _CountedTogether(PackedRows):
    """Chunks begin where they would if all rows were one."""

    def in_chunks(self, size: int) -> PackedRows:
        cuts = sorted({*accumulate(self.lengths), *range(0, self.tokens, size)} | {0})
        return PackedRows(tuple(end - start for start, end in pairwise(cuts)), self.device)


def starts_of_chunks(stage: Stage) -> Stage:
    for one in _modules_of(stage, PackedLlama4Attention):
        one.forward = _with_rows(one.forward, lambda rows: _CountedTogether(rows.lengths, rows.device))
    return stage


def temperatures(stage: Stage) -> Stage:
    for one in _modules(stage, "attn_temperature_tuning"):
        one.attn_temperature_tuning = False
    return stage


def starts_of_temperatures(stage: Stage) -> Stage:
    for one in _modules_of(stage, PackedLlama4Attention):
        own = one._temperatures
        one._temperatures = lambda rows, own=own: own(PackedRows((rows.tokens,), rows.device))
    return stage


def norms_after_rotation(stage: Stage) -> Stage:
    return _without_norms(stage, "qk_norm")


def rotation_of_pairs(stage: Stage) -> Stage:
    def halves(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        first, second = heads.chunk(2, dim=-1)
        cos, sin = turns.real[:, :, None], turns.imag[:, :, None]
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)

    for one in _modules_of(stage, PackedLlama4Attention):
        one.rotated = halves
    return stage


def weights_before_experts(stage: Stage) -> Stage:
    """They multiply what the experts give, as in other types."""
    for one in _modules_of(stage, RoutedLlama4Moe):
        one.forward = partial(_weighted_afterwards, one)
    return stage


def _weighted_afterwards(block: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    flat = hidden.flatten(0, 1)
    logits, weights, chosen = block.router(flat)
    return block.shared_expert(flat) + block.experts(flat, chosen, weights), logits


def capped_scores(stage: Stage) -> Stage:
    for one in _modules(stage, "attn_logit_softcapping"):
        one.attn_logit_softcapping = None
    return stage


def scale_of_scores(stage: Stage) -> Stage:
    for one in _modules(stage, "scaling"):
        one.scaling = one.head_dim**-0.5
    return stage


def _without_norms(stage: Stage, *attributes: str) -> Stage:
    for attribute in attributes:
        for one in _modules(stage, attribute):
            setattr(one, attribute, nn.Identity())
    return stage


def norms_of_queries(stage: Stage) -> Stage:
    return _without_norms(stage, "q_norm", "q_layernorm", "query_layernorm")


def norms_of_keys(stage: Stage) -> Stage:
    return _without_norms(stage, "k_norm", "k_layernorm", "key_layernorm")


def biases(stage: Stage) -> Stage:
    for linear in stage.linears.values():
        linear.register_parameter("bias", None)
    return stage


def order_of_fused_parts(stage: Stage) -> Stage:
    for path, linear in stage.linears.items():
        if path.endswith(
            (
                "qkv_proj",
                "gate_up_proj",
                "query_key_value",
                "c_attn",
                "in_proj_qkvz",
                "in_proj_ba",
                "in_proj",
                "input_linear",
            )
        ):
            linear.weight = PlainWeight(linear.weight.dense(stage.dtype).roll(linear.out_features // 2, 0))
    return stage


def turned_weights(stage: Stage) -> Stage:
    for path, linear in stage.linears.items():
        if path.endswith("attn.c_proj"):  # it is square: its shape does not show
            linear.weight = PlainWeight(linear.weight.dense(stage.dtype).T.contiguous())
    return stage


def parallel_residuals(stage: Stage) -> Stage:
    for one in _modules(stage, "use_parallel_residual"):
        one.use_parallel_residual = False
    return stage


def factor_of_residuals(stage: Stage) -> Stage:
    for one in _modules(stage, "residual_multiplier"):
        one.residual_multiplier = 1.0
    return stage


def layers_without_positions(stage: Stage) -> Stage:
    for one in _modules(stage, "use_rope"):
        one.use_rope = True
    for one in _modules(stage, "is_local_attention"):
        one.is_local_attention = True
    for one in stage.layers.modules():
        if getattr(one, "is_sliding", True) is False or getattr(one, "sliding_window", 1) is None:
            one.is_sliding, one.sliding_window = True, 1000  # type: ignore[assignment]
    return stage


def _with_rope(stage: Stage, **changes: Any) -> Stage:
    rotary: Any = stage.rotary
    config = copy.deepcopy(rotary.config)
    found = config.rope_parameters
    for parameters in [one for one in found.values() if isinstance(one, dict)] or [found]:
        parameters.update(changes)
    return replace(stage, rotary=type(rotary)(config=config))


def scaled_frequencies(stage: Stage) -> Stage:
    return _with_rope(stage, rope_type="default")


def partial_rotation(stage: Stage) -> Stage:
    return _with_rope(stage, partial_rotary_factor=1.0)


def scale_of_rotations(stage: Stage) -> Stage:
    assert stage.rotary is not None
    stage.rotary.attention_scaling = 1.0  # type: ignore[assignment]
    return stage


def frequencies_of_long_rows(stage: Stage) -> Stage:
    assert isinstance(stage.rotary, LongRope)
    return replace(stage, rotary=stage.rotary.short)


def frequencies_of_short_rows(stage: Stage) -> Stage:
    assert isinstance(stage.rotary, LongRope)
    return replace(stage, rotary=stage.rotary.long)


def frequencies_by_layer(stage: Stage) -> Stage:
    return replace(stage, layer_types=stage.layer_types[:1] * len(stage.layers))


def ones_beside_weights_of_norms(stage: Stage) -> Stage:
    for one in _modules_of(stage, NemotronLayerNorm1P):
        one.weight = nn.Parameter(one.weight - 1, requires_grad=False)
    return stage


def squares_of_activations(stage: Stage) -> Stage:
    for one in _modules(stage, "act_fn"):
        one.act_fn = nn.ReLU()
    return stage


def factor_of(name: str) -> Callable[[Stage], Stage]:
    def dropped(stage: Stage) -> Stage:
        for one in _modules(stage, name):
            setattr(one, name, 1.0)
        return stage

    dropped.__name__ = name
    return dropped


def factors_of_projections(stage: Stage) -> Stage:
    for one in _modules_of(stage, PackedFalconMamba):
        one.factors = (1.0,) * len(one.factors)
    return stage


def gates_of_attention(stage: Stage) -> Stage:
    return _without_weights(stage, "self_attn.gate_proj")


def norms_after_parts(stage: Stage) -> Stage:
    return _without_norms(stage, "post_mlp_layernorm", "post_feedforward_layernorm")


def learned_positions(stage: Stage) -> Stage:
    return replace(stage, positions=None)


def scale_of_embeddings(stage: Stage) -> Stage:
    assert stage.embedding is not None
    if hasattr(stage.embedding, "embed_scale"):
        stage.embedding.embed_scale = torch.tensor(1.0)
    return replace(stage, embedding_factor=1.0)


def tied_head(stage: Stage) -> Stage:
    assert stage.head_weight is not None
    made = torch.randn(stage.head_weight.shape, generator=torch.Generator().manual_seed(0))
    return replace(stage, head_weight=PlainWeight(0.1 * made))


def factor_of_logits(stage: Stage) -> Stage:
    return replace(stage, logit_factor=1.0)


def bias_of_head(stage: Stage) -> Stage:
    assert isinstance(stage.head_weight, BiasedWeight)
    return replace(stage, head_weight=stage.head_weight.weight)


def capped_logits(stage: Stage) -> Stage:
    return replace(stage, logit_cap=None)


def _with_rows(forward: Callable[..., Any], rows: Callable[[PackedRows], PackedRows]) -> Callable[..., Any]:
    def taken_for_others(hidden_states: torch.Tensor, *, packed: PackedRows, **others: Any) -> Any:
        return forward(hidden_states, packed=rows(packed), **others)

    return taken_for_others


def states_of_their_own(stage: Stage) -> Stage:
    """Rows are taken for one where a state is carried, and nowhere else."""
    for one in _modules_of(stage, *_NETS, PackedShortConv):
        one.forward = _with_rows(one.forward, lambda rows: PackedRows((rows.tokens,), rows.device))
    return stage


def convolutions(stage: Stage) -> Stage:
    for one in _modules_of(stage, nn.Conv1d):
        weight = torch.zeros_like(one.weight)
        weight[..., -1] = one.weight[..., -1]  # the token itself alone
        one.weight = nn.Parameter(weight, requires_grad=False)
    return stage


def decay_of_states(stage: Stage) -> Stage:
    for one in _modules_of(stage, *_NETS):
        one.A_log = nn.Parameter(torch.full_like(one.A_log, -1000.0), requires_grad=False)
    return stage


def bias_of_decay(stage: Stage) -> Stage:
    for one in _modules_of(stage, *_NETS):
        one.dt_bias = nn.Parameter(torch.zeros_like(one.dt_bias), requires_grad=False)
    return stage


def _without_weights(stage: Stage, name: str) -> Stage:
    for path, linear in stage.linears.items():
        if path.endswith(name):
            linear.weight = PlainWeight(torch.zeros(linear.out_features, linear.in_features))
    return stage


def gates_of_states(stage: Stage) -> Stage:
    return _without_weights(stage, "in_proj_z")


def skips_of_states(stage: Stage) -> Stage:
    for one in _modules_of(stage, *_MAMBAS):
        one.D = nn.Parameter(torch.zeros_like(one.D), requires_grad=False)
    return stage


def limits_of_steps(stage: Stage) -> Stage:
    for one in _modules_of(stage, *_MAMBAS):
        one.time_step_limit = (0.0, torch.inf)
    return stage


def norms_of_values(stage: Stage) -> Stage:
    return _without_norms(stage, "v_norm")


def scalars_of_layers(stage: Stage) -> Stage:
    for one in _modules(stage, "layer_scalar"):
        one.layer_scalar = torch.ones_like(one.layer_scalar)
    return stage


def growing_scale_of_scores(stage: Stage) -> Stage:
    for one in _modules(stage, "config"):
        one.config.rope_parameters["llama_4_scaling_beta"] = 0.0
    return stage


def _routers(stage: Stage) -> Iterator[Any]:
    return (one.router for one in _modules_of(stage, CutRouter))


def further_experts(stage: Stage) -> Stage:
    for one in _modules_of(stage, CutRouter):
        if isinstance(one.router, PhimoeTopKRouter):  # which takes two, whatever it has been told
            one.register_forward_hook(lambda _, __, y: (y[0], y[1] * torch.tensor([1.0, 0.0]), y[2]))
    for one in _routers(stage):
        one.top_k = 1
        if hasattr(one, "per_expert_scale"):  # Gemma 4's has its configuration
            one.config.top_k_experts = 1
    return stage


def thresholds_of_choices(stage: Stage) -> Stage:
    for one in _routers(stage):
        one.router_jitter_noise = 1000.0
    return stage


def weights_of_experts(stage: Stage) -> Stage:
    for one in _modules_of(stage, CutRouter):
        one.register_forward_hook(lambda _, __, y: (y[0], torch.ones_like(y[1]), y[2]))
    return stage


def norm_of_experts_weights(stage: Stage) -> Stage:
    for one in _routers(stage):
        one.norm_topk_prob = not one.norm_topk_prob
    return stage


def order_of_experts(stage: Stage) -> Stage:
    for one in _modules_of(stage, FrozenExperts):
        one.down = nn.ModuleList([*one.down[1:], one.down[0]])
    return stage


def order_of_gate_and_up(stage: Stage) -> Stage:
    for one in _modules_of(stage, FrozenExperts):
        one.gate, one.up = one.up, one.gate
    return stage


def correction_of_choices(stage: Stage) -> Stage:
    for name in ("e_score_correction_bias", "expert_bias"):
        for one in _modules(stage, name):
            getattr(one, name).zero_()
    return stage


def groups_of_experts(stage: Stage) -> Stage:
    for one in _routers(stage):
        one.topk_group = one.num_group
    return stage


def scale_of_experts(stage: Stage) -> Stage:
    for one in _routers(stage):
        one.routed_scaling_factor = one.route_scale = 1.0
    return stage


def scales_of_experts(stage: Stage) -> Stage:
    for one in _routers(stage):
        one.per_expert_scale = nn.Parameter(torch.ones_like(one.per_expert_scale), requires_grad=False)
    return stage


def scales_of_routers(stage: Stage) -> Stage:
    for one in _routers(stage):
        one.scale = nn.Parameter(torch.ones_like(one.scale), requires_grad=False)
    return stage


def shared_experts(stage: Stage) -> Stage:
    for name in ("shared_experts", "shared_expert", "shared_mlp"):
        for one in _modules(stage, name):
            setattr(one, name, _Nothing())
    return stage


def gates_of_shared_experts(stage: Stage) -> Stage:
    return _without_weights(stage, "shared_expert_gate")


class _Nothing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def norms_of_latents(stage: Stage) -> Stage:
    return _without_norms(stage, "kv_a_layernorm")


def interleaved_rotation(stage: Stage) -> Stage:
    config = next(_modules(stage, "kv_a_layernorm")).config  # all layers have the same one
    config.rope_interleave = not config.rope_interleave
    return stage


def scale_of_latent_scores(stage: Stage) -> Stage:
    for one in _modules(stage, "qk_head_dim"):
        one.scaling = one.qk_head_dim**-0.5
    return stage


def sinks(stage: Stage) -> Stage:
    for one in _modules(stage, "sinks"):
        one.sinks = nn.Parameter(torch.full_like(one.sinks, -1000.0), requires_grad=False)
    return stage


def biases_of_experts(stage: Stage) -> Stage:
    for one in _modules_of(stage, FrozenExperts):
        for bias in (one.gate_bias, one.up_bias, one.down_bias):
            assert isinstance(bias, torch.Tensor)
            bias.zero_()
    return stage


def biases_of_routers(stage: Stage) -> Stage:
    for one in _routers(stage):
        one.bias.zero_()
    return stage


def limits_of_experts(stage: Stage) -> Stage:
    for one in _modules_of(stage, FrozenExperts):
        one.gated = lambda gate, up: (up + 1) * gate * torch.sigmoid(gate * 1.702)
    return stage


Change = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def _shared_states(stage: Stage, change: Change) -> Stage:
    """``change``: keys and values that layers of this stage leave for others, or find."""

    def found(attention: Any, _: Any, options: dict[str, Any]) -> None:
        if attention.is_kv_shared_layer:
            _change(attention, options)

    def left(attention: Any, _: Any, options: dict[str, Any], __: Any) -> None:
        if attention.store_full_length_kv:
            _change(attention, options)

    def _change(attention: Any, options: dict[str, Any]) -> None:
        states, kind = options["shared_kv_states"], attention.layer_type
        states[kind] = change(*states[kind])

    for one in _modules(stage, "is_kv_shared_layer"):
        one.register_forward_pre_hook(found, with_kwargs=True)
        one.register_forward_hook(left, with_kwargs=True)
    return stage


def keys_of_others(stage: Stage) -> Stage:
    return _shared_states(stage, lambda keys, values: (torch.zeros_like(keys), values))


def values_of_others(stage: Stage) -> Stage:
    return _shared_states(stage, lambda keys, values: (keys, torch.zeros_like(values)))


def inputs_of_layers(stage: Stage) -> Stage:
    def without(_: Any, arguments: Any, options: dict[str, Any]) -> Any:
        own = options["per_layer_input"]
        return arguments, options | {"per_layer_input": torch.ones_like(own)}

    for layer in stage.layers:
        layer.register_forward_pre_hook(without, with_kwargs=True)
    return stage


def _entry(stage: Stage) -> Any:
    assert stage.layer_inputs is not None
    return stage.layer_inputs.decoder


def table_of_layers(stage: Stage) -> Stage:
    _entry(stage).embed_tokens_per_layer.weight.zero_()
    return stage


def scale_of_table_of_layers(stage: Stage) -> Stage:
    _entry(stage).embed_tokens_per_layer.embed_scale.fill_(1)
    return stage


def projection_to_layers(stage: Stage) -> Stage:
    _entry(stage).per_layer_model_projection.weight.zero_()
    return stage


def norm_of_projection_to_layers(stage: Stage) -> Stage:
    _entry(stage).per_layer_projection_norm = nn.Identity()
    return stage


def activation_of_inputs(stage: Stage) -> Stage:
    for one in _modules(stage, "per_layer_input_gate"):
        one.act_fn = nn.Identity()
    return stage


def norm_behind_inputs(stage: Stage) -> Stage:
    return _without_norms(stage, "post_per_layer_input_norm")


def sparse_activations(stage: Stage) -> Stage:
    for one in _modules(stage, "activation_sparsity"):
        one.activation_sparsity = 0.0
    return stage


def augmented_residuals(stage: Stage) -> Stage:
    return _without_weights(stage, "laurel.linear_right")


def _altups(stage: Stage) -> Iterator[Any]:
    return (one.altup for one in _modules_of(stage, CutAltUp))


def predicted_copies(stage: Stage) -> Stage:
    for one in _altups(stage):
        one.prediction_coefs.weight.zero_()
    return stage


def corrected_copies(stage: Stage) -> Stage:
    for one in _altups(stage):
        one.correction_coefs.weight.zero_()
    return stage


def scale_of_corrections(stage: Stage) -> Stage:
    for one in _altups(stage):
        one.correct_output_scale.fill_(1)
    return stage


def scale_of_what_mixes(stage: Stage) -> Stage:
    for one in _altups(stage):
        one.router_input_scale.fill_(1)
    return stage


def norm_of_what_mixes(stage: Stage) -> Stage:
    for one in _altups(stage):
        one.router_norm = nn.Identity()
    return stage


def _ends_of_copies(stage: Stage) -> Iterator[Any]:
    return (one for one in (stage.spread, stage.gathered) if one is not None)


def projections_of_copies(stage: Stage) -> Stage:
    for one in _ends_of_copies(stage):
        one.projections = nn.ModuleList(nn.Identity() for _ in one.projections)
    return stage


def lengths_of_copies(stage: Stage) -> Stage:
    for one in _ends_of_copies(stage):
        one.as_long_as = lambda copy, _: copy
    return stage
