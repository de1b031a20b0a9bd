"""What of a microbatch decides how much memory a stage needs for it. Pure.

The worker computes these terms of each microbatch that it measures, the operator of those that it expects: the same
functions on both sides, so that a fitted coefficient means the same in both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from mlora_worker.protocol import STACKED, ModelFacts
from mlora_worker.stream.modules import Module, modules_of, parameters_of

# Numbers that a token leaves in each module that an adapter adapts, by its path (``targets.kept_of``).
Ranks = Mapping[str, int]

# Elements of the logits that exist at once. On a CPU: what a cache can keep part of. On a GPU: so that a product has rows
# enough for what the head's weight costs to read.
CHUNK_LOGITS = 16 * 2**20
CHUNK_LOGITS_CUDA = 128 * 2**20
# Elements of a quantised matrix that are made dense at a time, on a CPU, and the bytes that this takes beside the matrix:
# no more than four numbers of 4 bytes for each of them.
UNPACKED_AT_ONCE = 2**16
UNPACKING_BYTES = 4 * 4 * UNPACKED_AT_ONCE
MOST_EXPERT_ROWS = 256  # of a routed expert that are worked on at a time, on a CPU
NORM_AT_ONCE = 2**16  # gradients that are float64 at a time, on a CPU, for their norm
# A product of very few rows may take another path through the matrix library, which rounds otherwise.
FEWEST_LOSS_ROWS = 16


def chunk_rows(vocab_size: int, device: str) -> int:
    """Rows of logits that a chunk of the loss has at most. ``device``: cpu, cuda, cuda:0, ..."""
    logits = CHUNK_LOGITS_CUDA if device.startswith("cuda") else CHUNK_LOGITS
    return max(FEWEST_LOSS_ROWS, logits // vocab_size)


def loss_rows(counts: Iterable[int], vocab_size: int, device: str) -> int:
    """Rows of logits that exist at once for so many supervised positions, of each of those whose rows are multiplied by
    themselves. ``device``: as above.

    Fewer than ``FEWEST_LOSS_ROWS`` are filled up with rows of zeros, once for each of the two products: what is added is
    there twice, and what is filled once more.
    """
    chunk = chunk_rows(vocab_size, device)
    parts = (part for count in counts for part in (min(count, chunk), count % chunk))
    return max(
        (3 * FEWEST_LOSS_ROWS - part if part < FEWEST_LOSS_ROWS else part for part in parts if part),
        default=0,
    )


def most_loss_rows(supervised: int, vocab_size: int, device: str) -> int:
    """The most for so many positions, whosever they are: one of them by itself is filled up most."""
    return max(min(supervised, chunk_rows(vocab_size, device)), 3 * FEWEST_LOSS_ROWS - 1) if supervised else 0


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
    expert_rows: float = 0.0  # the most of one routed expert that are worked on at a time


@dataclass(frozen=True, slots=True)
class ModuleGroup:
    """Modules of one decoder layer that read the same input; or a parameter of its routed experts."""

    layer: int
    inputs: int  # length of the input
    outputs: int  # of all modules together
    paths: tuple[str, ...]  # of the modules, in the whole model


def input_groups(
    facts: ModelFacts, stage: int, names: Sequence[Sequence[str]] = ()
) -> tuple[ModuleGroup, ...]:
    """The groups of ``stage``, layer by layer, in the order of their calls. ``names``: those of a layer as the stage
    reports them; what is not named there is taken to read an input of its own, which is never too little. Behind them are
    the parameters of the layer's routed experts: for what goes into gate and up, the hidden states are kept; what goes into
    down is made again."""
    return _input_groups(facts, stage, tuple(map(tuple, names)))


@lru_cache(maxsize=256)
def _input_groups(
    facts: ModelFacts, stage: int, names: tuple[tuple[str, ...], ...]
) -> tuple[ModuleGroup, ...]:
    groups = []
    own = (module for module in modules_of(facts) if module.stage == stage)
    experts: defaultdict[int, list[Module]] = defaultdict(list)
    for parameter in parameters_of(facts):
        experts[parameter.layer].append(parameter)
    for layer, members in groupby(own, key=lambda module: module.layer):
        left = {module.path: module for module in members}
        ends = _by_end(left.values())
        for told in names:
            group = {m.path: m for name in told for m in ends.get(name, ()) if m.path in left}
            if group:
                first = next(iter(group.values()))
                outputs = sum(module.out_features for module in group.values())
                groups.append(ModuleGroup(layer, first.in_features, outputs, tuple(group)))
                left = {path: module for path, module in left.items() if path not in group}
        groups += [
            ModuleGroup(layer, module.in_features, module.out_features, (module.path,))
            for module in left.values()
        ]
        groups += [
            ModuleGroup(layer, one.in_features if one.name == STACKED[0] else 0, 0, (one.path,))
            for one in experts[layer]
        ]
    return tuple(groups)


def dense_numbers(facts: ModelFacts, stage: int, names: Sequence[Sequence[str]] = ()) -> int:
    """Of the largest input group of ``stage``, whose matrices are dense at once if they are quantised, or of one of
    an expert's. Without ``names``, all modules of a layer with inputs as long are taken for one group, which is never too
    little."""
    own = (one.width for one in facts.experts or () if one.stage == stage)
    expert = facts.hidden_size * max(own, default=0)
    modules = {module.path: module for module in modules_of(facts) if module.stage == stage}

    def numbers(paths: Iterable[str]) -> int:
        known = (modules[path] for path in paths if path in modules)  # stacked experts count as ``expert``
        return sum(module.in_features * module.out_features for module in known)

    if names:
        return max((expert, *(numbers(group.paths) for group in input_groups(facts, stage, names))))
    alike: defaultdict[tuple[int, int], list[str]] = defaultdict(list)
    for path, module in modules.items():
        alike[module.layer, module.in_features].append(path)
    return max((expert, *map(numbers, alike.values())))


def _by_end(modules: Iterable[Module]) -> Mapping[str, list[Module]]:
    """By its path in the layer, and by each end of that after a dot. What a worker tells as groups may name as many modules
    as there are, so each name is looked up and not compared with all of them."""
    found: defaultdict[str, list[Module]] = defaultdict(list)
    for module in modules:
        end = module.inside
        while end:
            found[end].append(module)
            end = end.partition(".")[2]
    return found


def low_rank(ranks: Ranks, group: ModuleGroup) -> int:
    """Numbers of a token that an adapter leaves in ``group``, most of them low-rank activations; 0: it adapts none of its
    modules."""
    return sum(ranks.get(path, 0) for path in group.paths)


def copied(groups: Sequence[ModuleGroup]) -> int:
    """Numbers of a token in the copy that a backward makes of a group's gradients to multiply them, where an adapter is of
    DoRA: of the widest group, as one is there at a time."""
    return max((group.outputs for group in groups), default=0)


def exact_parts(
    parts: Sequence[tuple[Ranks, int]],
    tokens: int,
    groups: Sequence[ModuleGroup],
    *,
    input_bytes: int,
    low_bytes: int,
    recompute: bool = False,
    copies: bool = False,
) -> tuple[int, int]:
    """What adapters add to the activations of a microbatch: all of it, and that of one layer. Bytes.

    ``parts``: each segment's adapter and tokens. Kept are the input of each group that any segment adapts, for all tokens
    (``input_bytes`` each), and each segment's low-rank activations, ``rank`` numbers per module and token (``low_bytes``
    each). The second figure is that of the last group of the last layer, which a backward lets go of before anything else:
    so a peak may be without it. With ``recompute`` nothing of all this is kept; it is there for one layer at a time, and
    the second figure is that of the layer that has most. ``copies``: some adapter is of DoRA, see ``copied``.
    """
    copy = copied(groups) * tokens * input_bytes if copies else 0

    def of(group: ModuleGroup) -> int:
        lows = [(low_rank(ranks, group), own) for ranks, own in parts]
        adapted = any(low for low, _ in lows)
        low = sum(low * own for low, own in lows)
        return (group.inputs * tokens * input_bytes if adapted else 0) + low * low_bytes

    if recompute:
        layers = groupby(groups, key=lambda group: group.layer)
        return 0, max((sum(map(of, own)) for _, own in layers), default=0) + copy
    return sum(map(of, groups)) + copy, of(groups[-1]) if groups else 0


def floor_bytes(parameters: int, hidden_bytes: int, device: str) -> int:
    """At the end of a step's backward the norm of an adapter's gradients is taken in float64. ``parameters``: of the
    largest adapter on the stage. ``hidden_bytes``: of the microbatch's hidden states, which are there as the stage's
    input and output and as a gradient."""
    at_once = parameters if device.startswith("cuda") else min(parameters, NORM_AT_ONCE)
    return 8 * at_once + 3 * hidden_bytes


def lowest_adapted(adapters: Iterable[Ranks], groups: Sequence[ModuleGroup]) -> int:
    """Position in its layer of the first group that any of ``adapters`` adapts, where that is in the first layer; beyond
    all of them otherwise."""
    every = list(adapters)
    first = [group for group in groups if group.layer == groups[0].layer]
    found = (index for index, group in enumerate(first) if any(low_rank(one, group) for one in every))
    return next(found, len(groups))
