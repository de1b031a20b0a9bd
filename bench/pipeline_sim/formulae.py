"""Idle time, memory and traffic of pipeline schedules in closed form, for equal stages and equal microbatches. Pure.

D stages, N microbatches a step, L groups of tasks in flight; a microbatch takes c (forward and backward) on every stage, a
message takes e from one stage to the next. The simulator agrees with all of them (tests/unit/worker/stream).
The comparison is that of mLoRA's cost analysis (arXiv 2312.02515); derivations are in docs/contributors/lorapp.md.
"""

from __future__ import annotations


def flushed_bubble(stages: int, microbatches: int) -> float:
    """GPipe and 1F1B, which both drain the pipeline after each step: ``(D - 1) / (N + D - 1)`` of all stages' time.

    A step takes ``(N + D - 1) * c`` and keeps each stage busy for ``N * c``.
    """
    return (stages - 1) / (microbatches + stages - 1)


def has_no_bubble(stages: int, groups: int, microbatches: int) -> bool:
    """LoRAPP's condition: ``(L - 1) * N >= D - 1``."""
    return (groups - 1) * microbatches >= stages - 1


def lorapp_bubble(stages: int, groups: int, microbatches: int) -> float:
    """LoRAPP in its steady state: ``max(0, (D - 1 - (L - 1) * N) / (N + D - 1))`` of all stages' time.

    In one round every group does a step. It cannot be shorter than the ``L * N * c`` that a stage has to compute, nor than
    the ``(N + D - 1) * c`` until a group's own step is back; the greater of both is reached.
    """
    return max(0.0, 1 - groups * microbatches / (microbatches + stages - 1))


def latency_bubble(stages: int, message: float, compute: float) -> float:
    """What messages cost where the pipeline is only just full, ``(L - 1) * N = D - 1``, and stages alternate strictly:
    ``2 * (D - 1) * e / (D * c + 2 * (D - 1) * e)`` of all stages' time.

    Then D microbatches share a round trip. With more microbatches in flight it is less, down to nothing.
    """
    trip = 2 * (stages - 1) * message
    return trip / (stages * compute + trip)


def gpipe_held(microbatches: int) -> int:
    """Microbatches whose activations a stage holds at once under GPipe: all of the step."""
    return microbatches


def one_f_one_b_held(stages: int, stage: int, microbatches: int) -> int:
    """The same under 1F1B: ``min(N, D - s)``."""
    return min(microbatches, stages - stage)


def lorapp_held(stages: int, stage: int, groups: int, microbatches: int) -> int:
    """The most under LoRAPP: ``min(L * N, 3 * (D - s) - 2)``, where a backward takes at most twice a forward's time.

    Never more than is in flight. While the first gradient is on its way a stage may take in one microbatch for each
    forward's time: a forward and a backward on each of the ``D - s - 1`` stages behind it are three such times, and its own
    is one.
    """
    return min(groups * microbatches, 3 * (stages - stage) - 2)


def wire_bytes(stages: int, tokens: int, hidden_size: int, dtype_bytes: int) -> int:
    """Bytes of hidden states and their gradients that ``tokens`` tokens send between stages: ``2 * (D - 1) * T * H * b``.

    Every microbatch crosses each border once in each direction, whatever the schedule and the number of tasks.
    """
    return 2 * (stages - 1) * tokens * hidden_size * dtype_bytes


def data_parallel_bytes(devices: int, parameters: int, dtype_bytes: int) -> int:
    """Bytes that all devices together send in a step under FSDP, for comparison: ``2 * (D - 1) * P * b``.

    The sharded weights are gathered for forward and for backward; frozen ones have no gradients to reduce.
    """
    return 2 * (devices - 1) * parameters * dtype_bytes


def tensor_parallel_bytes(devices: int, layers: int, tokens: int, hidden_size: int, dtype_bytes: int) -> int:
    """Bytes that all devices together send for ``tokens`` tokens under tensor parallelism, for comparison:
    ``8 * (D - 1) * layers * T * H * b``.

    Two all-reduces of [T, H] a layer in forward and two in backward, each ``2 * (D - 1) * T * H * b`` in a ring.
    """
    return 8 * (devices - 1) * layers * tokens * hidden_size * dtype_bytes
