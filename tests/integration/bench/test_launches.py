"""The operators that the launch benchmark counts."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from bench.launches import CountOperators, Launches, compare, count_compiled, profiled_events, show
from mlora_worker.lora.cpu_kernels import masked, masked_adding
from mlora_worker.lora.dropout import dropout_mask, token_keys

pytestmark = pytest.mark.integration


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


def test_compiled_kernels_are_counted_each_call() -> None:
    mask = dropout_mask(token_keys(1, 1, 0, (4,)), "module", 16, 0.5)
    x, total = torch.ones(4, 16), torch.zeros(4, 16)
    with count_compiled() as counted:
        masked(x, mask)
        masked_adding(x, mask, total, x, 1.0)
        masked_adding(x, mask, total, x, 1.0)
    assert counted.total() == 3


def test_a_ratio_has_the_projects_own_kernels_in_it() -> None:
    one = Launches(Counter({"mm": 8}), compiled=2, profiled=8, kernels=0)
    many = Launches(Counter({"mm": 8}), compiled=12, profiled=10, kernels=0)
    assert compare(one, many) == {"operators": 2.0, "profiled": 1.25}
    assert "compiled kernels +10" in show("q,k,v,o", one, many)
