"""Which linear modules a LoRAConfig adapts, with rank and alpha of each. Pure.

PEFT's words and rules, made strict: what matches nothing is refused with the real names near it, for with PEFT it would
train a smaller adapter than was asked for, and say nothing. Operator and worker ask the same function, so that the memory
that one counts is the memory that the other takes.

1. ``targetModules``: ``all-linear``, or entries. A *name* (letters, digits, ``_ - .``) is a module's path or its end after
   a dot. Anything else is a *pattern*, which must match the whole path.
2. ``excludeModules`` takes away, by the same rules; ``layersToTransform`` keeps those layers alone.
3. ``rankPattern`` and ``alphaPattern`` give other figures to the modules whose path ends with a key, which may be a
   pattern.
4. Only linear modules of the decoder layers count: never the head, never the embeddings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import TypeVar

from mlora_worker.protocol import FailureReason, LoRAConfig, ModelFacts
from mlora_worker.stream.patterns import InvalidPattern, Pattern, compile_pattern, is_name

ALL_LINEAR = "all-linear"
_NAMES_TOLD = 12
_OUTSIDE = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "wpe")

_Figure = TypeVar("_Figure", int, float)


class Misfit(ValueError):
    """``str(error)`` names what does not fit, with its figure, and says what to do."""

    def __init__(self, reason: FailureReason, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Module:
    """A linear module of a decoder layer."""

    path: str  # in the whole model, such as model.layers.3.self_attn.q_proj
    inside: str  # in its layer: self_attn.q_proj
    stage: int
    layer: int
    in_features: int
    out_features: int

    @property
    def name(self) -> str:
        return self.inside.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Target:
    """A module that gets an adapter."""

    module: Module
    rank: int
    alpha: float
    scale: float  # what its product is multiplied by

    @property
    def path(self) -> str:
        return self.module.path

    @property
    def parameters(self) -> int:
        """Of A and B."""
        return self.rank * (self.module.in_features + self.module.out_features)


@lru_cache(maxsize=64)
def modules_of(facts: ModelFacts) -> tuple[Module, ...]:
    """All linear modules of the decoder layers, layer by layer, in the order of a layer's own."""
    found = [
        Module(shape.path_in(layer), shape.inside, shape.stage, layer, shape.in_features, shape.out_features)
        for shape in facts.modules
        for layer in range(shape.first_layer, shape.first_layer + shape.count)
    ]
    return tuple(sorted(found, key=lambda module: module.layer))


@lru_cache(maxsize=1024)
def targets_of(facts: ModelFacts, lora: LoRAConfig) -> tuple[Target, ...]:
    """The modules that ``lora`` adapts, layer by layer. Raises Misfit."""
    modules = modules_of(facts)
    chosen = _excluded(lora, _in_layers(lora, facts, _asked(lora, modules)), modules)
    ranks = _figures("rankPattern", lora.rank_pattern, lora.rank, chosen)
    alphas = _figures("alphaPattern", lora.alpha_pattern, lora.alpha, chosen)
    targets = tuple(
        Target(module, rank, alpha, alpha / (math.sqrt(rank) if lora.use_rslora else rank))
        for module, rank, alpha in zip(chosen, ranks, alphas, strict=True)
    )
    for target in targets:
        side = min(target.module.in_features, target.module.out_features)
        if target.rank > side:
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"rank {target.rank} is larger than the smaller side of {target.module.name} "
                f"({target.module.in_features} x {target.module.out_features}): use at most {side}",
            )
    return targets


@lru_cache(maxsize=1024)
def ranks_of(facts: ModelFacts, lora: LoRAConfig) -> Mapping[str, int]:
    """Rank by path. Of a config that does not fit, what its names match: who counts bytes is not who refuses."""
    try:
        return {target.path: target.rank for target in targets_of(facts, lora)}
    except Misfit:
        names = [entry for entry in lora.target_modules if is_name(entry)]
        modules = modules_of(facts)
        found = set().union(*(_matching("targetModules", name, modules) for name in names))
        return dict.fromkeys(found, lora.rank)


def published_names(facts: ModelFacts, targets: Iterable[Target]) -> tuple[str, ...]:
    """The shortest ``target_modules`` with which PEFT adapts exactly these modules, sorted.

    A module's bare name where all modules of that name are adapted; else its path in the layer where it is adapted in every
    layer; else its whole path.
    """
    modules = modules_of(facts)
    paths = {target.path for target in targets}
    names = Counter(module.name for module in modules)
    insides = Counter(module.inside for module in modules)
    own = [module for module in modules if module.path in paths]
    own_names, own_insides = Counter(m.name for m in own), Counter(m.inside for m in own)
    entries = {
        module.name
        if own_names[module.name] == names[module.name]
        else module.inside
        if own_insides[module.inside] == insides[module.inside] and _is_unambiguous(module.inside, insides)
        else module.path
        for module in own
    }
    return tuple(sorted(entries))


def _is_unambiguous(inside: str, insides: Iterable[str]) -> bool:
    return not any(other.endswith(f".{inside}") for other in insides)


