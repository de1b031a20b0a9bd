"""In which type products are taken."""

from __future__ import annotations

import pytest
import torch

from mlora_worker.runtime.precision import product_dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_full_precision_stays_as_it_is(dtype: torch.dtype) -> None:
    assert product_dtype(dtype, torch.device("cpu")) is dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpus_multiply_halves_themselves(dtype: torch.dtype) -> None:
    assert product_dtype(dtype, torch.device("cuda")) is dtype


def test_a_cpu_multiplies_halves_only_where_it_can() -> None:
    able = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    found = product_dtype(torch.bfloat16, torch.device("cpu"))
    assert found is (torch.bfloat16 if able else torch.float32)
