"""The adapter that a user asks for, in PEFT's names (part of the LoRATask spec). Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import (
    Field,
)

from mlora_worker.protocol.message import FolderUri, Message

Entry = Annotated[str, Field(min_length=1, max_length=256)]  # name or pattern of modules: stream/targets.py
Modules = Annotated[tuple[Entry, ...], Field(max_length=64)]
_MODULES = (
    "The linear modules that get an adapter, as names such as q_proj, ends of paths such as self_attn.q_proj; patterns, "
    "which must match a whole path such as model.layers.3.self_attn.q_proj; or the single entry all-linear: every linear "
    "module of the decoder layers (never the head, never the embeddings)."
)
WEIGHT = (
    ".weight"  # how the published name of a module ends that PEFT knows as a parameter (stream/targets.py)
)
EXPERTS, STACKED = (
    "experts",
    ("gate_up_proj", "down_proj"),
)  # a module, and its parameters: one for all experts
Rank = Annotated[int, Field(strict=True, ge=1, le=512)]
Alpha = Annotated[float, Field(strict=True, gt=0, le=4096)]


class AdapterType(StrEnum):
    """What of a module's product is trained."""

    LORA = "lora"
    VERA = "vera"


class InitialWeights(StrEnum):
    """How A and B start: B A is zero, so that the adapter begins as the base model."""

    DEFAULT = "default"
    GAUSSIAN = "gaussian"
    ORTHOGONAL = "orthogonal"
    # Refused by a rule of the API, which says why.
    PISSA = "pissa"
    OLORA = "olora"
    EVA = "eva"
    CORDA = "corda"
    LOFTQ = "loftq"


# What PEFT has and a task cannot: said by the API server, by mlora validate and by workers alike.
STARTS = (InitialWeights.DEFAULT, InitialWeights.GAUSSIAN, InitialWeights.ORTHOGONAL)
OTHER_START = (
    "initLoraWeights must be default, gaussian or orthogonal: pissa, olora, corda and loftq change the weights of the "
    "base, which all tasks share, and eva needs a pass over the rows before training; make such a start with PEFT, and "
    "name it in initFrom"
)
ODD_RANK = "initLoraWeights orthogonal needs even ranks: change rank or rankPattern"
DORA_WITH_DROPOUT = (
    "useDora needs dropout 0: PEFT's DoRA multiplies dropped-out rows by the base's weights a second time; set dropout to "
    "0, or remove useDora"
)

NO_TARGETS = (
    "targetModules must name modules such as q_proj, or all-linear; or name parameters of routed experts in "
    "targetParameters"
)
PLAIN_PARAMETERS = (
    "targetParameters needs type lora, dropout 0, no useDora and no orthogonal start, since PEFT has no other adapters of "
    "parameters: remove what differs, or remove targetParameters"
)
PARAMETERS_BY_LAYER = (
    "layersToTransform says nothing of targetParameters in PEFT: remove it, and name the layers there, such as "
    "layers.3.mlp.experts.down_proj"
)
VERA_ALONE = (
    "type vera has rank, dropout, dInitial and the choice of modules only: remove alpha, rankPattern, alphaPattern, "
    "useRslora, useDora, initLoraWeights and loraplusLrRatio"
)
ONLY_VERA = "dInitial has a meaning only with type vera: remove it"
USUAL_ALPHA = 32


