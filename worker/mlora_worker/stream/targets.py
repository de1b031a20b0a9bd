"""Which linear modules a LoRAConfig adapts, with rank and alpha of each. Pure.

PEFT's words and rules, made strict: what matches nothing is refused with the real names near it, for with PEFT it would
train a smaller adapter than was asked for, and say nothing. Operator and worker ask the same function, so that the memory
that one counts is the memory that the other takes.

1. ``targetModules``: ``all-linear``, or entries. A *name* (letters, digits, ``_ - .``) is a module's path or its end after
   a dot. Anything else is a *pattern*, which must match the whole path.
2. ``excludeModules`` takes away, by the same rules; ``layersToTransform`` keeps those layers alone.
3. ``rankPattern`` and ``alphaPattern`` give other figures to the modules whose path ends with a key, which may be a
   pattern.
4. Only linear modules of the decoder layers count: never the head, never the embeddings, nor routed experts and their
   router. Where PEFT's ``all-linear`` means these, too, it is refused: it would train less here than there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from typing import TypeVar

from mlora_worker.protocol import WEIGHT, AdapterType, FailureReason, LoRAConfig, ModelFacts
from mlora_worker.stream.entries import MOST_WORK, Chosen, Entries, Paths, check_work, entries_of, shown
from mlora_worker.stream.entries import Misfit as Misfit
from mlora_worker.stream.patterns import is_name

ALL_LINEAR = "all-linear"
EVERY_LINEAR = ".*"  # a pattern: the linear modules that there are, whatever PEFT calls so
_NAMES_TOLD = 12
_COMPARED, _LONGEST_NAME = 8, 64  # entries that are compared with real names, and characters of each
_OUTSIDE = ("lm_head", "embed_out", "embed_tokens", "embed_in", "wte", "wpe")

_Figure = TypeVar("_Figure", int, float)


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
    dora: bool  # a magnitude for each output
    vera: bool  # two vectors are trained, and no matrix

    @property
    def path(self) -> str:
        return self.module.path

    @property
    def parameters(self) -> int:
        """Of A and B, and magnitudes where it has some; or of the vectors."""
        if self.vera:
            return self.rank + self.module.out_features
        magnitudes = self.module.out_features if self.dora else 0
        return self.rank * (self.module.in_features + self.module.out_features) + magnitudes


@lru_cache(maxsize=64)
def modules_of(facts: ModelFacts) -> tuple[Module, ...]:
    """All linear modules of the decoder layers, layer by layer, in the order of a layer's own."""
    found = [
        Module(shape.path_in(layer), shape.inside, shape.stage, layer, shape.in_features, shape.out_features)
        for shape in facts.modules
        for layer in range(shape.first_layer, shape.first_layer + shape.count)
    ]
    return tuple(sorted(found, key=lambda module: module.layer))


@lru_cache(maxsize=16)  # megabytes each
def _paths_of(facts: ModelFacts) -> Paths:
    return Paths(tuple(module.path for module in modules_of(facts)))


@lru_cache(maxsize=64)
def targets_of(facts: ModelFacts, lora: LoRAConfig) -> tuple[Target, ...]:
    """The modules that ``lora`` adapts, layer by layer. Raises Misfit."""
    if lora.refusal is not None:
        raise Misfit(FailureReason.INVALID_SPEC, f"lora: {lora.refusal}")
    modules, paths, entries = modules_of(facts), _paths_of(facts), entries_of(lora)
    check_work(entries, paths)
    asked = entries.targets.matched(paths)
    chosen = _in_layers(lora, facts, _asked(lora, facts, asked, modules), asked, modules)
    chosen = _excluded(chosen, entries.excluded.matched(paths), modules)
    ranks = _figures(entries.ranks, lora.rank_pattern, lora.rank, chosen, modules, paths)
    alphas = _figures(entries.alphas, lora.alpha_pattern, lora.alpha, chosen, modules, paths)
    vera = lora.type is AdapterType.VERA
    targets = tuple(
        Target(module, rank, alpha, 1.0 if vera else _scale(lora, rank, alpha), lora.use_dora, vera)
        for module, rank, alpha in zip(_picked(modules, chosen), ranks, alphas, strict=True)
    )
    for target in targets:
        side = min(target.module.in_features, target.module.out_features)
        if target.rank > side and not target.vera:
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"rank {target.rank} is larger than the smaller side of {target.module.name} "
                f"({target.module.in_features} x {target.module.out_features}): use at most {side}, or leave the module "
                "out by excludeModules",
            )
    _check_whole_weights(lora, facts, targets)
    return targets


