"""The same with a real model: SmolLM2-135M-Instruct in float32, on a few sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlora_worker.protocol import LoRAConfig, Schedule, Training

pytestmark = pytest.mark.integration

TRAINING = Training(
    batch_size=2, learning_rate=1e-3, schedule=Schedule.COSINE, warmup_steps=2, max_grad_norm=1.0, seed=5
)


@pytest.fixture(scope="module")
def real(kit: Any, smollm2: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="sdpa")
    return kit.base(smollm2, model.eval())


@pytest.fixture(scope="module")
def sums(kit: Any, smollm2: Path) -> list[Any]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    made = []
    for a, b in [(3, 4), (120, 7), (55, 5), (9, 81), (1000, 1), (12, 12)]:
        prompt = tokenizer(f"<|im_start|>user\nAdd {a} to {b}.<|im_end|>\n<|im_start|>assistant\n")[
            "input_ids"
        ]
        answer = tokenizer(f"{a} + {b} is {a + b}; it is the same as {b} + {a}.<|im_end|>")["input_ids"]
        targets = [*prompt[1:], *answer, -100]
        masked = [-100] * (len(prompt) - 1) + targets[len(prompt) - 1 :]
        made.append(kit.row(tuple(prompt + answer), tuple(masked)))
    return made


def test_a_real_model_on_two_stages_beside_a_neighbour_equals_peft(
    kit: Any, real: Any, sums: list[Any]
) -> None:
    attention = LoRAConfig(rank=8, alpha=16, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    task = kit.task("t", attention, TRAINING, sums, 10)
    everywhere = LoRAConfig(rank=4, alpha=8, dropout=0.1, target_modules=("all-linear",))
    neighbour = kit.task("n", everywhere, TRAINING.model_copy(update={"batch_size": 1}), sums[::-1], 10)
    ours = kit.train(kit.chain(real, 2), [neighbour, task])
    theirs = kit.peft(real, task, ours["t"].start)
    assert ours["t"].losses == pytest.approx(theirs.losses, rel=1e-4)
    assert ours["t"].losses[-1] < 0.5 * ours["t"].losses[0]
    assert kit.difference(ours["t"].adapter, theirs.adapter) < 1e-4
    assert all(tensor.any() for name, tensor in ours["n"].adapter.items() if "lora_B" in name)