class LoRAConfig(Message):
    """The adapter's shape, in PEFT's words."""

    type: AdapterType = Field(
        default=AdapterType.LORA,
        description="lora, or vera: two random matrices for all modules stay as they are, and two vectors for each module "
        "are trained.",
    )
    rank: Rank = Field(
        default=16, description="Rank r of the low-rank product. A larger rank makes a larger adapter."
    )
    alpha: Alpha = Field(
        default=USUAL_ALPHA,
        description="Scaling: the product is multiplied by alpha / rank, or by alpha / sqrt(rank) with useRslora.",
    )
    dropout: Annotated[float, Field(strict=True, ge=0, lt=1)] = Field(
        default=0.0,
        description="Probability that an element of the adapter's input is zeroed while training.",
    )
    target_modules: Modules = Field(default=("q_proj", "v_proj"), description=_MODULES)
    target_parameters: Modules = Field(
        default=(),
        description="Parameters of routed experts that get an adapter for each expert, as ends of paths: "
        "mlp.experts.gate_up_proj, mlp.experts.down_proj. dropout must be 0.",
    )
    exclude_modules: Annotated[tuple[Entry, ...], Field(max_length=64)] = Field(
        default=(),
        description="Names or patterns of modules that targetModules selects but that get no adapter.",
    )
    layers_to_transform: Annotated[
        tuple[Annotated[int, Field(strict=True, ge=0, le=1023)], ...], Field(max_length=1024)
    ] = Field(
        default=(),
        description="Indexes of the decoder layers that get an adapter, from 0. Default: all layers.",
    )
    rank_pattern: Annotated[dict[Entry, Rank], Field(max_length=64)] = Field(
        default={},
        description="Ranks of individual modules, by name, end of path or pattern.",
    )
    alpha_pattern: Annotated[dict[Entry, Alpha], Field(max_length=64)] = Field(
        default={}, description="Alphas of individual modules, by name, end of path or pattern."
    )
    use_rslora: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="Multiply by alpha / sqrt(rank), which keeps large ranks learning (rsLoRA).",
    )
    use_dora: Annotated[bool, Field(strict=True)] = Field(
        default=False,
        description="Learn the lengths of the weights' rows by themselves (DoRA). dropout must be 0.",
    )
    init_lora_weights: InitialWeights = Field(
        default=InitialWeights.DEFAULT,
        description="Initial weights of A: default is Kaiming uniform, gaussian has a standard deviation of "
        "1 / rank. B starts at zero. With orthogonal both start with numbers whose product is zero; ranks must be even.",
    )

    loraplus_lr_ratio: Annotated[float, Field(strict=True, ge=1, le=1024)] | None = Field(
        default=None,
        description="Learning rate of B as a multiple of learningRate, which is that of A (LoRA+). Absent: the same.",
    )

    d_initial: Annotated[float, Field(strict=True, gt=0, le=10)] | None = Field(
        default=None,
        description="With type vera: what the vector behind A starts at. Absent: 0.1.",
    )

    @property
    def vera_start(self) -> float:
        return 0.1 if self.d_initial is None else self.d_initial

    @property
    def refusal(self) -> str | None:
        """Why no model can have such an adapter."""
        if self.init_lora_weights not in STARTS:
            return OTHER_START
        if not self.target_modules and not self.target_parameters:
            return NO_TARGETS
        if self.target_parameters:
            orthogonal = self.init_lora_weights is InitialWeights.ORTHOGONAL
            if self.type is not AdapterType.LORA or self.use_dora or self.dropout > 0 or orthogonal:
                return PLAIN_PARAMETERS
            if self.layers_to_transform:
                return PARAMETERS_BY_LAYER
        if self.init_lora_weights is InitialWeights.ORTHOGONAL and any(
            rank % 2 for rank in (self.rank, *self.rank_pattern.values())
        ):
            return ODD_RANK
        if self.type is AdapterType.VERA:
            plain = LoRAConfig(
                type=self.type,
                rank=self.rank,
                dropout=self.dropout,
                target_modules=self.target_modules,
                exclude_modules=self.exclude_modules,
                layers_to_transform=self.layers_to_transform,
                d_initial=self.d_initial,
            )
            return (
                None if all(getattr(plain, name) == getattr(self, name) for name in _FIELDS) else VERA_ALONE
            )
        if self.d_initial is not None:
            return ONLY_VERA
        return DORA_WITH_DROPOUT if self.use_dora and self.dropout > 0 else None

    @property
    def served_rank(self) -> int | None:
        """The smallest ``--max-lora-rank`` of vLLM under which no module is too large. Ranks end at 512, as there. None for
        what vLLM does not serve."""
        if self.use_dora or self.type is AdapterType.VERA:
            return None
        if {name.rpartition(".")[2] for name in self.target_parameters} not in (set(), set(STACKED)):
            return None  # of experts, both parameters or none
        largest = max((self.rank, *self.rank_pattern.values()))
        return next(rank for rank in SERVED_RANKS if rank >= largest)

    def __hash__(self) -> int:
        """Of all by which users tell many tasks apart: answers are remembered by it, and those of one hash are compared one
        by one."""
        figures = (frozenset(self.rank_pattern.items()), frozenset(self.alpha_pattern.items()))
        return hash((self.rank, self.alpha, self.dropout, self.choice, figures))

    @property
    def choice(self) -> tuple[tuple[str, ...] | tuple[int, ...], ...]:
        """All that says what of a model is adapted."""
        return self.target_modules, self.target_parameters, self.exclude_modules, self.layers_to_transform


def is_parameter(name: str) -> bool:
    """Whether a published name is one of PEFT's ``target_parameters``, and not of its ``target_modules``."""
    *_, module, own = ("", *name.split("."))
    return name.endswith(WEIGHT) or (module == EXPERTS and own in STACKED)


_FIELDS = tuple(LoRAConfig.model_fields)


class LoRASpec(LoRAConfig):
    """As a user writes it (part of the LoRATask spec). What is left out may mean another thing than in a plan, whose
    defaults are for good."""

    target_modules: Modules = Field(default=("all-linear",), description=_MODULES)


# The values that vLLM takes for --max-lora-rank.
SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


class InitFrom(Message):
    """An adapter to go on from."""

    uri: FolderUri = Field(
        description="A PEFT folder with adapter_config.json and adapter_model.safetensors, in the store of the task: "
        "s3://bucket/prefix. Rank, alpha and modules must be those of lora."
    )


class AdapterDtype(StrEnum):
    """In which numbers the adapter's file is written; training is in float32 whatever it says."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
