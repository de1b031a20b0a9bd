"""Which linear modules a LoRAConfig adapts, with rank and alpha of each. Pure.

PEFT's words and rules, made strict: what matches nothing is refused with the real names near it, for with PEFT it would
train a smaller adapter than was asked for, and say nothing. Operator and worker ask the same function, so that the memory
that one counts is the memory that the other takes.

1. ``targetModules``: ``all-linear``, or entries. A *name* (letters, digits, ``_ - .``) is a module's path or its end after
   a dot. Anything else is a *pattern*, which must match the whole path.
2. ``excludeModules`` takes away, by the same rules; ``layersToTransform`` keeps those layers alone.
3. ``rankPattern`` and ``alphaPattern`` give other figures to the modules whose path ends with a key, which may be a
   pattern.
4. ``targetParameters`` names the parameters of routed experts (``parameters``).
5. Nothing else counts: never the head, never the embeddings, nor routers. Where PEFT's ``all-linear`` means experts and
   routers, too, it is refused: it would train less here than there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from mlora_worker.protocol import STACKED, WEIGHT, AdapterType, FailureReason, LoRAConfig, ModelFacts
from mlora_worker.stream.entries import MOST_WORK, Chosen, Entries, Paths, check_work, entries_of, shown
from mlora_worker.stream.entries import Misfit as Misfit
from mlora_worker.stream.modules import Module, adaptable_of, file_path, modules_of, parameters_of
from mlora_worker.stream.parameters import chosen_parameters
from mlora_worker.stream.patterns import is_name
from mlora_worker.stream.unknown import ALL_LINEAR as ALL_LINEAR
from mlora_worker.stream.unknown import never_adapted, unknown_entries

EVERY_LINEAR = ".*"  # a pattern: the linear modules that there are, whatever PEFT calls so

_Figure = TypeVar("_Figure", int, float)


@dataclass(frozen=True, slots=True)
class Target:
    """A module that gets an adapter, or a parameter of routed experts, of which each expert gets one."""

    module: Module
    rank: int
    alpha: float
    scale: float  # what its product is multiplied by
    dora: bool  # a magnitude for each output
    vera: bool  # two vectors are trained, and no matrix
    file_path: str  # what the names of its tensors begin with in PEFT's files

    @property
    def path(self) -> str:
        return self.module.path

    @property
    def rows(self) -> int:
        """Of A, and columns of B, as PEFT's files have them: those of all experts are one matrix."""
        return self.rank * self.module.matrices

    @property
    def parameters(self) -> int:
        """Of A and B, and magnitudes where it has some; or of the vectors."""
        if self.vera:
            return self.rank + self.module.out_features
        magnitudes = self.module.out_features if self.dora else 0
        return self.rows * (self.module.in_features + self.module.out_features) + magnitudes


@lru_cache(maxsize=16)  # megabytes each
def _paths_of(facts: ModelFacts) -> Paths:
    return Paths(tuple(module.path for module in modules_of(facts)))


@lru_cache(maxsize=16)
def _adaptable_paths(facts: ModelFacts) -> Paths:
    """Of parameters, too, which figures of their own may be for."""
    return Paths(tuple(one.path for one in adaptable_of(facts))) if parameters_of(facts) else _paths_of(facts)


@lru_cache(maxsize=64)
def targets_of(facts: ModelFacts, lora: LoRAConfig) -> tuple[Target, ...]:
    """The modules and parameters that ``lora`` adapts, layer by layer. Raises Misfit."""
    if lora.refusal is not None:
        raise Misfit(FailureReason.INVALID_SPEC, f"lora: {lora.refusal}")
    modules, paths, entries = modules_of(facts), _paths_of(facts), entries_of(lora)
    adaptable, all_paths = adaptable_of(facts), _adaptable_paths(facts)
    check_work(entries, all_paths)
    asked = entries.targets.matched(paths)
    chosen = _in_layers(lora, facts, _asked(lora, facts, asked, modules), asked, modules)
    chosen = _excluded(chosen, entries.excluded.matched(paths), facts)
    chosen |= chosen_parameters(facts, lora) << len(modules)
    ranks = _figures(entries.ranks, lora.rank_pattern, lora.rank, chosen, adaptable, all_paths)
    alphas = _figures(entries.alphas, lora.alpha_pattern, lora.alpha, chosen, adaptable, all_paths)
    vera = lora.type is AdapterType.VERA
    picked = _picked(adaptable, chosen)
    blocks = Counter(one.path.rpartition(".")[0] for one in picked if one.experts)
    targets = tuple(
        Target(
            module,
            rank,
            alpha,
            1.0 if vera else _scale(lora, rank, alpha),
            lora.use_dora,
            vera,
            file_path(module.path, blocks[module.path.rpartition(".")[0]] > 1)
            if module.experts
            else module.path,
        )
        for module, rank, alpha in zip(picked, ranks, alphas, strict=True)
    )
    # Who asks for all linear modules does not know that one of them, such as the gate of a shared expert, is narrow.
    for target in targets if ALL_LINEAR not in lora.target_modules else ():
        side = min(target.module.in_features, target.module.out_features)
        if target.rank > side and not target.vera:
            otherwise = (
                "remove it from targetParameters"
                if target.module.experts
                else "leave the module out by excludeModules"
            )
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"rank {target.rank} is larger than the smaller side of {target.module.name} "
                f"({target.module.in_features} x {target.module.out_features}): use at most {side}, or {otherwise}",
            )
    _check_whole_weights(lora, facts, targets)
    return tuple(sorted(targets, key=lambda target: target.module.layer))


