"""Bytes that one optimizer step sends in all directions together, by each way to train on several ranks. Pure.

``ranks``: D. ``tokens``: of the step. Values have ``width`` bytes. An all-reduce of S bytes sends 2 (D - 1) S in a ring, a
gather of W bytes of shards (D - 1) W.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Model:
    hidden: int
    layers: int
    layer_parameters: int  # of all decoder layers
    other_parameters: int  # embedding, final norm, head where it is not tied
    adapter_parameters: int


def pipeline(model: Model, ranks: int, tokens: float, width: int) -> float:
    """Hidden states forward and their gradients backward across each border: this project, GPipe and 1F1B."""
    return 2.0 * (ranks - 1) * tokens * model.hidden * width


def tensor_parallel(model: Model, ranks: int, tokens: float, width: int) -> float:
    """Four all-reduces of the hidden states a layer: one less in the first, whose input needs no gradient, and one of the
    head's gradient."""
    return 2.0 * (ranks - 1) * 4 * model.layers * tokens * model.hidden * width


def sharded(model: Model, ranks: int, microbatches: int, width: int) -> float:
    """Each layer's weights gathered forward and backward, for every microbatch of a rank; embedding and head once, since
    they stay until the backward has passed; the adapter's gradients reduced once."""
    layers = 2 * model.layer_parameters + 2 * model.adapter_parameters
    return (ranks - 1) * width * (microbatches * (layers + model.other_parameters) + model.adapter_parameters)
