"""Rotary frequencies of packed rows, by the model's own module.

Where a model chooses its frequencies by the longest row of a batch (rope type ``longrope``: one set up to the length that
it was first trained on, another above), each row gets those of its own length here: what it would get alone.
"""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.errors import UnsupportedModel

# Each [1, tokens, rotated size]; or one complex number for both, of neighbouring elements: [1, tokens, rotated size / 2].
CosSin = tuple[Tensor, Tensor] | Tensor

_LONGROPE = "longrope"
_ROPE_TYPES = ("default", "linear", "llama3", _LONGROPE, "yarn")
# These grow their frequencies with the longest row that was ever seen, and keep them for those that follow.
_HISTORY_DEPENDENT = ("dynamic",)


def check_rope(config: PretrainedConfig, more: tuple[str, ...] = ()) -> None:
    """Raises UnsupportedModel for frequencies that depend on other rows, or have not been compared. ``more``: types that
    this kind of model may have, too; with ``alpha``, which makes them depend on nothing (Hunyuan).
    """
    known = _ROPE_TYPES + more
    kinds = _rope_parameters(config)
    for parameters in kinds:
        rope_type = parameters.get("rope_type", "default")
        if rope_type in _HISTORY_DEPENDENT and not (rope_type in more and parameters.get("alpha")):
            raise UnsupportedModel(
                f"rope type {rope_type} depends on the longest row so far: tasks would change each other's results"
            )
        if rope_type not in known:
            raise UnsupportedModel(
                f"rope type {rope_type} is not supported; supported types: {', '.join(known)}"
            )
        if rope_type == _LONGROPE and len(kinds) > 1:
            raise UnsupportedModel(f"rope type {_LONGROPE} of some layers alone is not supported")


def make_rotary(made: nn.Module) -> nn.Module:
    """``made``: the decoder's module, perhaps on the meta device. A new one on the CPU: frequencies are no part of a
    checkpoint, and are float32 whatever the weights' type."""
    config = made.config
    assert isinstance(config, PretrainedConfig)
    with torch.device("cpu"):
        rotary: nn.Module = type(made)(config=config)
    if any(parameters.get("rope_type") == _LONGROPE for parameters in _rope_parameters(config)):
        return LongRope(rotary, int(config.rope_parameters["original_max_position_embeddings"]))
    return rotary


def cos_sin(rotary: nn.Module, hidden: Tensor, rows: PackedRows, layer_type: str | None) -> CosSin:
    """``hidden`` [1, tokens, size] gives type and device. ``layer_type``: where frequencies differ by it."""
    if isinstance(rotary, LongRope):
        return rotary(hidden, rows)  # type: ignore[no-any-return]
    options = {} if layer_type is None else {"layer_type": layer_type}
    return rotary(hidden, position_ids=rows.position_ids, **options)  # type: ignore[no-any-return]


class LongRope(nn.Module):
    """Both sets of frequencies of ``rotary``, each fixed; a row longer than ``original`` tokens gets the second."""

    def __init__(self, rotary: nn.Module, original: int) -> None:
        super().__init__()
        self.short, self.long, self.original = rotary, deepcopy(rotary), original
        # The module itself sets the frequencies when it sees such a position.
        self.long(torch.zeros(1, 1, 1), position_ids=torch.tensor([[original]]))
        for one in (self.short, self.long):
            setattr(one, "rope_type", "default")  # noqa: B010 - what says whether forward chooses again

    def forward(self, hidden: Tensor, rows: PackedRows) -> CosSin:
        long = [length > self.original for length in rows.lengths]
        if all(long) or not any(long):
            chosen = self.long if long[0] else self.short
            return chosen(hidden, position_ids=rows.position_ids)  # type: ignore[no-any-return]
        parts = [
            (self.long if is_long else self.short)(
                hidden, position_ids=torch.arange(length, device=hidden.device)[None]
            )
            for is_long, length in zip(long, rows.lengths, strict=True)
        ]
        if isinstance(parts[0], Tensor):
            return torch.cat(parts, dim=1)
        cos, sin = zip(*parts, strict=True)
        return torch.cat(cos, dim=1), torch.cat(sin, dim=1)


def _rope_parameters(config: PretrainedConfig) -> list[dict[str, object]]:
    """One, or one for each type of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    by_type = [value for value in found.values() if isinstance(value, dict)]
    return by_type or [found]