def _asked(lora: LoRAConfig, modules: Sequence[Module]) -> list[Module]:
    entries = dict.fromkeys(lora.target_modules)
    if ALL_LINEAR in entries:
        if len(entries) > 1:
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"targetModules: {ALL_LINEAR} stands alone; remove the other names or {ALL_LINEAR}",
            )
        return list(modules)
    found = {entry: _matching("targetModules", entry, modules) for entry in entries}
    unknown = [entry for entry, paths in found.items() if not paths]
    if unknown:
        raise Misfit(FailureReason.UNKNOWN_TARGET_MODULE, _unknown("targetModules", unknown, modules))
    wanted = set().union(*found.values())
    return [module for module in modules if module.path in wanted]


def _in_layers(lora: LoRAConfig, facts: ModelFacts, chosen: list[Module]) -> list[Module]:
    if not lora.layers_to_transform:
        return chosen
    layers = set(lora.layers_to_transform)
    beyond = sorted(layer for layer in layers if layer >= facts.layers)
    if beyond:
        raise Misfit(
            FailureReason.INVALID_SPEC,
            f"layersToTransform: {', '.join(map(str, beyond))} is no layer of the model, "
            f"which has {facts.layers}, numbered from 0",
        )
    kept = [module for module in chosen if module.layer in layers]
    for entry in lora.target_modules if ALL_LINEAR not in lora.target_modules else ():
        if not _matching("targetModules", entry, kept):
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"targetModules: {entry} matches no module of the layers in layersToTransform",
            )
    return kept


def _excluded(lora: LoRAConfig, chosen: list[Module], modules: Sequence[Module]) -> list[Module]:
    gone: set[str] = set()
    for entry in dict.fromkeys(lora.exclude_modules):
        paths = _matching("excludeModules", entry, chosen)
        if not paths:
            if _matching("excludeModules", entry, modules):
                raise Misfit(
                    FailureReason.INVALID_SPEC,
                    f"excludeModules: {entry} takes nothing away, for targetModules does not have it: remove it",
                )
            raise Misfit(FailureReason.UNKNOWN_TARGET_MODULE, _unknown("excludeModules", [entry], modules))
        gone |= paths
    kept = [module for module in chosen if module.path not in gone]
    if not kept:
        raise Misfit(FailureReason.INVALID_SPEC, "excludeModules takes away all of targetModules")
    return kept


def _figures(
    field: str, pattern: Mapping[str, _Figure], usual: _Figure, chosen: Sequence[Module]
) -> list[_Figure]:
    """One for each of ``chosen``. Keys have no order in a Kubernetes object, so two that disagree are refused."""
    figures: dict[str, tuple[str, _Figure]] = {}
    for key in sorted(pattern):
        found = [module.path for module in chosen if _compiled(field, key).matches_end(module.path)]
        if not found:
            raise Misfit(FailureReason.UNKNOWN_TARGET_MODULE, _unknown(field, [key], chosen))
        for path in found:
            former = figures.get(path)
            if former is not None and former[1] != pattern[key]:
                raise Misfit(
                    FailureReason.INVALID_SPEC, f"{field}: {former[0]} and {key} disagree about {path}"
                )
            figures[path] = key, pattern[key]
    return [figures[module.path][1] if module.path in figures else usual for module in chosen]


def _matching(field: str, entry: str, modules: Iterable[Module]) -> set[str]:
    """Paths that ``entry`` of ``field`` matches."""
    if is_name(entry):
        end = f".{entry}"
        return {module.path for module in modules if module.path == entry or module.path.endswith(end)}
    pattern = _compiled(field, entry)
    return {module.path for module in modules if pattern.fullmatch(module.path)}


def _compiled(field: str, entry: str) -> Pattern:
    try:
        return compile_pattern(entry)
    except InvalidPattern as error:
        raise Misfit(FailureReason.INVALID_SPEC, f"{field}: {entry} is no valid pattern: {error}") from None


def _unknown(field: str, entries: Sequence[str], modules: Sequence[Module]) -> str:
    """What matches nothing, with the names that are nearest, or all of them where they are few."""
    names = tuple(dict.fromkeys(module.name for module in modules))
    told = f"{field}: {', '.join(entries)} is no linear module of the model's decoder layers"
    if any(entry.rpartition(".")[2] in _OUTSIDE for entry in entries):
        told += " (the head and the embeddings never get an adapter)"
    near = [
        near
        for entry in entries
        for near in get_close_matches(entry.rpartition(".")[2], names, n=2, cutoff=0.6)
    ]
    if near:
        told += f"; did you mean {' or '.join(dict.fromkeys(near))}?"
    shown = ", ".join(names[:_NAMES_TOLD]) + (", ..." if len(names) > _NAMES_TOLD else "")
    told += f"; there are {shown} (or {ALL_LINEAR})"
    if any(not is_name(entry) for entry in entries):
        told += f"; a pattern must match a whole path such as {modules[0].path}"
    return told
