"""What a user is told of words that match no module of a model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from mlora_worker.protocol import ModelFacts
from mlora_worker.stream.entries import shown
from mlora_worker.stream.modules import Module
from mlora_worker.stream.patterns import is_name

ALL_LINEAR = "all-linear"
_NAMES_TOLD = 12
_COMPARED, _LONGEST_NAME = 8, 64  # entries that are compared with real names, and characters of each
_OUTSIDE = ("lm_head", "embed_out", "embed_tokens", "embed_tokens_per_layer", "embed_in", "wte", "wpe")


def never_adapted(facts: ModelFacts) -> list[str]:
    """Names of modules that PEFT's all-linear means, and that never get an adapter here."""
    paths = ([shape.name, *reversed(shape.path.split("."))] for shape in facts.never_adapted or ())
    names = (next((part for part in parts if not part.isdecimal()), parts[0]) for parts in paths)
    return list(dict.fromkeys(names))


def unknown_entries(field: str, entries: Sequence[str], modules: Sequence[Module]) -> str:
    """What matches nothing, with the names that are nearest, or all of them where they are few."""
    names = tuple(dict.fromkeys(module.name for module in modules))
    told = f"{field}: {shown(entries)} is not a linear module of the model's decoder layers"
    if any(entry.rpartition(".")[2] in _OUTSIDE for entry in entries):
        told += (
            " (the head and the embeddings never get an adapter: they hold for all tasks as they are; for new tokens train "
            "the base's embeddings first, and serve that base)"
        )
    near = [
        near
        for entry in entries[:_COMPARED]
        for near in get_close_matches(entry.rpartition(".")[2][:_LONGEST_NAME], names, n=2, cutoff=0.6)
    ]
    if near:
        told += f"; did you mean {' or '.join(dict.fromkeys(near))}?"
    listed = ", ".join(names[:_NAMES_TOLD]) + (", ..." if len(names) > _NAMES_TOLD else "")
    told += f"; there are {listed} (or {ALL_LINEAR})"
    if any(not is_name(entry) for entry in entries):
        told += f"; a pattern must match a whole path such as {modules[0].path}"
    return told
