"""The computed time of a step on a GPU: its counts beside those of the benchmark that measures, and their bounds."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from bench.gpu import measure
from bench.gpu.shapes import SHAPES as MEASURED
from bench.roofline.command import GOAL, MATRIX, MEMORY, figures_of, main
from bench.roofline.devices import DEVICES
from bench.roofline.parts import SHAPES, Part, Shape, Work, parts, useful_flops
from bench.rows import Batch
from mlora_worker.data.prepare import IGNORED, TokenRow
from mlora_worker.model.architecture import architecture_of, meta_model

TINY = Shape(64, 128, 2, 4, 2, 16, 512)
STEP = Work(64, 222, 0.59, 4, 16)


def test_useful_arithmetic_is_what_the_measuring_benchmark_counts() -> None:
    labels = np.array([IGNORED, 1, 2, IGNORED], np.int32)
    batch = Batch(((TokenRow(np.zeros(4, np.int32), labels),) * 2,) * 3)
    architecture = architecture_of(meta_model(LlamaConfig(**MEASURED["tiny"]), torch.float32))
    expected = measure.useful_flops(architecture, batch, 16, ("all-linear",))
    assert useful_flops(TINY, Work(6, 4, 0.5, 3, 16)) == expected


@pytest.mark.parametrize("name", ["1b", "8b"])
def test_shapes_are_those_of_the_measuring_benchmark(name: str) -> None:
    measured, own = MEASURED[name], asdict(SHAPES[name])
    assert list(own.values()) == [
        measured[field]
        for field in (
            "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "vocab_size",
        )
    ]  # fmt: skip


def test_a_part_takes_the_longer_of_its_arithmetic_and_its_traffic() -> None:
    device = DEVICES["h100"]
    assert Part("a", 989e12, 3.35e12 / 2, 1).seconds(device, 1.0, 1.0) == pytest.approx(1.0)
    assert Part("a", 989e12 / 2, 3.35e12, 1).seconds(device, 1.0, 0.5) == pytest.approx(2.0)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_fused_parts_move_and_launch_no_more(shape: str) -> None:
    for before, after in zip(
        parts(SHAPES[shape], STEP, fused=False), parts(SHAPES[shape], STEP, fused=True), strict=True
    ):
        assert before.name == after.name
        assert before.flops == after.flops
        assert after.bytes <= before.bytes
        assert after.launches <= before.launches


def test_an_8b_shape_reaches_its_goal_on_paper_with_element_wise_work_fused() -> None:
    figures = figures_of(DEVICES["h100"], SHAPES["8b"], STEP, MATRIX, MEMORY)
    now, fused = figures["tokens_per_second"], figures["tokens_per_second_fused"]
    assert isinstance(now, float)
    assert isinstance(fused, float)
    assert now < GOAL <= fused


def test_no_more_than_the_peak_is_ever_promised() -> None:
    figures = figures_of(DEVICES["h200"], SHAPES["70b"], STEP, 1.0, 1.0)
    of_peak = figures["of_peak_fused"]
    assert isinstance(of_peak, float)
    assert 0.5 < of_peak < 1.0


def test_the_last_line_says_that_it_is_computed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--shape", "1b", "--device", "a100"]) == 0
    assert '"computed": true' in capsys.readouterr().out.splitlines()[-1]
