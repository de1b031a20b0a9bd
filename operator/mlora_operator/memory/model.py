"""Prediction of a stage's peak memory from the shape of the model and the tasks in it. Pure.

    bytes(stage) = resident + sum over tasks of adapter + b0 + b1 * T + b2 * S

``resident`` are the frozen weights, as the worker measured them. An adapter's bytes are exact: for each
targeted module of the stage, ``rank * (in + out)`` float32 numbers, four times (parameters, gradients and
AdamW's two moments). ``T`` is the number of tokens whose activations the stage holds at its peak, ``S`` the
sum of the squared row lengths of one microbatch (attention). The coefficients come from the model's shape;
``Coefficients`` is where fitted ones go in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlora_operator.scheduling.admission import Need, Verdict
from mlora_worker.protocol import LoRAConfig, ModelFacts, StageReport, Training
from mlora_worker.stream import planner
from mlora_worker.stream.fit import ALL_LINEAR

BYTES_PER_ADAPTER_PARAMETER = 4 * 4  # float32: parameter, gradient, first and second moment
LOSS_CHUNK_LOGITS = (
    16 * 2**20
)  # so many logits exist at once (mlora_worker.model.loss), in float32 and once more
WORKING_BYTES = 64 * 2**20  # allocator rounding, communication buffers


@dataclass(frozen=True, slots=True)
class Coefficients:
    """Of one stage: constant bytes, bytes per token, bytes per squared token."""

    b0: float
    b1: float
    b2: float


@dataclass(frozen=True, slots=True)
class Demand:
    """What one task asks for. Worst case: every row as long as it may be."""

    lora: LoRAConfig
    step_tokens: int
    longest_row: int


def demand_of(lora: LoRAConfig, training: Training, max_positions: int) -> Demand:
    longest = min(training.max_seq_length, max_positions)
    rows = training.batch_size * training.gradient_accumulation_steps
    return Demand(lora, rows * longest, longest)


def adapter_bytes(lora: LoRAConfig, facts: ModelFacts, stage: int) -> int:
    """Bytes of a task's adapter, gradients and optimizer state on ``stage``: exact."""
    targets = set(lora.target_modules)
    parameters = sum(
        lora.rank * (module.in_features + module.out_features) * module.count
        for module in facts.modules
        if module.stage == stage and (ALL_LINEAR in targets or module.name in targets)
    )
    return parameters * BYTES_PER_ADAPTER_PARAMETER


def prior(facts: ModelFacts, stage: StageReport, stages: int, *, recompute: bool = False) -> Coefficients:
    """Coefficients from the model's shape alone. ``recompute``: the pipeline recomputes activations.

    A token leaves in each decoder layer, for the backward: both norms' inputs (once in float32, twice in the
    model's type), the inputs and outputs of the attention's projections with their rotated copies, and four
    tensors of the feed-forward's width. The backward itself holds the gradients of one layer. Attention
    scores are recomputed, so that two score matrices of one layer are there at a time. The last stage adds
    the loss's logits and their gradient.

    With recomputation a token leaves one hidden state in each layer, and all the above in the one layer whose backward
    runs.
    """
    width = facts.dtype_bytes
    layers = stage.last_layer - stage.first_layer + 1
    kept = facts.hidden_size * (8 + 11 * width) + facts.intermediate_size * 4 * width
    passing = (4 * facts.hidden_size + 3 * facts.intermediate_size) * width
    activations = facts.hidden_size * width * layers + kept if recompute else kept * layers
    logits = 2 * 4 * LOSS_CHUNK_LOGITS if stage.stage == stages - 1 else 0
    return Coefficients(
        b0=float(WORKING_BYTES + logits),
        b1=float(activations + passing),
        b2=float(2 * facts.attention_heads * width),
    )


def tokens_held(
    demands: Sequence[Demand], stage: int, stages: int, microbatch_tokens: int
) -> tuple[int, int]:
    """Most tokens whose activations ``stage`` holds at once, and the most squared row lengths of a
    microbatch.

    Microbatches are taken to be as wide as they may be; how many a stage holds, the planner says.
    """
    if not demands:
        return 0, 0
    longest = max(demand.longest_row for demand in demands)
    steps = sum(demand.step_tokens for demand in demands)
    microbatch = min(max(microbatch_tokens, longest), steps)  # a longer single row travels alone
    return planner.tokens_held(steps, microbatch, stages)[stage], microbatch * longest


def stage_need(
    demands: Sequence[Demand],
    facts: ModelFacts,
    stage: StageReport,
    stages: int,
    microbatch_tokens: int,
    coefficients: Coefficients,
) -> Need:
    """Predicted peak of one stage with these tasks in training."""
    tokens, squared = tokens_held(demands, stage.stage, stages, microbatch_tokens)
    adapters = sum(adapter_bytes(demand.lora, facts, stage.stage) for demand in demands)
    activations = coefficients.b0 + coefficients.b1 * tokens + coefficients.b2 * squared
    return Need(stage.resident_bytes, adapters, int(activations), tokens)


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """The memory of one pipeline, as a rule of what fits."""

    facts: ModelFacts
    stages: tuple[StageReport, ...]
    microbatch_tokens: int
    budget: int | None  # bytes per stage; None: what the device has
    margin: float  # part of the budget that is kept free
    demands: Mapping[str, Demand]  # by uid
    recompute: bool = False  # activations, in the backward

    def verdict(self, uids: Iterable[str]) -> Verdict:
        """Whether these tasks fit together. Raises KeyError for a uid without a demand."""
        return min(self.by_stage(uids), key=lambda verdict: verdict.budget - verdict.needed)

    def by_stage(self, uids: Iterable[str]) -> tuple[Verdict, ...]:
        """The same for each stage by itself."""
        demands = [self.demands[uid] for uid in uids]
        return tuple(self._of_stage(stage, demands) for stage in self.stages)

    def _of_stage(self, stage: StageReport, demands: Sequence[Demand]) -> Verdict:
        count = len(self.stages)
        coefficients = prior(self.facts, stage, count, recompute=self.recompute)
        need = stage_need(demands, self.facts, stage, count, self.microbatch_tokens, coefficients)
        budget = int((self.budget if self.budget is not None else stage.capacity_bytes) * (1 - self.margin))
        return Verdict(need.total <= budget, stage.stage, need.total, budget, need)
