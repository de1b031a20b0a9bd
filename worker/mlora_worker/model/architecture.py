"""Which base models are supported, and their shape from the configuration alone (no weights are read).

Which types, and where their parts lie: ``families``. Each model is looked at, too: parts that it lacks are named.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import ValidationError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mlora_worker.bounds import MOST_LAYERS, MOST_WIDTH
from mlora_worker.model.altup import GATHERED, check_copies
from mlora_worker.model.attention import PACKED_ATTENTION
from mlora_worker.model.borders import Border, SharedKeys, still_shared
from mlora_worker.model.errors import ModelError, UnsupportedModel
from mlora_worker.model.experts import ExpertStack, stack_of
from mlora_worker.model.families import FAMILIES, REFUSED, REFUSED_OPTIONS, Family
from mlora_worker.model.handed_on import hand_on, tell_window
from mlora_worker.model.layer_inputs import check_not_quantised, layer_inputs_of
from mlora_worker.model.llama4 import pack_llama4
from mlora_worker.model.recurrent.layers import begin_at_each_row
from mlora_worker.model.recurrent.left_by_token import LeftByToken, left_by_token
from mlora_worker.model.rotary import check_rope
from mlora_worker.model.shared_keys import check_shared_keys, shared_keys_of
from mlora_worker.model.steady import make_steady
from mlora_worker.model.stored_forms import form_of
from mlora_worker.model.text_part import TEXT_PARTS, TextPart, text_config, text_part
from mlora_worker.model.transposed import StoredTransposed, unify_linears
from mlora_worker.stream.costs import embed_cost, expert_cost, head_cost

SUPPORTED_TYPES = tuple(sorted({*FAMILIES, *TEXT_PARTS}))


# What is counted with, under the names that all configurations know.
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")  # as config.json may call them
_NARROWING = ("down_proj", "w2", "output_linear")  # the last products of feed-forwards


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear module of a decoder layer: one that an adapter may be added to."""

    path: str  # in the causal LM, such as model.layers.3.self_attn.q_proj
    layer: int
    in_features: int
    out_features: int
    inside: str  # the path in its layer, such as self_attn.q_proj
    of_expert: bool = False  # a matrix of a routed expert, which is no module that an adapter may be added to
    adapted: bool = True  # whether PEFT adds adapters to it

    @property
    def name(self) -> str:
        """Last part of the path: what users write as a target module."""
        return self.path.rpartition(".")[2]

    @property
    def pattern(self) -> str:
        """The path with * for the layer."""
        before = self.path.removesuffix(f".{self.layer}.{self.inside}")
        return self.path if before == self.path else f"{before}.*.{self.inside}"


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shape of a base model."""

    hidden_size: int
    intermediate_size: int
    layers: int
    attention_heads: int
    vocab_size: int
    max_positions: int
    tied_head: bool  # the head's weight is the embedding's
    linears: tuple[Linear, ...]  # by layer, in the order of the layer's own modules
    stored_form: str | None = None  # how the checkpoint has quantised their weights; None: it has not
    transposed: bool = False  # the checkpoint has their weights as [in, out]
    model_type: str = ""  # of the whole model, as its config.json says
    is_part: bool = False  # the whole model has towers beside, whose modules may have the same names
    experts: tuple[
        ExpertStack, ...
    ] = ()  # by layer, where a layer routes tokens to some of many feed-forwards
    copies: int = 1  # of the hidden state that go from layer to layer
    shared_keys: tuple[SharedKeys, ...] = ()
    layer_inputs: int = 0  # numbers of a token that each layer has for itself, beside the hidden states
    # Linear modules that never get an adapter, though PEFT's all-linear means them. Those before the layers count to the
    # first layer, those behind them to the last one.
    never_adapted: tuple[Linear, ...] = ()
    states: tuple[tuple[int, LeftByToken], ...] = ()  # of layers that carry a state from token to token

    def border(self, layer: int) -> Border:
        """What of a token comes to ``layer``. Behind the last one all copies are one again."""
        copies = self.copies if layer < self.layers else 1
        return Border(
            copies * self.hidden_size,
            copies,
            still_shared(self.shared_keys, layer),
            self.layer_inputs * (self.layers - layer),
        )

    def layer_costs(self) -> list[float]:
        """Multiply-adds per token of each layer's linear modules, and of the experts that a token goes through."""
        costs = [0.0] * self.layers
        for linear in (*self.linears, *self.never_adapted):
            costs[linear.layer] += linear.in_features * linear.out_features
        for stack in self.experts:
            costs[stack.layer] += expert_cost(stack.hidden_size, stack.experts, stack.active, stack.width)
        return costs

    @property
    def embed_cost(self) -> float:
        return embed_cost(self.hidden_size)

    @property
    def head_cost(self) -> float:
        return head_cost(self.hidden_size, self.vocab_size)


