"""What a microbatch takes of a stage before anything was measured: from the model's shape alone. Pure."""

from __future__ import annotations

from mlora_operator.memory.fit import NONE_BELOW, Coefficients, FittedLine, StageFit
from mlora_worker.protocol import ModelFacts, StageReport
from mlora_worker.stream.footprint import dense_numbers

_WIDE = 4  # bytes of a number in float32
WORKING_BYTES = 64 * 2**20  # allocator rounding, communication buffers


def prior(facts: ModelFacts, stage: StageReport, stages: int, *, recompute: bool = False) -> StageFit:
    """From the model's shape alone. ``recompute``: the pipeline recomputes activations.

    A token leaves in each decoder layer, for the backward: both norms' inputs (once in float32, twice in the model's
    type), the outputs of the attention's projections with their rotated copies, and three tensors of the feed-forward's
    width; the inputs of adapted modules are exact and not in it. The backward itself holds the gradients of one layer.
    Attention scores are recomputed, so that two score matrices of one layer are there at a time. The last stage adds the
    loss's logits and their gradient for a chunk, and four hidden states for each supervised position.

    With recomputation a token leaves one hidden state in each layer and behind the last, and all the above in the one
    layer whose backward runs. Beside all that is what a layer leaves that carries a state, which the worker tells
    (``ModelFacts.states``), and what a pass through routed experts takes on a GPU (``_through_experts``). A CPU that cannot
    multiply numbers of half the width makes wide copies of the matrices of a product (``_made_wide``). What travels
    beside hidden states is kept as the stage's input and output, and there as gradients of both.
    """
    width = facts.dtype_bytes
    layers = stage.last_layer - stage.first_layer + 1
    one_layer = facts.hidden_size * (8 + 8 * width) + facts.intermediate_size * 3 * width
    passing = (4 * facts.hidden_size + 3 * facts.intermediate_size) * width
    states = [one for one in facts.states or () if one.stage == stage.stage]
    kept = facts.hidden_size * width * (layers + 1)
    working = kept + one_layer + max((one.token_bytes for one in states), default=0)
    if not recompute:
        kept = working = one_layer * layers + sum(one.count * one.token_bytes for one in states)
    beside, learnt_beside = _beside_hidden_states(facts, stage)
    kept += beside * width
    working += (beside + learnt_beside) * width + passing + _through_experts(facts, stage)
    last = stage.stage == stages - 1
    # Of the first layer, what is not kept where its first groups are not adapted: the attention, its output, gate and up.
    early = [0.0] * NONE_BELOW
    if stage.stage == 0 and not recompute:
        early = [
            4.0 * facts.hidden_size * width,
            1.0 * facts.hidden_size * width,
            2.0 * facts.intermediate_size * width,
        ]
    peak = Coefficients(
        b0=float(WORKING_BYTES + _made_wide(facts, stage, last=last)),
        b1=working - sum(early),
        b2=float(2 * facts.attention_heads * width),
        b3=float(4 * facts.hidden_size * _WIDE) if last else 0.0,
        b4=float(2 * _WIDE * facts.vocab_size) if last else 0.0,
        b5=1.0,
        r0=early[0],
        r1=early[1],
        r2=early[2],
        e0=float(_for_an_expert_row(facts, stage)),
    )
    below = Coefficients(b1=kept - sum(early), b3=peak.b3, r0=early[0], r1=early[1], r2=early[2])
    return StageFit(kept=FittedLine(below), forward=FittedLine(peak), backward=FittedLine(peak))


def _through_experts(facts: ModelFacts, stage: StageReport) -> int:
    """Bytes of a token. On a GPU all its choices are there at once: what goes in and comes out, its gradient, both in
    float32 as well and once more in the order of the tokens; and gate, up and what they make, with their gradients. On a
    CPU a few rows are, whoever chose them (``mlora_worker.frozen.experts``)."""
    if not stage.device.startswith("cuda"):
        return 0
    own = (one for one in facts.experts or () if one.stage == stage.stage)
    rows = ((one.active, one.width) for one in own)
    each = (
        active
        * (
            facts.hidden_size * (3 * facts.dtype_bytes + 3 * _WIDE)
            + inside * (4 * facts.dtype_bytes + 3 * _WIDE)
        )
        for active, inside in rows
    )
    return max(each, default=0)


def _made_wide(facts: ModelFacts, stage: StageReport, *, last: bool) -> int:
    """Bytes of the largest matrices of one product in float32, the head's among them. Of quantised ones ``dense_bytes``
    speaks, but the head never is."""
    if stage.device.startswith("cuda") or facts.dtype_bytes >= _WIDE:
        return 0
    own = 0 if stage.quantized else dense_numbers(facts, stage.stage, stage.input_groups)
    return _WIDE * max(own, facts.hidden_size * facts.vocab_size if last else 0)


def _beside_hidden_states(facts: ModelFacts, stage: StageReport) -> tuple[int, int]:
    """Numbers of a token, beside its hidden state, that the stage is given and gives; and those that have gradients."""
    both = (facts.borders or ())[stage.stage : stage.stage + 2]
    learnt = sum(border.backward - facts.hidden_size for border in both)
    return learnt + sum(border.forward - border.backward for border in both[:1]), learnt


def _for_an_expert_row(facts: ModelFacts, stage: StageReport) -> int:
    """Bytes of a row of one expert while it is worked on, on a CPU: in float32 its input, its gradient and what comes out,
    and gate, up and what they make, with their gradients."""
    if stage.device.startswith("cuda"):
        return 0
    widths = [one.width for one in facts.experts or () if one.stage == stage.stage]
    return _WIDE * (4 * facts.hidden_size + 6 * max(widths)) if widths else 0
