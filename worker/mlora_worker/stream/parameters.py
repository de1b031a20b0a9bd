"""Which parameters of routed experts a LoRAConfig adapts. Pure.

PEFT takes the end of a path after a dot for each parameter that it matches, and nothing else: no pattern, no exclusion, no
layers. What matches nothing is refused, and so are routers: which experts a token goes through stays the base's choice.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlora_worker.protocol import FailureReason, LoRAConfig, ModelFacts
from mlora_worker.stream.entries import Chosen, Misfit, Paths, shown
from mlora_worker.stream.modules import parameters_of
from mlora_worker.stream.patterns import is_name

_FIELD = "targetParameters"


def chosen_parameters(facts: ModelFacts, lora: LoRAConfig) -> Chosen:
    """Of ``parameters_of``. Raises Misfit."""
    entries = tuple(dict.fromkeys(lora.target_parameters))
    if not entries:
        return 0
    stacks = parameters_of(facts)
    if not stacks:
        former = " that can have adapters, or this worker is of a former version" if facts.experts else ""
        raise Misfit(
            FailureReason.UNKNOWN_TARGET_MODULE,
            f"{_FIELD}: the base model has no routed experts{former}; remove it, and name linear modules in targetModules",
        )
    paths, found = Paths(tuple(stack.path for stack in stacks)), 0
    names = list(dict.fromkeys(stack.inside for stack in stacks))
    for entry in entries:
        own = paths.ending_with(entry) if is_name(entry) else 0
        if not own:
            raise Misfit(FailureReason.UNKNOWN_TARGET_MODULE, _unknown(entry, facts, names))
        found |= own
    return found


def _unknown(entry: str, facts: ModelFacts, names: Sequence[str]) -> str:
    told = f"{_FIELD}: {shown([entry])} is not a parameter of the model's routed experts"
    routers = ("router", *(f"{one}.weight" for one in ("gate", "router")))
    if not is_name(entry):
        told += ", and patterns are not possible here"
    elif entry.endswith(routers):
        told += " (the router gets no adapter: which experts a token goes through stays the base's choice)"
    elif entry.endswith(".weight"):
        told += " (a linear module belongs in targetModules, without .weight)"
    elif any(entry.rpartition(".")[2] in shape.in_peft for shape in facts.experts or ()):
        told += " (gate and up of all experts are one parameter, down of all is the other)"
    return f"{told}; there are {', '.join(names)}"
