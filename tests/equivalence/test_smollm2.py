"""The same with a real model: SmolLM2-135M-Instruct in float32, on a few sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlora_worker.protocol import LoRAConfig, Schedule, Training
from tests.equivalence.plain_peft import train_with_peft
from tests.equivalence.tasks import Base, Row, Task, assert_same, train

pytestmark = pytest.mark.integration

TRAINING = Training(
    batch_size=2, learning_rate=2e-3, schedule=Schedule.COSINE, warmup_steps=1, max_grad_norm=1.0, seed=5
)


@pytest.fixture(scope="module")
def real(smollm2: Path) -> Base:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32, attn_implementation="sdpa")
    return Base(smollm2, model.eval())


@pytest.fixture(scope="module")
def sums(smollm2: Path) -> list[Row]:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    made = []
    for a, b in [(3, 4), (120, 7), (55, 5), (9, 81), (1000, 1), (12, 12)]:
        prompt = tokenizer(f"<|im_start|>user\nAdd {a} to {b}.<|im_end|>\n<|im_start|>assistant\n")[
            "input_ids"
        ]
        answer = tokenizer(f"{a} + {b} is {a + b}; it is the same as {b} + {a}.<|im_end|>")["input_ids"]
        targets = [*prompt[1:], *answer, -100]
        masked = [-100] * (len(prompt) - 1) + targets[len(prompt) - 1 :]
        made.append(Row(tuple(prompt + answer), tuple(masked)))
    return made


def test_a_real_model_on_two_stages_beside_a_neighbour_equals_peft(real: Base, sums: list[Row]) -> None:
    attention = LoRAConfig(rank=8, alpha=16, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    task = Task("t", attention, TRAINING, sums, 6)
    everywhere = LoRAConfig(rank=4, alpha=8, dropout=0.1, target_modules=("all-linear",))
    neighbour = Task("n", everywhere, TRAINING.model_copy(update={"batch_size": 1}), sums[::-1], 6)
    ours = train(real, 2, [neighbour, task])
    assert_same(ours["t"], train_with_peft(real, task, ours["t"].start), losses=1e-4, weights=1e-4)
    first, last = ours["t"].losses[0], ours["t"].losses[-1]
    assert first is not None
    assert last is not None
    assert last < 0.5 * first
    assert all(tensor.any() for name, tensor in ours["n"].adapter.items() if "lora_B" in name)
