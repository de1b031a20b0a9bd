"""The text part of a model that also reads images: its decoder and head, under the names that they have in the whole model.

The towers for images are never built, so they cost nothing, and no adapter can reach them. What the whole model does to
text alone is said in ``TEXT_PARTS``, as ``families`` says it of text models: a test compares each with the whole model's
own forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel

from mlora_worker.model.experts import ExpertNames
from mlora_worker.model.families import FAMILIES, Family


class TextPlace(NamedTuple):
    """Where the whole model has its text part."""

    decoder: str
    head: str
    ties: bool = False  # whether its own configuration says that the head is tied, and not the whole model's


_USUAL: Final = TextPlace("model.language_model", "lm_head")
_PLACES: Final[Mapping[str, TextPlace]] = {  # by the type of the whole model
    "llama4": TextPlace("language_model.model", "language_model.lm_head", ties=True)
}
_TOWERS: Final = (
    "vision_tower",
    "multi_modal_projector",
    "image_newline",
    "vision_model",
    "visual",
    "embed_vision",
    "audio_tower",
    "embed_audio",
)
_HEAD: Final = "language_model.lm_head."  # what files may call it
# What they may call the decoder, the first that fits.
_DECODERS: Final = (
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "model.",  # Qwen2.5-VL's: its tower lies beside
)

_PLAIN = Family()
_LLAVA = {kind: FAMILIES[kind] for kind in ("llama", "mistral", "qwen2")}

_COHERE2 = replace(FAMILIES["cohere2"], logit_factor=None)  # nor are logits scaled, whatever it says
_QWEN3_VL_MOE = Family(experts=ExpertNames(turned=True), without=("output_router_logits",))

# By the type of the whole model and that of its text part. Some have no type of their own for that.
TEXT_PARTS: Final[Mapping[str, Mapping[str, Family]]] = {
    "aya_vision": {"cohere2": _COHERE2},
    "cohere2_vision": {"cohere2": _COHERE2},
    # The whole model does not cap logits, whatever its text part's configuration says.
    "gemma3": {"gemma3_text": replace(FAMILIES["gemma3_text"], logit_cap=None)},
    "gemma3n": {"gemma3n_text": FAMILIES["gemma3n_text"]},
    "gemma4": {"gemma4_text": FAMILIES["gemma4_text"]},
    "glm4v": {"glm4v_text": _PLAIN},
    "glm4v_moe": {"glm4v_moe_text": FAMILIES["glm4_moe"]},
    "internvl": {kind: FAMILIES[kind] for kind in ("llama", "qwen2", "qwen3")},
    "lfm2_vl": {"lfm2": FAMILIES["lfm2"]},
    "llama4": {"llama4_text": replace(FAMILIES["llama4_text"], decoder=None)},
    "llava": _LLAVA,
    "llava_next": _LLAVA,
    "llava_onevision": {"qwen2": FAMILIES["qwen2"]},
    "mistral3": {kind: FAMILIES[kind] for kind in ("ministral3", "mistral")},
    "qwen2_vl": {"qwen2_vl_text": _PLAIN},
    "qwen2_5_vl": {"qwen2_5_vl_text": _PLAIN},
    "qwen3_5": {"qwen3_5_text": FAMILIES["qwen3_5_text"]},
    "qwen3_5_moe": {"qwen3_5_moe_text": FAMILIES["qwen3_5_moe_text"]},
    "qwen3_vl": {"qwen3_vl_text": _PLAIN},
    "qwen3_vl_moe": {"qwen3_vl_moe_text": _QWEN3_VL_MOE},
}


def text_config(config: PretrainedConfig) -> PretrainedConfig:
    """Sizes of the decoder: ``config`` itself where there is nothing else."""
    return config.text_config if config.model_type in TEXT_PARTS else config


class TextPart(PreTrainedModel):  # type: ignore[misc]  # transformers' classes have no types
    """``decoder`` and ``head`` where the whole model has them; to look at and to take apart, never to be called."""

    _supports_attention_backend = True

    def __init__(self, config: PretrainedConfig, decoder: PreTrainedModel, head: nn.Linear) -> None:
        place = place_of(config)
        if place.ties:
            config = copy(config)
            config.tie_word_embeddings = text_config(config).tie_word_embeddings
        super().__init__(config)
        self.base_model_prefix, self._head = place.decoder, place.head
        _put(self, self.base_model_prefix, decoder)
        _put(self, self._head, head)

    @property
    def base_model(self) -> nn.Module:
        decoder: nn.Module = self.get_submodule(self.base_model_prefix)
        return decoder

    def get_output_embeddings(self) -> nn.Module:
        head: nn.Module = self.get_submodule(self._head)
        return head

    def _init_weights(self, module: nn.Module) -> None:
        self.base_model._init_weights(module)  # type: ignore[operator]


def place_of(config: PretrainedConfig) -> TextPlace:
    """Of the whole model's ``config``."""
    return _PLACES.get(config.model_type, _USUAL)


def _put(whole: nn.Module, path: str, part: nn.Module) -> None:
    within, _, name = path.rpartition(".")
    for step in within.split(".") if within else ():
        if not hasattr(whole, step):
            whole.add_module(step, nn.Module())
        whole = whole.get_submodule(step)
    whole.add_module(name, part)


def text_part(config: PretrainedConfig, dtype: torch.dtype, attention: str) -> TextPart:
    """Of the whole model's ``config``, with random weights, on torch's default device."""
    text = text_config(config)
    decoder = AutoModel.from_config(text, dtype=dtype, attn_implementation=attention)
    return TextPart(config, decoder, nn.Linear(text.hidden_size, text.vocab_size, bias=False, dtype=dtype))


def name_in_text_part(place: TextPlace, stored: str) -> str | None:
    """Of a tensor in the files of a whole model. None: it is a tower's. What is neither keeps its name."""
    if _is_tower(stored):
        return None
    if stored.startswith(_HEAD):
        return f"{place.head}.{stored.removeprefix(_HEAD)}"
    for beginning in _DECODERS:
        if stored.startswith(beginning):
            return f"{place.decoder}.{stored.removeprefix(beginning)}"
    return stored


def _is_tower(stored: str) -> bool:
    return stored.removeprefix("model.").partition(".")[0] in _TOWERS
