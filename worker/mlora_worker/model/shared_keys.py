"""Layers that use keys and values of an earlier layer instead of making their own.

transformers marks both: a layer that *stores* writes what it made to a dict by its kind (of attention: in windows or full),
one that *shares* reads from there. The last layer of a kind that makes its own is the one that stores.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

from mlora_worker.model.borders import SharedKeys
from mlora_worker.model.errors import UnsupportedModel

_UNUSED = ("k_proj", "v_proj", "k_norm", "v_norm")  # of a layer that shares


def _attentions(layers: nn.ModuleList) -> Iterator[tuple[int, Any]]:
    for index, layer in enumerate(layers):
        attention = getattr(layer, "self_attn", None)
        if getattr(attention, "is_kv_shared_layer", None) is not None:
            yield index, attention


def shared_keys_of(layers: nn.ModuleList) -> tuple[SharedKeys, ...]:
    """By the layer that makes them. Shapes only, so meta modules serve."""
    own = list(_attentions(layers))
    last = {one.layer_type: index for index, one in own if one.is_kv_shared_layer}
    return tuple(
        SharedKeys(
            one.layer_type, index, last[one.layer_type], one.k_proj.out_features // one.head_dim, one.head_dim
        )
        for index, one in own
        if one.store_full_length_kv and one.layer_type in last
    )


def check_shared_keys(layers: nn.ModuleList, *, has_inputs: bool) -> None:
    """Raises UnsupportedModel for layers that share what no layer makes. Layers whose keys nobody uses store nothing.
    ``has_inputs``: layers have inputs of their own."""
    made = {one.kind for one in shared_keys_of(layers)}
    if made and not has_inputs:
        raise UnsupportedModel(
            "num_kv_shared_layers without hidden_size_per_layer_input is not supported: transformers itself cannot compute "
            "it, so nothing could be compared"
        )
    for index, one in _attentions(layers):
        if one.is_kv_shared_layer and one.layer_type not in made:
            raise UnsupportedModel(
                f"layer {index} uses keys and values of an earlier layer, and no {one.layer_type} layer before it makes "
                "them: num_kv_shared_layers in config.json is too large"
            )
        one.store_full_length_kv = one.store_full_length_kv and one.layer_type in made


def unused_names(layers: nn.ModuleList, names: Collection[str]) -> set[str]:
    """Of ``names``, tensors that files may have of layers that share, and that nothing reads."""
    ends = tuple(
        f"layers.{index}.self_attn.{unused}.weight"
        for index, one in _attentions(layers)
        if one.is_kv_shared_layer
        for unused in _UNUSED
    )
    return {name for name in names if ends and name.endswith(ends)}