def read_config(folder: Path) -> PretrainedConfig:
    """The configuration of the model in ``folder``. Raises UnsupportedModel."""
    with understood():
        _check_layers(folder / "config.json")
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        family = family_of(config)
        _check_sizes(text_config(config))
        form_of(getattr(config, "quantization_config", None))
        check_rope(text_config(config), family.rope_types)
        return config


def _check_layers(path: Path) -> None:
    """Before transformers reads it: many of its configurations make lists of all layers, however many there are."""
    if not path.is_file():
        return
    each = [json.loads(path.read_bytes())]
    for one in each:  # with those of a text part, which are found meanwhile
        if isinstance(one, dict):
            each += one.values()
            for name in _LAYERS:
                _check_size(name, one.get(name), MOST_LAYERS)


def _check_size(name: str, size: object, most: int) -> None:
    if isinstance(size, int | float) and size > most:
        raise UnsupportedModel(
            f"config.json of the base model cannot be used: {name} is {str(size)[:20]}, which is more than {most}"
        )


def _check_sizes(config: PretrainedConfig) -> None:
    """Before anything is built of them: a million layers on the meta device take hours."""
    bounds = dict.fromkeys(_SIZES, MOST_WIDTH) | {"num_hidden_layers": MOST_LAYERS}
    for name, most in bounds.items():
        _check_size(name, getattr(config, name, None), most)


@contextlib.contextmanager
def understood() -> Iterator[None]:
    """A configuration with nonsense in it may break transformers and torch anywhere, with any error."""
    try:
        yield
    except (ModelError, MemoryError):
        raise
    except ValidationError as error:  # of what we make of it
        wrong = error.errors()[0]
        told = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}"
        raise UnsupportedModel(f"config.json of the base model cannot be used: {told}") from error
    except Exception as error:
        told = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
        raise UnsupportedModel(f"config.json of the base model cannot be used: {told}") from error


def family_of(config: PretrainedConfig) -> Family:
    """Raises UnsupportedModel, with the reason where it is known."""
    family = _family_within(config) if config.model_type in TEXT_PARTS else _family_named(config)
    text = text_config(config)
    beyond = [name for name in family.without if getattr(text, name, None)]
    if beyond:
        raise UnsupportedModel(
            f"{config.model_type} with {', '.join(f'{name} {getattr(text, name)}' for name in beyond)} is not "
            f"supported: {REFUSED_OPTIONS.get(beyond[0], 'what that brings has not been compared; use one without')}"
        )
    return family


def _family_named(config: PretrainedConfig) -> Family:
    known = FAMILIES.get(config.model_type)
    if known is None:
        why = REFUSED.get(config.model_type)
        raise UnsupportedModel(
            f"model type {config.model_type} is not supported{f': {why}' if why else ''}; "
            f"supported types: {', '.join(SUPPORTED_TYPES)}"
        )
    return known


def _family_within(config: PretrainedConfig) -> Family:
    known, text = TEXT_PARTS[config.model_type], text_config(config).model_type
    if text not in known:
        raise UnsupportedModel(
            f"the text part of this {config.model_type} model is of type {text}, which is not supported there; "
            f"supported types: {', '.join(known)}"
        )
    return known[text]


@understood()
def meta_model(config: PretrainedConfig, dtype: torch.dtype, family: Family | None = None) -> PreTrainedModel:
    """The whole causal LM on the meta device, with packed attention, frozen, in eval mode; of a model that also reads
    images its text part. ``family``: another than its type's. Raises UnsupportedModel.
    """
    family = family or family_of(config)
    with torch.device("meta"):
        try:
            model = (
                text_part(config, dtype, PACKED_ATTENTION)
                if config.model_type in TEXT_PARTS
                else AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=PACKED_ATTENTION
                )
            )
        except ValueError as error:
            words = str(error).partition("\n")[0][:300]
            raise UnsupportedModel(f"{config.model_type} is not a causal language model: {words}") from error
    unify_linears(model)
    begin_at_each_row(model, dtype)
    pack_llama4(model)
    if family.decoder is not None:
        model.base_model_prefix = family.decoder
    make_steady(model)
    parts, head = parts_of(model, family), model.get_output_embeddings()
    optional = family.rotary if family.rotary_or_none else None
    missing = [attribute for attribute, part in parts.items() if part is None and attribute != optional]
    layers = parts[family.layers]
    if layers is not None and not isinstance(layers, nn.ModuleList):
        missing.append("list of decoder layers")
    if not isinstance(head, nn.Linear):
        missing.append("linear head")
    if missing:
        raise UnsupportedModel(
            f"{type(model).__name__} is not built as expected: its decoder has no {', no '.join(missing)}"
        )
    assert isinstance(layers, nn.ModuleList)
    check_shared_keys(layers, has_inputs=layer_inputs_of(model) > 0)
    check_not_quantised(model)
    if family.copies is not None:
        check_copies(text_config(model.config))
    if not all(getattr(module, "is_causal", True) for module in model.base_model.modules()):
        raise UnsupportedModel("bidirectional attention is not supported: use a causal language model")
    if family.uninformed is not None:
        hand_on(decoder_layers(model), family.uninformed)
    if family.masked_window is not None:
        tell_window(decoder_layers(model), family.masked_window, model.config.sliding_window)
    model.requires_grad_(False)
    return model.eval()


