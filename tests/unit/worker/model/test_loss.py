"""Loss by chunks, compared with torch's cross entropy over everything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mlora_worker.frozen.onednn import OneDnnWeight, available
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.model import loss
from mlora_worker.model.loss import IGNORED, ChunkedCrossEntropy, segment_losses, supervised_together
from mlora_worker.stream import footprint

SEGMENTS = (7, 30, 1, 12)


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, nn.Module, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(sum(SEGMENTS), 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, 53, (sum(SEGMENTS),), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.4] = IGNORED
    labels[37] = IGNORED  # the third segment has no supervised position
    weight = (torch.randn(53, 16, generator=generator) * 2).to(dtype)
    return hidden, labels, nn.RMSNorm(16, dtype=dtype), weight


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("chunk_logits", [53 * 16, 53 * 20, 10**9])
def test_losses_and_gradients_equal_cross_entropy(
    chunk_logits: int, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(footprint, "CHUNK_LOGITS", chunk_logits)
    hidden, labels, norm, weight = example()
    found = segment_losses(hidden, labels, SEGMENTS, norm, PlainWeight(weight), cap)
    logits = norm(hidden) @ weight.T
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    wanted = torch.stack(
        [
            cross_entropy(part, own, ignore_index=IGNORED, reduction="sum")
            for part, own in zip(logits.split(SEGMENTS), labels.split(SEGMENTS), strict=True)
        ]
    ).double()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    assert found[2] == 0.0
    upstream = torch.tensor([0.5, 2.0, 3.0, -1.0], dtype=torch.float64)
    assert_same_gradients(found, wanted, hidden, upstream)


def assert_same_gradients(found: Tensor, wanted: Tensor, hidden: Tensor, upstream: Tensor) -> None:
    torch.testing.assert_close(
        torch.autograd.grad(found, hidden, upstream, retain_graph=True),
        torch.autograd.grad(wanted, hidden, upstream),
        rtol=1e-5,
        atol=1e-6,
    )


def heavy() -> Tensor:
    return torch.rand(sum(SEGMENTS), generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def test_weights_multiply_each_positions_loss_and_gradient() -> None:
    hidden, labels, norm, weight = example()
    weights = heavy()
    found = segment_losses(hidden, labels, SEGMENTS, norm, PlainWeight(weight), None, weights)
    losses = cross_entropy(norm(hidden) @ weight.T, labels, ignore_index=IGNORED, reduction="none")
    wanted = torch.stack([part.sum() for part in (losses * weights).split(SEGMENTS)])
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    upstream = torch.tensor([0.5, 2.0, 3.0, -1.0], dtype=torch.float64)
    assert_same_gradients(found, wanted, hidden, upstream)


def test_weights_of_one_change_no_bit_and_a_gradient_in_bfloat16_is_rounded_once() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        hidden, labels, norm, weight = example(dtype)

        def gradient(weights: Tensor | None) -> Tensor:
            losses = segment_losses(hidden, labels, SEGMENTS, norm, PlainWeight(weight), None, weights)  # noqa: B023
            return torch.autograd.grad(losses.sum(), hidden)[0]  # noqa: B023

        ones = torch.ones(sum(SEGMENTS), dtype=torch.float64)
        assert torch.equal(gradient(ones), gradient(None))
    saved = torch.randn(4, 3).bfloat16().requires_grad_()
    context = SimpleNamespace(saved_tensors=(saved.detach(), torch.tensor([0, 0, 1, 1]), heavy()[:4]))
    found, *_ = ChunkedCrossEntropy.backward(context, torch.ones(2, dtype=torch.float64))
    assert found is not None
    assert torch.equal(found, (saved.detach().float() * heavy()[:4].float()[:, None]).bfloat16())


@pytest.mark.parametrize("cap", [None, 3.0])
def test_the_gradient_passes_gradcheck(cap: float | None) -> None:
    hidden, labels, _, weight = example(torch.float64)
    positions = (labels != IGNORED).nonzero().squeeze(1)[:10]
    owners = torch.tensor([0, 0, 0, 1, 1, 1, 1, 3, 3, 3])
    arguments = (PlainWeight(weight), labels[positions], owners, [3, 4, 0, 3], [7, 3], 16, cap)
    assert torch.autograd.gradcheck(
        lambda normed: ChunkedCrossEntropy.apply(normed, *arguments),
        hidden[positions].detach().requires_grad_(),
    )
    assert torch.autograd.gradcheck(
        lambda normed: ChunkedCrossEntropy.apply(normed, *arguments, heavy()[positions]),
        hidden[positions].detach().requires_grad_(),
    )


def test_a_batch_with_every_label_masked_has_loss_and_gradient_zero() -> None:
    hidden, labels, norm, weight = example()
    found = segment_losses(hidden, torch.full_like(labels, IGNORED), SEGMENTS, norm, PlainWeight(weight))
    assert found.tolist() == [0.0] * 4
    assert not torch.autograd.grad(found.sum(), hidden)[0].any()


def test_a_segment_that_is_not_finite_leaves_the_others_alone() -> None:
    hidden, labels, norm, weight = example()
    clean = segment_losses(hidden, labels, SEGMENTS, norm, PlainWeight(weight))
    broken = hidden.detach().clone()
    broken[:7] = torch.nan
    broken.requires_grad_()
    found = segment_losses(broken, labels, SEGMENTS, norm, PlainWeight(weight))
    assert found[0].isnan()
    assert torch.equal(found[1:], clean[1:])
    (gradient,) = torch.autograd.grad(found.sum(), broken)
    assert gradient[7:].isfinite().all()


def test_half_precision_keeps_the_softmax_in_float32() -> None:
    hidden, labels, norm, weight = example(torch.bfloat16)
    found = segment_losses(hidden, labels, SEGMENTS, norm, PlainWeight(weight))
    logits = (norm(hidden) @ weight.T).float()
    wanted = cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    assert found.sum().item() == pytest.approx(wanted.item(), rel=1e-3)
    gradient, expected = (
        torch.autograd.grad(loss, hidden, retain_graph=True)[0] for loss in (found.sum(), wanted)
    )
    assert (gradient - expected).float().norm() < 0.02 * expected.float().norm()


@pytest.mark.parametrize("kind", [PlainWeight, OneDnnWeight], ids=["torch", "oneDNN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_memory_is_told_of_is_what_is_multiplied_together(
    dtype: torch.dtype, kind: type[PlainWeight], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of each task, or all of them where the library's rows know nothing of each other."""
    if not available(dtype):
        pytest.skip(f"this processor does not multiply {dtype} in oneDNN")
    hidden, labels, norm, weight = example(dtype)
    multiplied, plain = list[int](), loss._chunk

    def noted(normed: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        multiplied.append(len(normed))
        return plain(normed, *others)

    monkeypatch.setattr(loss, "_chunk", noted)
    head = kind(weight)
    segment_losses(hidden, labels, SEGMENTS, norm, head)
    assert multiplied == [count for count in supervised_together(labels, SEGMENTS, head) if count]
