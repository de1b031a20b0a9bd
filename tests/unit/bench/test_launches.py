"""The operators that the launch benchmark counts."""

from __future__ import annotations

import torch

from bench.launches import CountOperators, profiled_events


def work() -> None:
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(3, 4)
    torch.autograd.backward((x @ w).sum())


def test_operators_of_backward_are_counted_too() -> None:
    with CountOperators() as counted:
        work()
    assert counted.seen["aten.mm.default"] == 2, "one in forward, one in backward"


def test_the_profiler_counts_an_operator_once_whatever_it_calls() -> None:
    x = torch.ones(2, 3)
    once, kernels = profiled_events(lambda: torch.nn.functional.linear(x, x))
    assert once == 1
    assert kernels == 0
