"""The fused cross entropy beside torch's: in Triton's interpreter, or on a GPU with ``MLORA_TEST_DEVICE=cuda``."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.fixtures.interpreted import DEVICE, triton_loss

# Small for the interpreter, which adds up a block element by element.
BLOCK = 64 if DEVICE.type == "cpu" else triton_loss.BLOCK


@pytest.mark.parametrize("vocabulary", [53, 2 * BLOCK + 22])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 2e-5), (torch.bfloat16, 8e-3)], ids=str)
def test_losses_and_gradients_equal_torch_s(vocabulary: int, dtype: torch.dtype, limit: float) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (torch.randn(2, vocabulary, generator=generator) * 4).to(DEVICE, dtype)
    logits[0, :7] = -torch.inf
    targets = torch.tensor([9, vocabulary - 1], device=DEVICE)
    exact = logits.double().requires_grad_()
    wanted = cross_entropy(exact, targets, reduction="none")
    torch.autograd.backward(wanted.sum())
    losses = triton_loss.cross_entropy_in_place(logits, targets, BLOCK)
    torch.testing.assert_close(losses.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    assert exact.grad is not None
    assert (logits.double() - exact.grad).norm() < limit * exact.grad.norm()


def test_a_row_that_is_not_finite_leaves_the_others_alone() -> None:
    logits = torch.ones(2, 53, device=DEVICE)
    logits[0, 3] = torch.nan
    losses = triton_loss.cross_entropy_in_place(logits, torch.tensor([1, 2], device=DEVICE), BLOCK)
    assert losses[0].isnan()
    torch.testing.assert_close(losses[1].cpu(), torch.tensor(53.0).log())
    assert logits[1].isfinite().all()


def test_no_rows_are_no_losses() -> None:
    assert len(triton_loss.cross_entropy_in_place(torch.ones(0, 5), torch.ones(0, dtype=torch.int64))) == 0


def test_logits_that_the_kernel_would_misread_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        triton_loss.cross_entropy_in_place(torch.ones(5, 2).T, torch.ones(2, dtype=torch.int64))
