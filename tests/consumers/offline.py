"""Small random models of any type, adapters that ``mlora run`` trains for them, and what vLLM and PEFT write with these."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

from mlora_operator.sync.needs import needs_of
from mlora_worker.commands.plain_export import export
from mlora_worker.protocol import MergeQuestion
from tests.consumers.conftest import BASE, PYTHON, task
from tests.consumers.test_vllm import by_transformers

SCRIPTS = Path(__file__).parent / "in_vllm"
TOKENS = 20
# Head dimensions are those that vLLM has kernels for on a CPU.
TEXT: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class SmallBase:
    """``folder``: as transformers writes it, with SmolLM2's tokenizer. ``kind``: transformers' class that loads it."""

    folder: Path
    kind: Any
    prompt: list[int]

    def by_peft(self, adapter: Path | None) -> list[int]:
        [made] = by_transformers(self.folder, [self.prompt], adapter, kind=self.kind, tokens=TOKENS)
        return made

    def plain(self, adapter: Path) -> Path:
        """As ``mlora export --plain`` writes it."""
        made = adapter.with_name(f"{adapter.name}-plain")
        answer = export(MergeQuestion(adapter=str(adapter), base=str(self.folder), output=str(made)))
        assert answer.failure is None, answer.failure
        return made

    def by_vllm(
        self,
        adapters: Sequence[Path | None],
        *,
        experts_in_torch: bool = False,
        **engine: Any,
    ) -> list[Any]:
        """For each adapter, declared as ``mlora sync`` declares it, tokens or why it is refused."""
        asked = self.folder.parent / "asked.json"
        answered = self.folder.parent / "answered.json"
        asked.write_text(
            json.dumps(
                {
                    "engine": {
                        "model": str(self.folder), "max_lora_rank": 8, "max_num_batched_tokens": 256, **engine,
                    },
                    "prompt": self.prompt,
                    "tokens": TOKENS,
                    "adapters": [
                        None
                        if one is None
                        else {"path": str(one), "is_3d_lora_weight": needs_of(one).stacked}
                        for one in adapters
                    ],
                    "experts_in_torch": experts_in_torch,
                }
            )
        )  # fmt: skip
        in_vllm("serve.py", str(asked), str(answered))
        answers: list[Any] = json.loads(answered.read_text())
        return answers


def small_base(
    folder: Path, smollm2: Path, model_type: str, text: Mapping[str, Any] = {}, **towers: Any
) -> SmallBase:
    """``towers``: the configuration of what reads images, where the type has that beside ``text``."""
    options = TEXT | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}} | text
    config = AutoConfig.for_model(model_type, **({"text_config": options, **towers} if towers else options))
    kind = AutoModelForImageTextToText if towers else AutoModelForCausalLM
    torch.manual_seed(0)
    kind.from_config(config).float().save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.save_pretrained(folder)
    prompt = tokenizer("Tom has 3 bags of 7 apples. How many")["input_ids"]
    return SmallBase(folder, kind, prompt)


def trained(base: SmallBase, **loras: Mapping[str, Any]) -> dict[str, Path]:
    """The folders of one run's adapters, by name; each ``lora`` is what a task says there."""
    folder = base.folder.parent
    tasks = []
    for number, (name, lora) in enumerate(loras.items(), start=1):
        asked = task(name.replace("_", "-"), folder / name, rank=8, modules=["all-linear"], seed=number)
        asked["spec"]["lora"] |= lora
        tasks.append(asked)
    manifest = folder / "tasks.yaml"
    manifest.write_text(yaml.safe_dump_all(tasks))
    command = [
        *(sys.executable, "-c", "from mlora_operator.cli import main; main()", "run", str(manifest)),
        *("--model", f"{BASE}={base.folder}", "--dtype", "float32", "--stages", "2", "--timeout", "20m"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: folder / name for name in loras}


def in_vllm(script: str, *arguments: str) -> None:
    """Engine and script are one process, so that what the script changes of vLLM holds for both."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    own = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [str(PYTHON), str(SCRIPTS / script), *arguments],
        env=environment | own,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
