"""How a stage comes to its library of products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mlora_worker.frozen.onednn import available
from mlora_worker.model import products
from mlora_worker.model.products import choose_products


def test_a_device_without_a_choice_reads_no_model_for_it() -> None:
    chosen = choose_products(Path("absent"), 0, 1, torch.float32, torch.device("cuda"), None)
    assert chosen.name == "torch"
    assert chosen.why == "it is the device's own"


@pytest.mark.skipif(not available(torch.float32), reason="this build of torch has no oneDNN")
def test_all_stages_choose_by_the_whole_model_however_it_is_cut(
    small_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a model near the bound would have other bits on more stages."""
    folder, asked = small_model("llama", tie_word_embeddings=True).folder, list[int]()

    def noted(parameters: int, _: int | None) -> bool:
        asked.append(parameters)
        return False

    monkeypatch.setattr(products, "may_choose", noted)
    for stages in (1, 2):
        for stage in range(stages):
            choose_products(folder, stage, stages, torch.float32, torch.device("cpu"), None)
    assert len(asked) == 3
    assert len(set(asked)) == 1