def parts_of(model: PreTrainedModel, family: Family) -> dict[str, nn.Module | None]:
    """The parts of the decoder that its family has, by attribute; None for one that is not there."""
    attributes = (family.embedding, family.learned_positions, family.rotary, family.layers, family.norm)
    return {name: getattr(model.base_model, name, None) for name in attributes if name is not None}


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    layers: nn.ModuleList = getattr(model.base_model, family_of(model.config).layers)
    return layers


def layer_prefix(model: PreTrainedModel, layer: int) -> str:
    return f"{model.base_model_prefix}.{family_of(model.config).layers}.{layer}."


@understood()
def architecture_of(model: PreTrainedModel) -> Architecture:
    """Reads shapes only, so a meta model serves."""
    config, layers = text_config(model.config), decoder_layers(model)
    family = family_of(model.config)
    names = family.experts
    linears = tuple(
        Linear(
            layer_prefix(model, index) + name,
            index,
            module.in_features,
            module.out_features,
            name,
            adapted=name.rpartition(".")[2] not in family.not_adapted,
        )
        for index, layer in enumerate(layers)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and not (names and names.is_of_router(name))
    )
    frozen = tuple(one for one in linears if family.frozen and one.inside.startswith(family.frozen))
    linears = tuple(one for one in linears if one not in frozen)
    sizes = {name: getattr(config, name) for name in _SIZES}
    nothing = [name for name, size in sizes.items() if not isinstance(size, int) or size < 1]
    if nothing or not linears or min(min(one.in_features, one.out_features) for one in linears) < 1:
        told = (
            ", ".join(f"{name} is {sizes[name]}" for name in nothing) or "its layers have no linear modules"
        )
        raise UnsupportedModel(f"config.json of the base model cannot be used: {told}")
    form = form_of(getattr(model.config, "quantization_config", None))
    stacks = [
        stack_of(layer, names, config, index, layer_prefix(model, index))
        for index, layer in enumerate(layers)
    ]
    experts = tuple(stack for stack in stacks if stack is not None)
    return Architecture(
        hidden_size=config.hidden_size,
        intermediate_size=_width(linears, experts),
        experts=experts,
        states=tuple(
            (index, left) for index, layer in enumerate(layers) if (left := left_by_token(layer)) is not None
        ),
        layers=len(layers),
        attention_heads=config.num_attention_heads,
        vocab_size=config.vocab_size,
        max_positions=config.max_position_embeddings,
        stored_form=None if form is None else form.name,
        tied_head=bool(model.config.tie_word_embeddings),
        linears=linears,
        transposed=any(isinstance(module, StoredTransposed) for module in layers.modules()),
        model_type=model.config.model_type,
        is_part=isinstance(model, TextPart),
        shared_keys=shared_keys_of(layers),
        layer_inputs=layer_inputs_of(model),
        copies=getattr(config, family.copies) if family.copies else 1,
        never_adapted=frozen + _outside(model, layers),
    )


def _outside(model: PreTrainedModel, layers: nn.ModuleList) -> tuple[Linear, ...]:
    """Linear modules of the decoder beside its layers."""
    within, last = {id(module) for module in layers.modules()}, len(layers) - 1
    return tuple(
        Linear(
            f"{model.base_model_prefix}.{name}",
            last * name.startswith(GATHERED),
            module.in_features,
            module.out_features,
            name,
        )
        for name, module in model.base_model.named_modules()
        if isinstance(module, nn.Linear) and id(module) not in within
    )


def _width(linears: tuple[Linear, ...], experts: tuple[ExpertStack, ...]) -> int:
    """Of the feed-forward that a token goes through, in the layer where it is widest."""
    dense: dict[int, int] = {}
    for linear in linears:
        if linear.name in _NARROWING:
            dense[linear.layer] = dense.get(linear.layer, 0) + linear.in_features
    for stack in experts:
        dense[stack.layer] = dense.get(stack.layer, 0) + stack.active * stack.width
    return max(
        dense.values(), default=linears[-1].in_features
    )  # most layers end with the product that narrows


def read_architecture(folder: Path) -> Architecture:
    """Raises UnsupportedModel."""
    return architecture_of(meta_model(read_config(folder), torch.float32))