def _check_whole_weights(lora: LoRAConfig, facts: ModelFacts, targets: Iterable[Target]) -> None:
    """What PEFT can say of modules that it knows by their weight alone."""
    expert_names = _expert_names(facts, lora.type)
    for target in targets:
        if target.module.name not in expert_names or target.module.experts:
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
        return min(entries_of(lora).size * _adaptable_paths(facts).characters, MOST_WORK)
    except Misfit:
        return MOST_WORK


@lru_cache(maxsize=256)
def ranks_of(facts: ModelFacts, lora: LoRAConfig) -> Mapping[str, int]:
    """Rank by path. Of a config that does not fit, what its names match: who counts bytes is not who refuses."""
    try:
        return {target.path: target.rank for target in targets_of(facts, lora)}
    except Misfit:
        found = _union(map(_paths_of(facts).ending_with, lora.target_modules))
        experts = [one for one in parameters_of(facts) if one.inside.endswith(tuple(lora.target_parameters))]
        return {module.path: lora.rank for module in (*_picked(modules_of(facts), found), *experts)}


@lru_cache(maxsize=256)
def kept_of(facts: ModelFacts, lora: LoRAConfig) -> Mapping[str, int]:
    """Numbers that a token leaves in each adapted module for the backward, by path: the low-rank activations, of each
    expert that it goes through, and with DoRA the outputs before they are multiplied."""
    ranks = ranks_of(facts, lora)
    if lora.target_parameters:
        active = {one.path: one.active for one in parameters_of(facts)}
        ranks = {path: rank * active.get(path, 1) for path, rank in ranks.items()}
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
    ``target_parameters``. So are the parameters of experts, by their path in the layer, or whole ones.
    """
    modules = adaptable_of(facts)
    targets = tuple(targets)
    paths = {target.path for target in targets}
    if is_part:
        return tuple(sorted(paths))
    names = Counter(module.name for module in modules if not module.experts)
    insides = Counter(module.inside for module in modules)
    own = [module for module in modules if module.path in paths]
    own_names = Counter(module.name for module in own if not module.experts)
    own_insides = Counter(module.inside for module in own)
    kind = AdapterType.VERA if any(target.vera for target in targets) else AdapterType.LORA
    expert_names = _expert_names(facts, kind)
    entries = {
        _whole_weight(module, insides[module.inside] == own_insides[module.inside])
        if module.name in expert_names and not module.experts
        else module.name
        if not module.experts and own_names[module.name] == names[module.name]
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
                f"targetModules: in PEFT, {ALL_LINEAR} adapts the routed experts or the router of this model, too, and "
                f"a router gets no adapter here: name the modules, such as [{', '.join(names)}], and the experts in "
                "targetParameters",
            )
        if facts.never_adapted:
            names = dict.fromkeys(module.name for module in modules)
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"targetModules: in PEFT, {ALL_LINEAR} adapts {shown(never_adapted(facts))} of this model, too, which "
                f"gets no adapter here: name the modules, such as [{', '.join(names)}]",
            )
        return (1 << len(modules)) - 1
    expert_names = _expert_names(facts, lora.type)
    routed = [entry for entry in asked if is_name(entry) and entry.rpartition(".")[2] in expert_names]
    if routed:
        there = _picked(modules, _union(asked[entry] for entry in routed))
        told = f"targetModules: in PEFT, {shown(routed)} means the routed experts or the router of this model: remove it, "
        told += f"and name experts in targetParameters ({' or '.join(STACKED)}); a router gets no adapter"
        if there:
            told += (
                f", or write a pattern, which matches linear modules alone, such as .*\\.{there[0].inside}"
            )
        raise Misfit(FailureReason.INVALID_SPEC, told)
    unknown = [entry for entry in dict.fromkeys(lora.target_modules) if not asked[entry]]
    if unknown:
        told = unknown_entries("targetModules", unknown, modules)
        never = never_adapted(facts)
        if any(entry.rpartition(".")[2] in never for entry in unknown):
            told += f"; {shown(never)} gets no adapter: it stays the base's for all tasks"
        if facts.experts:
            told += "; routed experts belong in targetParameters, and a router gets no adapter"
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


def _excluded(chosen: Chosen, excluded: Mapping[str, Chosen], facts: ModelFacts) -> Chosen:
    modules = modules_of(facts)
    for entry, found in excluded.items():
        if found & chosen:
            continue
        if found:
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"excludeModules: {shown([entry])} has no effect, because targetModules does not contain it: remove "
                f"it",
            )
        experts = [
            one.path
            for one in parameters_of(facts)
            if f".{one.path}".endswith(f".{entry}") or f".{one.path.rpartition('.')[0]}".endswith(f".{entry}")
        ]
        if experts:
            raise Misfit(
                FailureReason.INVALID_SPEC,
                f"excludeModules: {shown([entry])} is of the routed experts, of which only those in targetParameters get "
                f"an adapter: remove it, and name there what should have one, such as {experts[0]}",
            )
        raise Misfit(FailureReason.UNKNOWN_TARGET_MODULE, unknown_entries("excludeModules", [entry], modules))
    kept = chosen & ~_union(excluded.values())
    if chosen and not kept:
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
                FailureReason.UNKNOWN_TARGET_MODULE, unknown_entries(field, [key], _picked(modules, chosen))
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
