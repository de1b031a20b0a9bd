"""The compiled pass of a backward's dropout: both its results, under one mask."""

from __future__ import annotations

import pytest
import torch

from mlora_worker.lora import cpu_kernels as module
from mlora_worker.lora.cpu_kernels import masked, masked_adding
from mlora_worker.lora.dropout import dropout_mask, token_keys

TOKENS, FEATURES = 40, 70


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_kept_of_the_input_is_added_of_the_gradient(
    dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(module, "AVAILABLE", False)
    generator = torch.Generator().manual_seed(0)
    x, total, addend = (torch.randn(TOKENS, FEATURES, generator=generator).to(dtype) for _ in range(3))
    mask = dropout_mask(token_keys(3, 1, 0, (TOKENS,)), "module", FEATURES, 0.3)
    kept = mask.bits(slice(None)) != 0
    assert 0.6 < kept.double().mean() < 0.8
    before = total.clone()
    found = masked_adding(x, mask, total, addend, 1.5)
    assert torch.equal(found, torch.where(kept, x, 0))
    assert torch.equal(found, masked(x, mask))
    wanted = before.double() + 1.5 * torch.where(kept, addend, 0).double()
    close = 1e-2 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(total.double(), wanted, rtol=close, atol=close)
