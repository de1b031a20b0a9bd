"""Which kernels layers with a state take, by libraries that are made here; the convolution is in Triton's interpreter."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.load import load_stage
from mlora_worker.model.recurrent import choice
from mlora_worker.model.recurrent.looking_back import Kernels, LookingBack
from mlora_worker.model.recurrent.plain import DELTA_RULE
from mlora_worker.model.stage import Stage
from mlora_worker.runtime.kernel_compiler import launch
from tests.fixtures.interpreted import DEVICE, convolution
from tests.fixtures.model_options import FAMILY
from tests.fixtures.small_models import Saved

pytestmark = pytest.mark.skipif(
    DEVICE.type != "cpu", reason="the libraries that are made here are for the CPU"
)
assert convolution  # imported in the interpreter, before anything else does
LENGTHS = (5, 1, 9)
TYPES = ("qwen3_next", "qwen3_5", "granitemoehybrid", "nemotron_h", "falcon_h1", "lfm2")
SCANNING = TYPES[:-1]


class ByRow:
    """In torch; the scan goes from token to token, where transformers takes chunks."""

    name = "made here 1.0"

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, rows: PackedRows
    ) -> Tensor:
        def of_row(*row: Tensor) -> Tensor:
            return DELTA_RULE(*row[:3], g=row[3], beta=row[4], use_qk_l2norm_in_kernel=True)[0]

        return self.each(of_row, rows, query, key, value, decay, beta)

    def scan(self, c: Tensor, b: Tensor, x: Tensor, decay: Tensor, rows: PackedRows) -> Tensor:
        def of_row(c: Tensor, b: Tensor, x: Tensor, decay: Tensor) -> Tensor:
            state = torch.zeros(b.shape[2], b.shape[3], x.shape[3])
            outs = []
            for t in range(x.shape[1]):
                state = state * decay[0, t].exp()[:, None, None] + b[0, t, :, :, None] * x[0, t, :, None]
                outs.append((c[0, t, :, :, None] * state).sum(1))
            return torch.stack(outs)[None]

        return self.each(of_row, rows, c, b, x, decay)

    def each(self, function: Callable[..., Tensor], rows: PackedRows, *whole: Tensor) -> Tensor:
        parts = (one.split(list(rows.lengths), dim=1) for one in whole)
        return torch.cat([function(*row) for row in zip(*parts, strict=True)], dim=1)


class RunningOn(ByRow):
    """The state of a row goes on into the next one."""

    def each(self, function: Callable[..., Tensor], _: PackedRows, *whole: Tensor) -> Tensor:
        return function(*whole)


class Crowded(ByRow):
    """A row's last bits depend on how many there are."""

    def each(self, function: Callable[..., Tensor], rows: PackedRows, *whole: Tensor) -> Tensor:
        return super().each(function, rows, *whole) * (1 + 2**-22 * len(rows.lengths))


class WrongBackward(ByRow):
    def each(self, function: Callable[..., Tensor], rows: PackedRows, *whole: Tensor) -> Tensor:
        y = super().each(function, rows, *whole)
        return y.detach() + 0.9 * (y - y.detach())


class Failing(ByRow):
    def each(self, function: Callable[..., Tensor], rows: PackedRows, *whole: Tensor) -> Tensor:
        raise NotImplementedError("this device is too old")


def absent() -> choice.Library:
    raise ImportError("No module named 'fla'")


def unfit() -> choice.Library:
    raise AttributeError("no such function")


@pytest.fixture
def stage(small_model: Callable[..., Saved]) -> Callable[[str], Stage]:
    def make(kind: str) -> Stage:
        saved = small_model(kind, **FAMILY[kind])
        return load_stage(saved.folder, saved, 0, 1, torch.float32, torch.device("cpu"))

    return make


def looking_back(stage: Stage) -> list[LookingBack]:
    return [one for one in stage.layers.modules() if isinstance(one, LookingBack)]


def trained(stage: Stage) -> tuple[Tensor, Tensor]:
    """The output of packed rows through all layers, and their gradient."""
    generator = torch.Generator().manual_seed(5)
    hidden, upstream = (torch.randn(sum(LENGTHS), 32, generator=generator) for _ in range(2))
    hidden.requires_grad_()
    y = stage.run_layers(hidden, PackedRows(LENGTHS, torch.device("cpu")))
    y.backward(upstream)
    assert hidden.grad is not None
    return y.detach(), hidden.grad


@pytest.mark.parametrize("kind", TYPES)
def test_with_the_kernels_a_stage_computes_what_it_does_row_by_row(
    kind: str, stage: Callable[[str], Stage]
) -> None:
    one = stage(kind)
    wanted = trained(one)
    name = choice.take_kernels(one.layers, ByRow, launch)
    assert name == ("made here 1.0" if kind in SCANNING else "Triton")
    layers = looking_back(one)
    assert layers
    assert all(layer.kernels.convolve is not None for layer in layers)
    assert all((layer.kernels.scan is not None) == (kind in SCANNING) for layer in layers)
    for found, right in zip(trained(one), wanted, strict=True):
        assert (found - right).norm() <= 1e-5 * right.norm()
        assert not torch.equal(found, right)  # they were called


@pytest.mark.parametrize("kind", ["qwen3_next", "granitemoehybrid"])
@pytest.mark.parametrize(
    ("library", "why"),
    [
        (RunningOn, "differs from torch by"),
        (WrongBackward, "differs from torch by 1.0e-01"),
        (Crowded, "gives a row of 1 tokens other bits beside others than alone"),
        (Failing, "failed: NotImplementedError: this device is too old"),
        (absent, "there is no flash-linear-attention (No module named 'fla')"),
        (unfit, "flash-linear-attention cannot be imported: AttributeError: no such function"),
    ],
)
def test_a_library_that_does_not_hold_is_not_taken_and_the_log_says_why(
    kind: str,
    library: Any,
    why: str,
    stage: Callable[[str], Stage],
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = stage(kind)
    with caplog.at_level(logging.WARNING):
        assert choice.take_kernels(one.layers, library, launch) == "Triton"
    assert why in caplog.text
    for layer in looking_back(one):
        assert layer.kernels.convolve is not None
        assert layer.kernels.delta_rule is None
        assert layer.kernels.scan is None


def test_a_convolution_that_cannot_be_started_leaves_all_to_torch(
    stage: Callable[[str], Stage], caplog: pytest.LogCaptureFixture
) -> None:
    def no_launch(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel image is available")

    one = stage("lfm2")
    assert choice.take_kernels(one.layers, absent, no_launch) == "torch"
    assert "failed: RuntimeError: no kernel image is available" in caplog.text
    assert {layer.kernels for layer in looking_back(one)} == {Kernels()}


@pytest.mark.parametrize(("kind", "name"), [("lfm2", "torch"), ("llama", None)])
def test_a_cpu_keeps_torch_and_a_model_without_a_state_names_nothing(
    kind: str, name: str | None, stage: Callable[[str], Stage]
) -> None:
    assert choice.choose_kernels(stage(kind).layers, torch.device("cpu")) == name


def test_the_library_is_imported_only_for_scans(stage: Callable[[str], Stage]) -> None:
    def unwanted() -> choice.Library:
        raise AssertionError("imported")

    assert choice.take_kernels(stage("lfm2").layers, unwanted, launch) == "Triton"
