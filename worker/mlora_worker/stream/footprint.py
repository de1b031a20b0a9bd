"""What of a microbatch decides how much memory a stage needs for it. Pure.

The worker computes these terms of each microbatch that it measures, the operator of those that it expects: the same
functions on both sides, so that a fitted coefficient means the same in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlora_worker.protocol import LoRAConfig, ModelFacts
from mlora_worker.stream.fit import ALL_LINEAR

# Elements of the logits that exist at once. On a CPU: what a cache can keep part of. On a GPU: so that a product has rows
# enough for what the head's weight costs to read.
CHUNK_LOGITS = 16 * 2**20
CHUNK_LOGITS_CUDA = 128 * 2**20
# A product of very few rows may take another path through the matrix library, which rounds otherwise.
FEWEST_LOSS_ROWS = 16


def loss_rows(supervised: int, vocab_size: int, device: str) -> int:
    """Rows of logits that exist at once for so many supervised positions. ``device``: cpu, cuda, cuda:0, ...

    Fewer than ``FEWEST_LOSS_ROWS`` are filled up with rows of zeros, once for each of the two products: what is added is
    there twice, and what is filled once more.
    """
    if 0 < supervised < FEWEST_LOSS_ROWS:
        return 3 * FEWEST_LOSS_ROWS - supervised
    logits = CHUNK_LOGITS_CUDA if device.startswith("cuda") else CHUNK_LOGITS
    return min(supervised, max(FEWEST_LOSS_ROWS, logits // vocab_size))


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one microbatch on one stage."""

    tokens: float
    squared_tokens: float  # sum over rows of length^2
    supervised: float = 0.0  # positions that the loss is taken of; 0 on all stages but the last
    loss_rows: float = 0.0  # of logits that exist at once
    exact_bytes: float = 0.0  # what adapters add to what is kept for the backward: known exactly
    layer_bytes: float = 0.0  # part of it that a peak may be without, see ``exact_parts``
    lowest_group: int = 0  # first adapted input group; on stage 0 nothing is kept for the backward below it
    floor_bytes: float = 0.0  # a peak is never less; known exactly


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Modules of a decoder layer that read the same input, as one stage has them."""

    inputs: int  # length of the input
    names: tuple[str, ...]
    layers: int  # so many layers of the stage have it


def input_groups(
    facts: ModelFacts, stage: int, names: Sequence[Sequence[str]] = ()
) -> tuple[InputGroup, ...]:
    """The groups of ``stage`` in the order of their calls. ``names``: as the stage reports them; what is not named there
    is taken to read an input of its own, which is never too little."""
    shapes = {module.name: module for module in facts.modules if module.stage == stage}
    told = [tuple(name for name in group if name in shapes) for group in names]
    told += [(name,) for name in shapes if not any(name in group for group in told)]
    return tuple(
        InputGroup(shapes[group[0]].in_features, group, shapes[group[0]].count) for group in told if group
    )


def targeted(lora: LoRAConfig, group: InputGroup) -> int:
    """How many modules of ``group`` have an adapter."""
    everything = ALL_LINEAR in lora.target_modules
    return sum(everything or name in lora.target_modules for name in group.names)


def exact_parts(
    parts: Sequence[tuple[LoRAConfig, int]],
    tokens: int,
    groups: Sequence[InputGroup],
    *,
    input_bytes: int,
    low_bytes: int,
    recompute: bool = False,
) -> tuple[int, int]:
    """What adapters add to the activations of a microbatch: all of it, and that of one layer. Bytes.

    ``parts``: each segment's adapter and tokens. Kept are the input of each group that any segment adapts, for all tokens
    (``input_bytes`` each), and each segment's low-rank activations, ``rank`` numbers per module and token (``low_bytes``
    each). The second figure is that of the last group of one layer, which a backward lets go of before anything else: so
    a peak may be without it. With ``recompute`` nothing of all this is kept; it is there for one layer at a time, and
    the second figure is that of a whole layer.
    """

    def of(group: InputGroup) -> int:
        adapted = any(targeted(lora, group) for lora, _ in parts)
        low = sum(lora.rank * targeted(lora, group) * own for lora, own in parts)
        return (group.inputs * tokens * input_bytes if adapted else 0) + low * low_bytes

    if recompute:
        return 0, sum(map(of, groups))
    return sum(of(group) * group.layers for group in groups), of(groups[-1]) if groups else 0


def floor_bytes(parameters: int, hidden_bytes: int) -> int:
    """At the end of a step's backward the norm of an adapter's gradients is taken in float64. ``parameters``: of the
    largest adapter on the stage. ``hidden_bytes``: of the microbatch's hidden states, which are there as the stage's
    input and output and as a gradient."""
    return 8 * parameters + 3 * hidden_bytes


def lowest_adapted(loras: Iterable[LoRAConfig], groups: Sequence[InputGroup]) -> int:
    """Position of the first group that any of ``loras`` adapts."""
    every = list(loras)
    found = (index for index, group in enumerate(groups) if any(targeted(one, group) for one in every))
    return next(found, len(groups))
