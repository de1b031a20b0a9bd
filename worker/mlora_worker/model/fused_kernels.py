"""The loops of ``fused``: one pass each over a CPU's memory, in float32 inside.

numpy has no bfloat16: such numbers come and go as the 16 bits that they are, the upper half of a float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mlora_worker.runtime.numba_loops import compiled, part_of_kernels


class _Compiled:
    def __init__(self) -> None:
        self.norm = compiled(_norm, reorder_sums=True)
        self.norm_backward = compiled(_norm_backward, reorder_sums=True)
        self.silu_times_backward = compiled(_silu_times_backward)
        self.rotate = compiled(_rotate)
        self.half_rotate = compiled(_half_rotate)
        self.half_norm = compiled(_half_norm, reorder_sums=True)
        self.half_norm_backward = compiled(_half_norm_backward, reorder_sums=True)
        self.half_silu_times_backward = compiled(_half_silu_times_backward)


@cache
def kernels() -> _Compiled:
    return _Compiled()


def array(tensor: Tensor) -> Any:
    """numpy's view of ``tensor``, float32, or bfloat16 as integers."""
    own = tensor.detach()
    return (own.view(torch.int16) if own.dtype == torch.bfloat16 else own).numpy()


@part_of_kernels
def _wide(half: Any) -> Any:
    """bfloat16 to float32: exact."""
    return np.int32(np.int32(half) << np.int32(16)).view(np.float32)


@part_of_kernels
def _narrow(value: Any) -> Any:
    """float32 to bfloat16, to the nearest, ties to even."""
    bits = np.float32(value).view(np.int32)
    rounded = np.int32(bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16)
    return np.int16(rounded) if value == value else np.int16(0x7FC0)


def _norm(x: Any, weight: Any, epsilon: Any, y: Any, rescale: Any) -> None:
    size = x.shape[1]
    for token in range(x.shape[0]):
        total = np.float32(0)
        for feature in range(size):
            total += x[token, feature] * x[token, feature]
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + epsilon)
        rescale[token] = factor
        for feature in range(size):
            y[token, feature] = weight[feature] * (x[token, feature] * factor)


def _norm_backward(x: Any, weight: Any, rescale: Any, grad: Any, grad_x: Any) -> None:
    """grad_x = r (w g) - x r^3 mean(w g x)."""
    size = x.shape[1]
    for token in range(x.shape[0]):
        total = np.float32(0)
        for feature in range(size):
            total += weight[feature] * grad[token, feature] * x[token, feature]
        factor = rescale[token]
        back = total / np.float32(size) * factor * factor * factor
        for feature in range(size):
            grad_x[token, feature] = (
                factor * (weight[feature] * grad[token, feature]) - back * x[token, feature]
            )


def _silu_times_backward(gate: Any, up: Any, sigmoid: Any, grad: Any, grad_gate: Any, grad_up: Any) -> None:
    """With s = sigmoid(g): silu(g) = g s, silu'(g) = s (1 + g (1 - s))."""
    for token in range(gate.shape[0]):
        for feature in range(gate.shape[1]):
            s, g = sigmoid[token, feature], gate[token, feature]
            grad_up[token, feature] = grad[token, feature] * (g * s)
            grad_gate[token, feature] = (
                grad[token, feature] * up[token, feature] * (s * (np.float32(1) + g * (np.float32(1) - s)))
            )


def _rotate(x: Any, cos: Any, sin: Any, y: Any, by_token: Any, backward: Any) -> None:
    """``y`` [tokens, heads, size]; ``x`` the same where it lies ``by_token``, else [heads, tokens, size]. Of each head the
    first ``rotated`` numbers are, as [.., rotated] of ``cos`` and ``sin`` says; ``backward``: the other way round."""
    half, rotated = cos.shape[1] // 2, cos.shape[1]
    for outer in range(x.shape[0]):
        for inner in range(x.shape[1]):
            token, head = (outer, inner) if by_token else (inner, outer)
            for one in range(half):
                other = one + half
                a, b = x[outer, inner, one], x[outer, inner, other]
                if backward:
                    y[token, head, one] = a * cos[token, one] + b * sin[token, other]
                    y[token, head, other] = b * cos[token, other] - a * sin[token, one]
                else:
                    y[token, head, one] = a * cos[token, one] - b * sin[token, one]
                    y[token, head, other] = b * cos[token, other] + a * sin[token, other]
            for one in range(rotated, x.shape[2]):
                y[token, head, one] = x[outer, inner, one]


def _half_rotate(x: Any, cos: Any, sin: Any, y: Any, by_token: Any, backward: Any) -> None:
    half, rotated = cos.shape[1] // 2, cos.shape[1]
    for outer in range(x.shape[0]):
        for inner in range(x.shape[1]):
            token, head = (outer, inner) if by_token else (inner, outer)
            for one in range(half):
                other = one + half
                a, b = _wide(x[outer, inner, one]), _wide(x[outer, inner, other])
                c, d = _wide(cos[token, one]), _wide(cos[token, other])
                s, t = _wide(sin[token, one]), _wide(sin[token, other])
                if backward:
                    y[token, head, one] = _narrow(a * c + b * t)
                    y[token, head, other] = _narrow(b * d - a * s)
                else:
                    y[token, head, one] = _narrow(a * c - b * s)
                    y[token, head, other] = _narrow(b * d + a * t)
            for one in range(rotated, x.shape[2]):
                y[token, head, one] = x[outer, inner, one]


def _half_norm(x: Any, weight: Any, epsilon: Any, y: Any, rescale: Any) -> None:
    """Rounded where transformers rounds: before the weight, and after it."""
    size = x.shape[1]
    for token in range(x.shape[0]):
        total = np.float32(0)
        for feature in range(size):
            total += _wide(x[token, feature]) * _wide(x[token, feature])
        factor = np.float32(1) / np.sqrt(total / np.float32(size) + epsilon)
        rescale[token] = factor
        for feature in range(size):
            normed = _wide(_narrow(_wide(x[token, feature]) * factor))
            y[token, feature] = _narrow(_wide(weight[feature]) * normed)


def _half_norm_backward(x: Any, weight: Any, rescale: Any, grad: Any, grad_x: Any) -> None:
    size = x.shape[1]
    for token in range(x.shape[0]):
        total = np.float32(0)
        for feature in range(size):
            total += _wide(weight[feature]) * _wide(grad[token, feature]) * _wide(x[token, feature])
        factor = rescale[token]
        back = total / np.float32(size) * factor * factor * factor
        for feature in range(size):
            grad_x[token, feature] = _narrow(
                factor * (_wide(weight[feature]) * _wide(grad[token, feature]))
                - back * _wide(x[token, feature])
            )


def _half_silu_times_backward(
    gate: Any, up: Any, sigmoid: Any, grad: Any, grad_gate: Any, grad_up: Any
) -> None:
    """``sigmoid`` is float32: near 1 its difference to 1 counts."""
    for token in range(gate.shape[0]):
        for feature in range(gate.shape[1]):
            s, g, above = sigmoid[token, feature], _wide(gate[token, feature]), _wide(grad[token, feature])
            grad_up[token, feature] = _narrow(above * (g * s))
            slope = s * (np.float32(1) + g * (np.float32(1) - s))
            grad_gate[token, feature] = _narrow(above * _wide(up[token, feature]) * slope)
