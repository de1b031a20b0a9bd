"""Where the parts of each supported kind of model lie: the one place that knows of families.

A supported model's decoder is an embedding (with or without learned positions), a list of layers that map hidden states
to hidden states, a norm, and a linear head; rotary frequencies are made by a module of the decoder. Layers, norms,
frequencies, windows, soft caps and scales of the attention are the model's own code. What a family adds between those
parts is said here, and nothing else may be there: structure cannot prove that (some models scale their hidden states in
``forward``), so types are listed by name, and a test compares each with transformers' own forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from mlora_worker.model.experts import ExpertNames


@dataclass(frozen=True, slots=True)
class Family:
    """Attributes of the decoder (``model.base_model``), and of its configuration."""

    embedding: str = "embed_tokens"
    learned_positions: str | None = None  # an embedding of positions, added to the tokens'
    rotary: str | None = "rotary_emb"
    rotary_or_none: bool = False  # its configuration may leave that out; no layer knows positions then
    layers: str = "layers"
    norm: str = "norm"
    decoder: str | None = None  # where the causal LM has it, if its class says otherwise
    rotary_by_layer_type: bool = False  # layers have frequencies by their ``config.layer_types``
    rope_types: tuple[str, ...] = ()  # of its own, beside those that all may have
    without: tuple[str, ...] = ()  # configuration fields that must not be set (``REFUSED_OPTIONS``)
    # In each layer, the attention to which it does not hand on where packed rows begin (``handed_on``).
    uninformed: str | None = None
    # In each layer, the attention that is not told of a window, which masks alone have in transformers.
    masked_window: str | None = None
    # Configuration fields of what is done between the parts:
    embedding_factor: str | None = None  # embeddings are multiplied by it
    embedding_root: str | None = None  # whether they are by the root of the hidden size
    logit_factor: str | None = None  # logits are multiplied by it
    logit_divisor: str | None = None  # logits are divided by it
    logit_cap: str | None = None  # then logits become cap * tanh(logits / cap)
    old_head_name: str | None = (
        None  # of the head's weight in files that older versions of transformers wrote
    )
    old_root: str | None = None  # of the decoder's tensors there
    # Linear modules to which PEFT adds no adapter in models of this type.
    not_adapted: tuple[str, ...] = ()
    experts: ExpertNames | None = None  # of layers whose feed-forward is a mixture
    copies: str | None = None  # configuration field: how many hidden states go through the layers (``altup``)
    frozen: str | None = None  # beginning of paths in a layer whose linear modules never get an adapter


_AUXILIARY = ("output_router_logits",)
_PLAIN = Family()
_GPT2 = Family("wte", learned_positions="wpe", rotary=None, layers="h", norm="ln_f")
_COHERE = Family(logit_factor="logit_scale")
_GEMMA4 = Family(
    logit_cap="final_logit_softcapping",
    rotary_by_layer_type=True,
    rope_types=("proportional",),
    # PEFT's all-linear takes the router's product, too.
    experts=ExpertNames("", "router", active="top_k_experts", in_peft=("proj",)),
    without=_AUXILIARY,
)
# PEFT's adapters on what mixes the copies would be passed over in one of its three products.
_GEMMA3N = Family(
    logit_cap="final_logit_softcapping", rotary_by_layer_type=True, copies="altup_num_inputs", frozen="altup."
)
# PEFT gives these words, which were modules in former versions of transformers, the stacked experts and their router.
_EXPERTS = ExpertNames(in_peft=("gate_proj", "up_proj", "down_proj", "gate"))
_STACKS = ExpertNames()  # for which PEFT has no words
_MIXTRAL = ExpertNames(
    stored_block="block_sparse_moe", single=("w1", "w3", "w2"), in_peft=("w1", "w2", "w3", "gate")
)
_AFMOE = replace(_EXPERTS, router="router")
_ERNIE = replace(_EXPERTS, corrections="moe_statics.e_score_correction_bias")
_EXAONE = replace(_EXPERTS, corrections="e_score_correction_bias")
_HUNYUAN = replace(_EXPERTS, active="moe_topk", in_peft=(*_EXPERTS.in_peft, "wg"))
_MINIMAX = replace(_MIXTRAL, corrections="e_score_correction_bias")
_GRANITE_MOE = ExpertNames(
    "block_sparse_moe",
    "router",
    stored_router="router.layer",
    stacks=(("experts.gate_up_proj", "experts.down_proj"), ("input_linear.weight", "output_linear.weight")),
)
# PEFT's all-linear takes the router, which is a linear module of its own kind.
_LLAMA4 = ExpertNames("feed_forward", "router", inward=True, in_peft=("router",))
_LFM2_MOE = ExpertNames("feed_forward", single=("w1", "w3", "w2"))
_GRANITE = Family(embedding_factor="embedding_multiplier", logit_divisor="logits_scaling")
_NEMOTRON_H = ExpertNames(
    "mixer", single=("up_proj", "down_proj"), stacks=(("experts.up_proj", "experts.down_proj"),)
)
_PHI_MOE = ExpertNames(
    router="router",
    stored_block="block_sparse_moe",
    stored_router="gate",
    single=("w1", "w3", "w2"),
    in_peft=("router",),  # a linear module of its own kind, which PEFT's all-linear takes, too
)
_GPT_NEOX = Family("embed_in", norm="final_layer_norm", old_head_name="embed_out.weight")

_MOE = Family(experts=_EXPERTS, without=_AUXILIARY)

FAMILIES: dict[str, Family] = {
    "afmoe": Family(embedding_root="mup_enabled", experts=_AFMOE, without=_AUXILIARY),
    "apertus": _PLAIN,
    "arcee": _PLAIN,
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "deepseek_v2": _MOE,
    "deepseek_v3": Family(experts=_EXPERTS),
    "dots1": _MOE,
    "ernie4_5": _PLAIN,
    "ernie4_5_moe": Family(experts=_ERNIE, without=_AUXILIARY),
    "exaone4": _PLAIN,
    "exaone_moe": Family(experts=_EXAONE, without=_AUXILIARY),
    "falcon_h1": Family(
        norm="final_layernorm",
        embedding_factor="embedding_multiplier",
        logit_factor="lm_head_multiplier",
        not_adapted=("out_proj",),
    ),
    "flex_olmo": _MOE,
    "gemma": _PLAIN,
    "gemma2": Family(logit_cap="final_logit_softcapping"),
    "gemma3_text": Family(logit_cap="final_logit_softcapping", rotary_by_layer_type=True),
    "gemma3n_text": _GEMMA3N,
    "gemma4_text": _GEMMA4,
    "glm": _PLAIN,
    "glm4": _PLAIN,
    "glm4_moe": Family(experts=_EXPERTS),
    "glm4_moe_lite": _MOE,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "gpt_oss": Family(experts=ExpertNames(router="router", in_turns=True), without=_AUXILIARY),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, experts=_GRANITE_MOE, without=_AUXILIARY),
    "granitemoehybrid": replace(_GRANITE, rotary_or_none=True, experts=_GRANITE_MOE, without=_AUXILIARY),
    "granitemoeshared": replace(_GRANITE, experts=_GRANITE_MOE, without=_AUXILIARY),
    "helium": _PLAIN,
    "hunyuan_v1_dense": Family(rope_types=("dynamic",)),
    "hunyuan_v1_moe": Family(experts=_HUNYUAN, rope_types=("dynamic",), without=_AUXILIARY),
    "lfm2": Family(norm="embedding_norm"),
    "lfm2_moe": Family(rotary="pos_emb", norm="embedding_norm", experts=_LFM2_MOE, without=_AUXILIARY),
    "llama": _PLAIN,
    "llama4_text": Family(decoder="model", experts=_LLAMA4, without=_AUXILIARY),
    "minimax_m2": Family(experts=_MINIMAX, without=_AUXILIARY),
    "ministral": _PLAIN,
    "ministral3": _PLAIN,
    "mistral": _PLAIN,
    "mixtral": Family(experts=_MIXTRAL, without=_AUXILIARY),
    "nemotron": Family(uninformed="self_attn"),
    "nemotron_h": Family(
        "embeddings",
        rotary=None,
        norm="norm_f",
        old_root="backbone.",
        not_adapted=("out_proj",),
        experts=_NEMOTRON_H,
        without=("moe_latent_size", *_AUXILIARY),
    ),
    "olmo": Family(without=("clip_qkv",)),
    "olmo2": _PLAIN,
    "olmo3": Family(rotary_by_layer_type=True),
    "olmoe": Family(experts=_EXPERTS, without=("clip_qkv", *_AUXILIARY)),
    "phi": Family(norm="final_layernorm"),
    "phi3": _PLAIN,
    "phimoe": Family(experts=_PHI_MOE, masked_window="self_attn", without=_AUXILIARY),
    "qwen2": _PLAIN,
    "qwen2_moe": Family(experts=_STACKS, without=("use_sliding_window", *_AUXILIARY)),
    "qwen3": _PLAIN,
    "qwen3_5_moe_text": Family(experts=_STACKS, without=_AUXILIARY),
    "qwen3_5_text": _PLAIN,
    "qwen3_moe": _MOE,
    "qwen3_next": _MOE,
    "seed_oss": _PLAIN,
    "smollm3": _PLAIN,
    "stablelm": Family(uninformed="self_attn"),
    "starcoder2": _PLAIN,
    "vaultgemma": Family(logit_cap="final_logit_softcapping"),
}


def embedding_factor_of(family: Family, config: PretrainedConfig) -> float:
    if family.embedding_root and getattr(config, family.embedding_root):
        return float(config.hidden_size**0.5)
    return float(getattr(config, family.embedding_factor)) if family.embedding_factor else 1.0


def logit_factor_of(family: Family, config: PretrainedConfig) -> float:
    factor = float(getattr(config, family.logit_factor)) if family.logit_factor else 1.0
    return factor / (float(getattr(config, family.logit_divisor)) if family.logit_divisor else 1.0)


REFUSED_OPTIONS: dict[str, str] = {
    "moe_latent_size": "experts behind a narrower projection have not been compared; use Nemotron 3 Nano",
    "clip_qkv": "outputs of its projections would be clipped in place",
    "output_router_logits": "the router's auxiliary loss is a mean over all tokens of a batch, so tasks would change each "
    "other's results, and the router is frozen: remove it",
}

# Well-known types that are refused, and why: the answer to who asks for them.
REFUSED: dict[str, str] = {
    "bloom": "its attention adds a bias by distance, which packed attention does not support",
    "falcon": "its attention may add a bias by distance, which packed attention does not support",
    "mamba": "its layers are recurrent and would carry state from one packed row into the next",
    "mllama": "its layers look at images in between, so there is no text part that could be taken alone",
    "mpt": "its attention adds a bias by distance, which packed attention does not support",
}
