"""How a stage comes to its library of products."""

from __future__ import annotations

from pathlib import Path

import torch

from mlora_worker.model.products import choose_products


def test_a_device_without_a_choice_reads_no_model_for_it() -> None:
    chosen = choose_products(Path("absent"), 0, 1, torch.float32, torch.device("cuda"), None)
    assert chosen.name == "torch"
    assert chosen.why == "it is the device's own"
