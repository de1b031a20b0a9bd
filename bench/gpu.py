"""``python -m bench gpu``: eight adapters in one packed step on one GPU against PEFT, one adapter after the other.

A Llama of 1B shape with random bfloat16 weights, rows of equal length (so padding costs PEFT nothing), every token
supervised (so skipping unsupervised tokens gains nothing), rank 16 on q, k, v, o. Both sides alternate; medians. The same
weights serve both sides. ``--dry-run`` takes a tiny shape and whatever device there is, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from mlora_worker.model.load import load_stage
from mlora_worker.pipeline.engine import StageEngine
from mlora_worker.protocol import LoRAConfig, Training
from mlora_worker.stream.items import Load, Segment, Train, Update

TASKS, ROWS, TARGETS = 8, 4, ("q_proj", "k_proj", "v_proj", "o_proj")
FULL = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip


class Weights:
    """The model's own tensors, as a worker reads them."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._tensors = {k: v for k, v in model.state_dict().items() if k != "lm_head.weight"}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors[name]
        return tensor


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench gpu", description=__doc__)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shape, length = (TINY, 32) if options.dry_run else (FULL, 512)
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(
            LlamaConfig(**shape, tie_word_embeddings=True, max_position_embeddings=2048)
        ).to(torch.bfloat16)
    ids = torch.randint(0, shape["vocab_size"], (TASKS, ROWS, length), device=device)
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        together = packed_step(Path(folder), Weights(model), ids, device)
    alone = peft_step(model, ids)
    times: dict[str, list[float]] = {"together": [], "peft": []}
    for _ in range(2 + options.repeat):
        for name, step in (("together", together), ("peft", alone)):
            times[name].append(seconds(step, device))
    tokens = ids.numel()
    rates = {name: tokens / statistics.median(values[2:]) for name, values in times.items()}
    print(f"{TASKS} tasks x {ROWS} rows x {length} tokens, bfloat16, {device}")
    for name, rate in rates.items():
        print(f"{name:10} {rate:12,.0f} tokens/s")
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    result = {
        "bench": "gpu", "vs_peft": rates["together"] / rates["peft"], "tokens_per_second": rates["together"],
        "peft_tokens_per_second": rates["peft"], "machine": machine, "torch": torch.__version__,
        "repetitions": options.repeat, "dry_run": options.dry_run,
    }  # fmt: skip
    print(json.dumps(result))
    return 0


def packed_step(folder: Path, weights: Weights, ids: Tensor, device: torch.device) -> Callable[[], None]:
    """One optimizer step of all tasks in one microbatch."""
    engine = StageEngine(load_stage(folder, weights, 0, 1, torch.bfloat16, device))
    for task in range(TASKS):
        lora = LoRAConfig(rank=16, alpha=32, target_modules=TARGETS)
        engine.load(Load(number=0, task=str(task), lora=lora, training=Training(seed=task)))
    length = ids.shape[-1]
    labels = torch.full_like(ids, -100)
    labels[..., :-1] = ids[..., 1:]
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        update = Update(step=count - 1, learning_rate=1e-4, clip=1.0) if count > 1 else None
        segments = tuple(
            Segment(
                task=str(task), step=count, lengths=(length,) * ROWS, first_row=0, weight=1 / (ROWS * (length - 1)),
                closes_step=True, update=update,
            )
            for task in range(TASKS)
        )  # fmt: skip
        item = Train(number=count, segments=segments)
        engine.forward(item, token_ids=ids.flatten(), hidden=None, labels=labels.flatten())
        engine.backward(count, None)

    return step


def peft_step(model: LlamaForCausalLM, ids: Tensor) -> Callable[[], None]:
    """One optimizer step of each task, one after the other."""
    wrapped: Any = model
    optimizers = []
    for task in range(TASKS):
        config = LoraConfig(r=16, lora_alpha=32, target_modules=list(TARGETS))
        if task == 0:
            wrapped = get_peft_model(model, config, adapter_name="0")
        else:
            wrapped.add_adapter(str(task), config)
    for task in range(TASKS):
        wrapped.set_adapter(str(task))
        optimizers.append(torch.optim.AdamW([p for p in wrapped.parameters() if p.requires_grad], lr=1e-4))

    def step() -> None:
        for task in range(TASKS):
            wrapped.set_adapter(str(task))
            wrapped(input_ids=ids[task], labels=ids[task]).loss.backward()
            optimizers[task].step()
            optimizers[task].zero_grad()

    return step


def seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
