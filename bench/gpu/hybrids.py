"""Layers with a state on one GPU: all packed rows at once by kernels, beside torch's row by row."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GraniteMoeHybridConfig, Lfm2Config, Qwen3NextConfig

from bench.gpu.measure import kernels, peak_gib, seconds
from bench.report import table
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.recurrent import choice
from mlora_worker.model.recurrent.delta_net import PackedNextDeltaNet
from mlora_worker.model.recurrent.layers import PackedShortConv
from mlora_worker.model.recurrent.looking_back import Kernels, LookingBack
from mlora_worker.model.recurrent.mamba import PackedMamba

ROW, ROWS = 222, 16
QWEN = {"hidden_size": 2048, "layer_types": ["linear_attention"], "num_hidden_layers": 1}
GRANITE = {
    "hidden_size": 1536, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1,
    "layer_types": ["mamba"], "num_hidden_layers": 1,
}  # fmt: skip
LFM = {"hidden_size": 2048, "layer_types": ["conv"], "num_hidden_layers": 1}
TINY_QWEN = {
    "hidden_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
TINY_GRANITE = {"hidden_size": 32, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}
LAYERS: dict[str, tuple[type[LookingBack], Any, dict[str, Any], dict[str, Any]]] = {
    "Qwen3-Next 80B": (PackedNextDeltaNet, Qwen3NextConfig, QWEN, TINY_QWEN),
    "Granite 4.0 H Tiny": (PackedMamba, GraniteMoeHybridConfig, GRANITE, TINY_GRANITE),
    "LFM2 1.2B": (PackedShortConv, Lfm2Config, LFM, {"hidden_size": 32}),
}


def compare(
    repetitions: int, device: torch.device, say: Callable[[dict[str, Any]], None], *, tiny: bool
) -> dict[str, Any]:
    """Milliseconds of forward and backward of one layer without adapters. ``say`` is given each figure when it is there."""
    result: dict[str, Any] = {}
    lengths = (9, 4) if tiny else (ROW,) * ROWS
    for name, (kind, config, options, small) in LAYERS.items():
        torch.manual_seed(0)
        made: Any = kind
        layer: Any = made(config(**(options | small if tiny else options)), 0)
        for parameter in layer.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        layer.requires_grad_(False).to(device, torch.bfloat16)
        began = time.perf_counter()
        whose = choice.choose_kernels(nn.ModuleList([layer]), device)
        own: dict[str, Any] = {"kernels_by": whose, "seconds_to_choose": time.perf_counter() - began}
        chosen = layer.kernels
        result[name] = own
        for side, given in {"rows": Kernels(), "kernels": chosen}.items():
            layer.kernels = given

            def work(layer: Any = layer) -> None:
                x = torch.randn(1, sum(lengths), layer.out_proj.weight.shape[0], device=device).bfloat16()
                y: Tensor = layer(x.requires_grad_(), packed=PackedRows(lengths, device))
                torch.autograd.backward(y, y.detach())

            work()
            own[side] = {
                "ms": 1e3 * statistics.median(seconds(work) for _ in range(repetitions)),
                "launches": kernels(work).count,
                "peak_gib": peak_gib(work),
            }
            say(result)
    print(
        table(
            ["a layer of", "by", "rows one by one, ms", "by kernels, ms", "launches", "of kernels"],
            [
                [
                    name,
                    str(own["kernels_by"]),
                    own["rows"]["ms"],
                    own["kernels"]["ms"],
                    own["rows"]["launches"],
                    own["kernels"]["launches"],
                ]
                for name, own in result.items()
            ],
        )
    )
    return {"layers": result, "tokens": sum(lengths)}
