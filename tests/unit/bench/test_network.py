"""What each way to train on several ranks must send, by its formula."""

from __future__ import annotations

import pytest

from bench.network import formulae
from bench.network.command import larger, named
from bench.network.formulae import Model

SMALL = Model(hidden=8, layers=2, layer_parameters=1000, other_parameters=100, adapter_parameters=10)


def test_a_pipeline_sends_each_token_once_forward_and_its_gradient_once_back() -> None:
    assert formulae.pipeline(SMALL, 2, 3, 4) == 2 * 3 * 8 * 4
    assert formulae.pipeline(SMALL, 4, 3, 4) == 3 * formulae.pipeline(SMALL, 2, 3, 4)


def test_tensor_parallelism_sends_four_times_the_layers_as_much() -> None:
    ratio = formulae.tensor_parallel(SMALL, 4, 3, 4) / formulae.pipeline(SMALL, 4, 3, 4)
    assert ratio == 4 * SMALL.layers


def test_shards_are_gathered_whatever_the_tokens() -> None:
    assert formulae.sharded(SMALL, 2, 1, 4) == 4 * (2 * 1010 + 100 + 10)
    assert formulae.sharded(SMALL, 2, 2, 4) == 4 * (2 * (2 * 1010 + 100) + 10)


def test_larger_models_send_least_in_a_pipeline() -> None:
    for rates in larger().values():
        for seconds in rates.values():
            assert seconds["pipeline"] < seconds["tp"] < seconds["fsdp"]
    assert larger()["8b"]["10 Gb/s"]["pipeline"] == pytest.approx(10 * larger()["8b"]["100 Gb/s"]["pipeline"])


@pytest.mark.parametrize(
    ("rate", "name"), [(None, "no limit"), (10e9, "10 Gb/s"), (1e9, "1 Gb/s"), (50e6, "50 Mb/s")]
)
def test_a_rate_is_named_as_people_write_it(rate: float | None, name: str) -> None:
    assert named(rate) == name
