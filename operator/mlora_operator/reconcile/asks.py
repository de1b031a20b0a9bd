"""What a task asks of a base model's shape, worked out once for each spec. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.memory.model import Demand, demand_of
from mlora_worker.protocol import Failure, ModelFacts
from mlora_worker.stream.fit import misfit

_MOST = 20_000  # specs that are remembered for one model


@dataclass(frozen=True, slots=True)
class Asks:
    spec: LoRATaskSpec
    demand: Demand
    misfit: Failure | None  # why the model cannot train it, whatever the memory


class AsksOfModel:
    """Of tasks for one model. A spec is one object as long as it is not changed, and is known by that."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._known: dict[int, Asks] = {}  # by the identity of the spec, which each entry keeps alive
        self._demands: dict[Demand, Demand] = {}  # the same demand is one object

    def of(self, spec: LoRATaskSpec) -> Asks:
        known = self._known.get(id(spec))
        if known is None:
            if len(self._known) >= _MOST:
                self._known.clear()
                self._demands.clear()
            demand = demand_of(spec.lora, spec.training, self._facts.max_positions)
            known = self._known[id(spec)] = Asks(
                spec,
                self._demands.setdefault(demand, demand),
                misfit(self._facts, spec.lora, spec.training),
            )
        return known


@lru_cache(maxsize=256)
def of_model(facts: ModelFacts) -> AsksOfModel:
    return AsksOfModel(facts)
