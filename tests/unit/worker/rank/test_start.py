"""What ends a rank before it reads anything."""

from __future__ import annotations

import pytest

from mlora_worker.model import quantisation
from mlora_worker.model.errors import UnsupportedModel
from mlora_worker.protocol import ModelSource, Quantization, WorkerConfig
from mlora_worker.rank.start import run_rank
from mlora_worker.runtime.termination import Termination


@pytest.mark.parametrize("rank", [0, 1])
def test_a_base_in_4_bits_without_the_library(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no token file, no model and no peer: whatever comes next would fail in another way."""
    monkeypatch.setattr(quantisation, "available", lambda: False)
    model = ModelSource(name="m", uri="file:///nowhere", quantization=Quantization(type="nf4"))
    config = WorkerConfig(
        pipeline="n/p", model=model, stages=2, coordinator_host="h", token_file="/nowhere/token", device="cpu"
    )
    with pytest.raises(
        UnsupportedModel, match=r"needs bitsandbytes, .* pip install 'mlora-operator\[quantised\]'"
    ):
        run_rank(config, rank, Termination(1, lambda: None), lambda _: None)