def _check_whole_weights(lora: LoRAConfig, facts: ModelFacts, targets: Iterable[Target]) -> None:
    """What PEFT can say of modules that it knows by their weight alone."""
    expert_names = _expert_names(facts, lora.type)
    for target in targets:
        if target.module.name not in expert_names:
            continue
        own = target.rank != lora.rank or target.alpha != lora.alpha
        if lora.dropout or lora.use_dora or own:
            asked = "a rank or an alpha of its own" if own else "DoRA" if lora.use_dora else "dropout"
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"{asked} is not possible for {target.path}: in a model "
                "with routed experts PEFT knows it as target_parameters, which has none. Remove it, or leave the module "
                "out by excludeModules",
            )


def _scale(lora: LoRAConfig, rank: int, alpha: float) -> float:
    return alpha / (math.sqrt(rank) if lora.use_rslora else rank)


def steps_of(facts: ModelFacts, lora: LoRAConfig) -> int:
    """That it takes at most to find the targets: what patterns cost, see ``entries.MOST_WORK``."""
    try:
        return min(entries_of(lora).size * _paths_of(facts).characters, MOST_WORK)
    except Misfit:
        return MOST_WORK


@lru_cache(maxsize=256)
def ranks_of(facts: ModelFacts, lora: LoRAConfig) -> Mapping[str, int]:
    """Rank by path. Of a config that does not fit, what its names match: who counts bytes is not who refuses."""
    try:
        return {target.path: target.rank for target in targets_of(facts, lora)}
    except Misfit:
        found = _union(map(_paths_of(facts).ending_with, lora.target_modules))
        return {module.path: lora.rank for module in _picked(modules_of(facts), found)}


@lru_cache(maxsize=256)
def kept_of(facts: ModelFacts, lora: LoRAConfig) -> Mapping[str, int]:
    """Numbers that a token leaves in each adapted module for the backward, by path: the low-rank activations, and with DoRA
    the outputs before they are multiplied."""
    ranks = ranks_of(facts, lora)
    if not lora.use_dora:
        return ranks
    outputs = {module.path: module.out_features for module in modules_of(facts)}
    return {path: rank + outputs[path] for path, rank in ranks.items()}


def widest(targets: Iterable[Target]) -> tuple[int, int]:
    """The most inputs and the most outputs of a module: the sides of VeRA's random matrices."""
    sides = [(target.module.in_features, target.module.out_features) for target in targets]
    return max(inputs for inputs, _ in sides), max(outputs for _, outputs in sides)


def published_names(
    facts: ModelFacts, targets: Iterable[Target], *, is_part: bool = False
) -> tuple[str, ...]:
    """The shortest ``target_modules`` with which PEFT adapts exactly these modules, sorted.

    A module's bare name where all modules of that name are adapted; else its path in the layer where it is adapted in every
    layer; else its whole path. ``is_part``: the whole model has other modules, too, whose names nobody knows here, so
    whole paths alone are sure. Where PEFT takes a name for routed experts, it is the module's weight: a
    ``target_parameters``.
    """
    modules = modules_of(facts)
    targets = tuple(targets)
    paths = {target.path for target in targets}
    if is_part:
        return tuple(sorted(paths))
    names = Counter(module.name for module in modules)
    insides = Counter(module.inside for module in modules)
    own = [module for module in modules if module.path in paths]
    own_names, own_insides = Counter(m.name for m in own), Counter(m.inside for m in own)
    kind = AdapterType.VERA if any(target.vera for target in targets) else AdapterType.LORA
    expert_names = _expert_names(facts, kind)
    entries = {
        _whole_weight(module, insides[module.inside] == own_insides[module.inside])
        if module.name in expert_names
        else module.name
        if own_names[module.name] == names[module.name]
        else module.inside
        if own_insides[module.inside] == insides[module.inside] and _is_unambiguous(module.inside, insides)
        else module.path
        for module in own
    }
    return tuple(sorted(entries))


def _expert_names(facts: ModelFacts, kind: AdapterType) -> frozenset[str]:
    """What PEFT takes for the experts and their router, whichever module is meant. Of LoRA alone."""
    if kind is not AdapterType.LORA:
        return frozenset()
    return frozenset(name for shape in facts.experts or () for name in shape.in_peft)


def _whole_weight(module: Module, in_each_layer: bool) -> str:
    return f"{module.inside if in_each_layer else module.path}{WEIGHT}"


def _is_unambiguous(inside: str, insides: Iterable[str]) -> bool:
    return not any(other.endswith(f".{inside}") for other in insides)


