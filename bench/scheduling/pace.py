"""How fast simulated tasks train: together on a pipeline, by its own planner, or each alone on one GPU. Seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.scheduling.simulate import SimTask
from mlora_worker.stream.costs import StageCost, launch_tokens
from mlora_worker.stream.planner import TaskLoad, plan_stream

ROWS = 8  # of a step


@dataclass(frozen=True, slots=True)
class Gpus:
    """``count`` GPUs with one base model, cut into stages or whole on each. ``rate``: tokens per second of one with the
    whole model, when its launches cost nothing.
    """

    count: int
    rate: float
    microbatch_tokens: int = 8192

    @property
    def launch(self) -> float:
        return float(launch_tokens("cuda"))


@dataclass(frozen=True, slots=True)
class Together:
    """Tasks share the pipeline: each round is a step of all. Its length is what the planner expects of its best plan."""

    gpus: Gpus
    known: dict[tuple[int, ...], float] = field(default_factory=dict)  # by tokens of the steps

    def __call__(self, tasks: Sequence[SimTask]) -> Mapping[str, float]:
        if not tasks:
            return {}
        seconds = self.round([task.step_tokens for task in tasks])
        return {task.uid: seconds for task in tasks}

    def round(self, step_tokens: Sequence[int]) -> float:
        key = tuple(sorted(step_tokens))
        seconds = self.known.get(key)
        if seconds is None:
            cost = StageCost(1 / self.gpus.count, self.gpus.launch / self.gpus.count)
            loads = {str(number): TaskLoad(tokens, ROWS) for number, tokens in enumerate(key)}
            plan = plan_stream(loads, (cost,) * self.gpus.count, self.gpus.microbatch_tokens)
            seconds = self.known[key] = plan.round_cost / self.gpus.rate
        return seconds


@dataclass(frozen=True, slots=True)
class EachAlone:
    """A task has one GPU with the whole model to itself."""

    gpus: Gpus

    def __call__(self, tasks: Sequence[SimTask]) -> Mapping[str, float]:
        return {task.uid: (task.step_tokens + self.gpus.launch) / self.gpus.rate for task in tasks}
