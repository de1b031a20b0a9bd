"""What a task asks of a base model's shape, worked out once for each spec. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.memory.model import Demand, demand_of
from mlora_worker.protocol import Failure, LoRAConfig, ModelFacts, TrainingSpec
from mlora_worker.stream.fit import misfit
from mlora_worker.stream.targets import steps_of

_MOST = 20_000  # specs that are remembered for one model
_MOST_TEXT = 32 * 2**20  # characters of their names and patterns
# Steps beside those of matching, for each module of the model: what an adapter takes of the memory is worked out, too.
_FOR_A_MODULE = 2_000


@dataclass(frozen=True, slots=True)
class ModelRequest:
    lora: LoRAConfig
    training: TrainingSpec
    demand: Demand
    misfit: Failure | None  # why the model cannot train it, whatever the memory


class ModelRequests:
    """Of tasks for one model. A part of a spec is one object as long as the spec is not changed, and is known by that."""

    def __init__(self, facts: ModelFacts) -> None:
        self._facts = facts
        self._modules = sum(shape.count for shape in facts.modules)
        self._known: dict[
            tuple[int, int], ModelRequest
        ] = {}  # by the identity of what each entry keeps alive
        self._demands: dict[Demand, Demand] = {}  # the same demand is one object
        self._loras: set[LoRAConfig] = set()  # that were matched
        self._text = 0

    def knows(self, spec: LoRATaskSpec) -> bool:
        return (id(spec.lora), id(spec.training)) in self._known

    def of(self, spec: LoRATaskSpec) -> ModelRequest:
        key = id(spec.lora), id(spec.training)
        known = self._known.get(key)
        if known is None:
            text = text_of(spec.lora)
            if len(self._known) >= _MOST or self._text + text > _MOST_TEXT:
                self._forget()
            self._text += text
            training = spec.training.for_model(self._facts.max_positions)
            demand = demand_of(spec.lora, training, self._facts.max_positions)
            known = self._known[key] = ModelRequest(
                spec.lora,
                spec.training,
                self._demands.setdefault(demand, demand),
                misfit(self._facts, spec.lora, training),
            )
            self._loras.add(spec.lora)
        return known

    def learn(self, spec: LoRATaskSpec) -> int:
        """From now on it is known what ``spec`` asks. Returns the steps that this took, at most; few where only another
        task has asked the same."""
        steps = 0
        if spec.lora not in self._loras:
            steps = steps_of(self._facts, spec.lora) + self._modules * _FOR_A_MODULE
        self.of(spec)
        return steps

    def _forget(self) -> None:
        self._known.clear()
        self._demands.clear()
        self._loras.clear()
        self._text = 0


def text_of(lora: LoRAConfig) -> int:
    """Characters of all names and patterns."""
    return sum(
        map(
            len,
            (
                *lora.target_modules,
                *lora.target_parameters,
                *lora.exclude_modules,
                *lora.rank_pattern,
                *lora.alpha_pattern,
            ),
        )
    )


@lru_cache(maxsize=256)
def of_model(facts: ModelFacts) -> ModelRequests:
    return ModelRequests(facts)
