"""What a microbatch costs on each stage: the cost model that plans are made with. Pure.

The unit is free: seconds where they were measured, else multiply-adds. Only ratios matter to a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlora_worker.protocol import ModelFacts

# Part of a row's tokens that the head sees: it computes for supervised tokens alone, about half of a chat.
SUPERVISED_SHARE = 0.5

# What a microbatch costs on a stage beside its tokens (launches of the stage's layers, messages), in tokens. It grows with
# what a device does in the time of one launch, so a GPU's is far larger.
_LAUNCH_TOKENS_CPU = 16
_LAUNCH_TOKENS_GPU = 256


# What passes on a GPU from the end of a step until the same group's next one begins, in tokens: its losses are read, its
# updates are decided and the next microbatch is prepared. On a CPU this is far below a token.
_TURN_TOKENS_GPU = 128


def launch_tokens(device: str) -> int:
    """What a launch costs on ``device`` (cpu, cuda, cuda:0, ...), in tokens: an assumption, not a measurement."""
    return _LAUNCH_TOKENS_CPU if device == "cpu" else _LAUNCH_TOKENS_GPU


def turn_tokens(device: str) -> int:
    """What the host's turn between two steps of a group costs on ``device``, in tokens: an assumption, too."""
    return 0 if device == "cpu" else _TURN_TOKENS_GPU


@dataclass(frozen=True, slots=True)
class StageCost:
    """Of one stage, forward and backward together."""

    per_token: float
    per_microbatch: float = 0.0
    turn: float = 0.0  # of the first stage: from a step's return until the same group's next one may begin

    def of(self, tokens: float) -> float:
        return self.per_microbatch + tokens * self.per_token


def even_costs(stages: int) -> tuple[StageCost, ...]:
    """Nothing is known: every stage takes the same, and a microbatch costs what its tokens do."""
    return (StageCost(1.0),) * stages


def stage_costs(
    facts: ModelFacts, stages: int, launch_tokens: float, turn_tokens: float = 0.0
) -> tuple[StageCost, ...]:
    """Analytic: multiply-adds per token of each stage's linear modules, embedding and head with them. Of routed experts,
    those that a token goes through.

    The embedding is a look-up, which moves one hidden state; the head computes for supervised tokens only. Attention
    scores, norms and the adapters themselves are left out: they are small beside the frozen products, and alike on all
    stages.
    """
    per_token = [0.0] * stages
    for module in (*facts.modules, *(facts.never_adapted or ())):
        per_token[module.stage] += float(module.in_features) * module.out_features * module.count
    for shape in facts.experts or ():
        cost = expert_cost(facts.hidden_size, shape.experts, shape.active, shape.width)
        per_token[shape.stage] += float(cost) * shape.count
    per_token[0] += embed_cost(facts.hidden_size)
    per_token[-1] += head_cost(facts.hidden_size, facts.vocab_size)
    return tuple(
        StageCost(cost, launch_tokens * cost, 0.0 if stage else turn_tokens * cost)
        for stage, cost in enumerate(per_token)
    )


def embed_cost(hidden_size: int) -> float:
    """A look-up moves one row of hidden states."""
    return float(hidden_size)


def head_cost(hidden_size: int, vocab_size: int) -> float:
    """Multiply-adds per token of the head."""
    return SUPERVISED_SHARE * hidden_size * vocab_size


def expert_cost(hidden_size: int, experts: int, active: int, width: int) -> int:
    """Multiply-adds per token of a layer's routed experts, ``active`` of which it goes through, with the router's."""
    return (3 * active * width + experts) * hidden_size


def one_device(costs: Sequence[StageCost]) -> StageCost:
    """The same model on one device as fast as each of the stages' devices."""
    whole, first = sum(cost.per_token for cost in costs), costs[0]
    return StageCost(whole, sum(cost.per_microbatch for cost in costs), first.turn * whole / first.per_token)
