"""The shape of a base model, and its stages. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    field_validator,
    model_validator,
)

from mlora_worker.bounds import (
    MOST_MODULES,
    MOST_PARTS,
    MOST_PATHS,
    MOST_STAGES,
    Amount,
    Layer,
    Layers,
    LongName,
    Name,
    Stage,
    Width,
    Word,
)
from mlora_worker.protocol.message import Message, ModelUri
from mlora_worker.protocol.quantization import Quantization


class ModuleShape(Message):
    """A linear module that may be targeted, with its position in the pipeline; it repeats in consecutive layers."""

    stage: Stage = Field(description="The stage that has it.")
    name: Name = Field(description="Last part of the module's path, such as q_proj.")
    in_features: Width = Field(description="Length of its input.")
    out_features: Width = Field(description="Length of its output.")
    count: Layers = Field(description="Number of such modules on the stage, one in each layer.")
    path: LongName = Field(
        default="", description="Its path, with * for the layer: model.layers.*.self_attn.q_proj."
    )
    first_layer: Layer = Field(default=0, description="First of the layers that have it.")

    @property
    def inside(self) -> str:
        """Its path in the layer."""
        return self.path.partition(".*.")[2] or self.name

    def path_in(self, layer: int) -> str:
        return self.path.replace("*", str(layer), 1) if self.path else f"layers.{layer}.{self.name}"


class ExpertShape(Message):
    """Feed-forwards of which a token goes through some; it repeats in consecutive layers."""

    stage: Stage = Field(description="The stage that has it.")
    first_layer: Layer = Field(description="First of the layers that have it.")
    count: Layers = Field(description="Number of such layers on the stage.")
    experts: Width = Field(description="Feed-forwards of a layer.")
    active: Width = Field(description="Of them, those that a token goes through.")
    width: Width = Field(description="Length of the inside of one.")
    in_peft: Annotated[tuple[Word, ...], Field(max_length=16, fail_fast=True)] = Field(
        default=(), description="Names in target modules that PEFT takes for them and for their router."
    )
    # From report format 11 on, or left out:
    path: LongName | None = Field(
        default=None, description="Their path, with * for the layer: model.layers.*.mlp.experts."
    )
    # From report format 12 on, or left out:
    swapped: bool | None = Field(
        default=None,
        description="Whether PEFT takes their parameters, which are [experts, in, out], for [experts, out, in], so that an "
        "adapter's A and B change places.",
    )

    def path_in(self, layer: int) -> str | None:
        """None: nothing is known of it, so no adapter can be on them."""
        return None if self.path is None else self.path.replace("*", str(layer), 1)


class BorderShape(Message):
    """What comes to a stage of each token. Of the first stage: from its own embedding."""

    forward: Width = Field(description="Numbers that come forward.")
    backward: Width = Field(description="Of them, those that gradients go back for.")


class StateShape(Message):
    """Layers that carry a state from token to token."""

    stage: Stage = Field(description="The stage that has them.")
    count: Layers = Field(description="Number of such layers on the stage.")
    token_bytes: Amount = Field(
        description="Bytes that a token leaves in one of them for the backward, beside what it leaves in any layer."
    )


class ModelFacts(Message):
    """What the memory model needs to know of the base model."""

    hidden_size: Width = Field(description="Length of a token's hidden state.")
    intermediate_size: Width = Field(description="Width of the feed-forward part.")
    layers: Layers = Field(description="Decoder layers of all stages.")
    attention_heads: Width = Field(description="Query heads of a layer.")
    vocab_size: Width = Field(description="Entries of the vocabulary.")
    max_positions: Width = Field(
        description="Maximum row length, in tokens, that the model has positions for."
    )
    dtype_bytes: Annotated[int, Field(strict=True, ge=1, le=16)] = Field(
        description="Bytes of one frozen weight."
    )
    modules: Annotated[tuple[ModuleShape, ...], Field(max_length=MOST_MODULES, fail_fast=True)] = Field(
        description="The linear modules that may be targeted."
    )
    # From report format 9 on, or left out:
    experts: Annotated[tuple[ExpertShape, ...], Field(max_length=MOST_MODULES, fail_fast=True)] | None = (
        Field(default=None, description="Routed experts, of which a token goes through some.")
    )
    # From report format 14 on, or left out:
    borders: Annotated[tuple[BorderShape, ...], Field(max_length=MOST_STAGES, fail_fast=True)] | None = Field(
        default=None,
        description="What comes to each stage, where that is more than a hidden state of each token.",
    )
    never_adapted: (
        Annotated[tuple[ModuleShape, ...], Field(max_length=MOST_MODULES, fail_fast=True)] | None
    ) = Field(
        default=None,
        description="Linear modules that get no adapter, though all-linear of PEFT means them.",
    )
    # From report format 15 on, or left out:
    states: Annotated[tuple[StateShape, ...], Field(max_length=MOST_MODULES, fail_fast=True)] | None = Field(
        default=None, description="Layers that carry a state from token to token."
    )

    @model_validator(mode="after")
    def _holds_together(self) -> ModelFacts:
        """Whoever counts modules goes through all layers of each, and keeps the path of each and all ends of that."""
        if sum(module.count for module in self.modules) > MOST_MODULES:
            raise ValueError(f"modules: more than {MOST_MODULES} in all layers together")
        if sum(module.count * len(module.path) for module in self.modules) > MOST_PATHS:
            raise ValueError(f"modules: their paths have more than {MOST_PATHS} characters together")
        stacks = [shape for shape in self.experts or () if shape.path is not None]
        if sum(stack.count for stack in stacks) > self.layers:
            raise ValueError(f"experts: more than one block in some of {self.layers} layers")
        if any(stack.first_layer + stack.count > self.layers for stack in stacks):
            raise ValueError(f"experts: some would be in a layer beyond the last of {self.layers}")
        for module in self.modules:
            if module.path.count(".") >= MOST_PARTS or module.name.count(".") >= MOST_PARTS:
                raise ValueError(f"modules: a path has more than {MOST_PARTS} parts")
            if module.path and module.first_layer + module.count > self.layers:
                raise ValueError(
                    f"modules: {module.path} would be in layer {module.first_layer + module.count - 1}, and there "
                    f"are "
                    f"{self.layers} layers"
                )
        return self

    def __hash__(self) -> int:
        """Answers are remembered by it: of all modules, it would cost more than they do."""
        return hash((self.hidden_size, self.layers, self.vocab_size, self.dtype_bytes, len(self.modules)))


class StageReport(Message):
    stage: Stage = Field(description="Number of the stage, from 0.")
    first_layer: Layer = Field(description="First decoder layer, from 0.")
    last_layer: Layer = Field(description="Last decoder layer, inclusive.")
    device: Word = Field(description="Device that it computes on, such as cuda:0.")
    resident_bytes: Amount = Field(description="Bytes of the frozen weights.")
    capacity_bytes: Amount = Field(description="Memory of the device or the container's limit, in bytes.")
    input_groups: Annotated[
        tuple[Annotated[tuple[LongName, ...], Field(max_length=MOST_MODULES, fail_fast=True)], ...],
        Field(max_length=4096, fail_fast=True),
    ] = Field(
        default=(),
        description="Linear modules of a layer that read the same input, in the order of their calls.",
    )
    # From report format 7 on, or left out:
    parameters: Amount | None = Field(default=None, description="Numbers in the frozen weights.")
    products: Word | None = Field(
        default=None, description="Library that multiplies with the frozen weights: torch or oneDNN."
    )
    quantized: bool | None = Field(
        default=None, description="Whether the frozen matrices are packed and become dense for each product."
    )
    # From report format 13 on, or left out:
    recurrence: Word | None = Field(
        default=None,
        description="What carries the states of layers that have them: torch, Triton or flash-linear-attention.",
    )


class ModelSource(Message):
    name: Name  # the name users write as baseModel, and what adapter_config.json says
    uri: ModelUri  # folder with config.json, tokenizer and *.safetensors: s3://, file://, http(s)://, hf://OWNER/NAME
    revision: Word | None = None
    commit: Word | None = None  # of a hub, that the revision stands for: one for all stages, found by rank 0
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    quantization: Quantization | None = None  # None: none, so that workers of former versions read it, too

    @field_validator("quantization")
    @classmethod
    def _none_is_left_out(cls, quantization: Quantization | None) -> Quantization | None:
        return None if quantization is None or quantization.type == "none" else quantization
