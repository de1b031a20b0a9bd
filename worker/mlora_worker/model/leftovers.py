"""Stored tensors that no part of the model asks for: what changes the result is refused by name, the rest is named.

transformers drops what it does not know, with a warning that few people read. Towers for images, layers for speculative
decoding or masks of old files may be dropped. A scale or a bias beside a weight may not: without it that weight is another.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from transformers import PreTrainedModel

from mlora_worker.model.errors import UnsupportedModel

_NAMED = 3  # in a message
_WEIGHT = ".weight"


def leftovers(model: PreTrainedModel, names: Collection[str], other_names: Iterable[str] = ()) -> list[str]:
    """Those of ``names`` (all tensors of the checkpoint) that may be dropped, sorted.

    ``model``: on the meta device. ``other_names``: what its weights may be called, too. Raises UnsupportedModel for a
    tensor beside the weight of a module that the model has.
    """
    root = f"{model.base_model_prefix}."
    others = [*other_names]
    known = {*model.state_dict(), *others}
    known |= {name.removeprefix(root) for name in known}
    left = sorted(name for name in names if name not in known)
    weighted = {
        path
        for path, module in model.named_modules()
        if not [*module.children()] and [*module.parameters(recurse=False)]
    }
    weighted |= {name.removesuffix(_WEIGHT) for name in others if name.endswith(_WEIGHT)}
    weighted |= {path.removeprefix(root) for path in weighted}
    wrong = [name for name in left if _owner(name, weighted) is not None]
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        raise UnsupportedModel(
            f"the model's files have {', '.join(wrong[:_NAMED])}{more}, for which a model of type "
            f"{model.config.model_type} with this config.json cannot use: it would run with other weights than those "
            f"that were saved. Use a checkpoint"
            " with plain float weights, or correct config.json (quantization_config for scales, "
            "attention_bias or mlp_bias for biases)"
        )
    return left


def _owner(name: str, weighted: Collection[str]) -> str | None:
    """The module with a weight of its own that ``name`` is a part of."""
    parts = name.split(".")
    return next(
        (path for end in range(len(parts) - 1, 0, -1) if (path := ".".join(parts[:end])) in weighted), None
    )
