"""What an adapter may be added to: linear modules of the decoder layers, and the parameters of routed experts. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mlora_worker.protocol import STACKED, ModelFacts


@dataclass(frozen=True, slots=True)
class Module:
    """A linear module of a decoder layer; or a parameter that holds as many matrices as the layer has routed experts,
    which is adapted as if each were a module."""

    path: str  # in the whole model, such as model.layers.3.self_attn.q_proj
    inside: str  # in its layer: self_attn.q_proj
    stage: int
    layer: int
    in_features: int
    out_features: int
    experts: int = 0  # whose matrices it holds; 0: it is a linear module
    active: int = 1  # of them, those that a token goes through
    swapped: bool = False  # what PEFT takes for its inputs are its outputs

    @property
    def name(self) -> str:
        return self.inside.rpartition(".")[2]

    @property
    def matrices(self) -> int:
        return self.experts or 1


@lru_cache(maxsize=64)
def modules_of(facts: ModelFacts) -> tuple[Module, ...]:
    """All linear modules of the decoder layers, layer by layer, in the order of a layer's own."""
    found = [
        Module(shape.path_in(layer), shape.inside, shape.stage, layer, shape.in_features, shape.out_features)
        for shape in facts.modules
        for layer in range(shape.first_layer, shape.first_layer + shape.count)
    ]
    return tuple(sorted(found, key=lambda module: module.layer))


@lru_cache(maxsize=64)
def parameters_of(facts: ModelFacts) -> tuple[Module, ...]:
    """Those of routed experts, layer by layer, in the order of a layer's own: gate and up, which are one, and down."""
    found = []
    for shape in facts.experts or ():
        for layer in range(shape.first_layer, shape.first_layer + shape.count):
            path = shape.path_in(layer)
            if path is None:
                continue
            sides = [(facts.hidden_size, 2 * shape.width), (shape.width, facts.hidden_size)]
            if shape.swapped:
                sides = [(outputs, inputs) for inputs, outputs in sides]
            inside = path.partition(f".{layer}.")[2]
            found += [
                Module(
                    f"{path}.{name}",
                    f"{inside}.{name}",
                    shape.stage,
                    layer,
                    *side,
                    shape.experts,
                    shape.active,
                    bool(shape.swapped),
                )
                for name, side in zip(STACKED, sides, strict=True)
            ]
    return tuple(sorted(found, key=lambda module: module.layer))


@lru_cache(maxsize=64)
def adaptable_of(facts: ModelFacts) -> tuple[Module, ...]:
    """Modules, then parameters."""
    return modules_of(facts) + parameters_of(facts)


def file_path(path: str, beside: bool) -> str:
    """What the names of a parameter's A and B begin with in PEFT's files, where it wraps one of the experts' parameters in
    the other. ``beside``: both have an adapter; the first then lies inside."""
    module, _, name = path.rpartition(".")
    return f"{module}.base_layer" if beside and name == STACKED[0] else module