def _asked(
    lora: LoRAConfig, facts: ModelFacts, asked: Mapping[str, Chosen], modules: Sequence[Module]
) -> Chosen:
    if ALL_LINEAR in asked:
        if len(asked) > 1:
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"targetModules: {ALL_LINEAR} must be the only entry: remove the other names or {ALL_LINEAR}",
            )
        if _expert_names(facts, lora.type):
            names = dict.fromkeys(module.name for module in modules)
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"targetModules: in PEFT, {ALL_LINEAR} adapts the routed experts and the router of this model, too, and "
                f"those get no adapter here: name the modules, such as [{', '.join(names)}]",
            )
        return (1 << len(modules)) - 1
    expert_names = _expert_names(facts, lora.type)
    routed = [entry for entry in asked if is_name(entry) and entry.rpartition(".")[2] in expert_names]
    if routed:
        there = _picked(modules, _union(asked[entry] for entry in routed))
        told = f"targetModules: in PEFT, {shown(routed)} means the routed experts and the router of this model, and those "
        told += "get no adapter here: remove it"
        if there:
            told += (
                f", or write a pattern, which matches linear modules alone, such as .*\\.{there[0].inside}"
            )
        raise Misfit(FailureReason.INVALID_SPEC, told)
    unknown = [entry for entry in dict.fromkeys(lora.target_modules) if not asked[entry]]
    if unknown:
        told = _unknown("targetModules", unknown, modules)
        if facts.experts:
            told += "; routed experts and their router get no adapter"
        raise Misfit(FailureReason.UNKNOWN_TARGET_MODULE, told)
    return _union(asked.values())


def _in_layers(
    lora: LoRAConfig,
    facts: ModelFacts,
    chosen: Chosen,
    asked: Mapping[str, Chosen],
    modules: Sequence[Module],
) -> Chosen:
    if not lora.layers_to_transform:
        return chosen
    layers = set(lora.layers_to_transform)
    beyond = sorted(layer for layer in layers if layer >= facts.layers)
    if beyond:
        raise Misfit(
            FailureReason.INVALID_SPEC,
            f"layersToTransform: {shown(map(str, beyond))} is not a layer of the model, which has {facts.layers}, "
            f"numbered from 0",
        )
    kept = chosen & _union(1 << at for at, module in enumerate(modules) if module.layer in layers)
    for entry in lora.target_modules if ALL_LINEAR not in asked else ():
        if not asked[entry] & kept:
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"targetModules: {shown([entry])} matches no module of the layers in layersToTransform",
            )
    return kept


def _excluded(chosen: Chosen, excluded: Mapping[str, Chosen], modules: Sequence[Module]) -> Chosen:
    for entry, found in excluded.items():
        if found & chosen:
            continue
        if found:
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"excludeModules: {shown([entry])} has no effect, because targetModules does not contain it: remove "
                f"it",
            )
        raise Misfit(FailureReason.UNKNOWN_TARGET_MODULE, _unknown("excludeModules", [entry], modules))
    kept = chosen & ~_union(excluded.values())
    if not kept:
        raise Misfit(FailureReason.INVALID_SPEC, "excludeModules excludes all of targetModules")
    return kept


def _figures(
    entries: Entries,
    pattern: Mapping[str, _Figure],
    usual: _Figure,
    chosen: Chosen,
    modules: Sequence[Module],
    paths: Paths,
) -> list[_Figure]:
    """One for each of ``chosen``. Keys have no order in a Kubernetes object, so two that disagree are refused."""
    field, matched = entries.field, entries.matched(paths)
    own: list[tuple[str, _Figure, Chosen]] = []
    for key in sorted(pattern):
        found, figure = matched[key] & chosen, pattern[key]
        if not found:
            raise Misfit(
                FailureReason.UNKNOWN_TARGET_MODULE, _unknown(field, [key], _picked(modules, chosen))
            )
        for former, other, there in own:
            if other != figure and there & found:
                path = _picked(modules, there & found)[0].path
                told = f"{field}: {shown([former])} and {shown([key])} disagree about {path}"
                raise Misfit(FailureReason.INVALID_SPEC, told)
        own.append((key, figure, found))
    figures = {at: figure for _, figure, found in own for at in _positions(found)}
    return [figures.get(at, usual) for at in _positions(chosen)]


def _union(each: Iterable[Chosen]) -> Chosen:
    found = 0
    for one in each:
        found |= one
    return found


def _positions(chosen: Chosen) -> list[int]:
    return [at for at, bit in enumerate(reversed(bin(chosen))) if bit == "1"]


def _picked(modules: Sequence[Module], chosen: Chosen) -> list[Module]:
    return [modules[at] for at in _positions(chosen)]


def _unknown(field: str, entries: Sequence[str], modules: Sequence[Module]) -> str:
    """What matches nothing, with the names that are nearest, or all of them where they are few."""
    names = tuple(dict.fromkeys(module.name for module in modules))
    told = f"{field}: {shown(entries)} is not a linear module of the model's decoder layers"
    if any(entry.rpartition(".")[2] in _OUTSIDE for entry in entries):
        told += " (the head and the embeddings never get an adapter: they hold for all tasks as they are)"
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
