"""vLLM serves an adapter of the text part of a model that also reads images: under the whole model's names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from tests.consumers.conftest import BASE, PYTHON, task
from tests.consumers.test_vllm import by_transformers

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

TOKENS = 20
# Head dimensions are those that vLLM has kernels for on a CPU.
TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 49152, "max_position_embeddings": 1024,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
}  # fmt: skip
VISION = {"hidden_size": 128, "embed_dim": 64, "depth": 1, "num_heads": 2, "mlp_ratio": 2}
IDS = {"image_token_id": 10, "video_token_id": 11, "vision_start_token_id": 12, "vision_end_token_id": 13}
# In vLLM's environment, which has what reads images: it asks for a processor also where no image comes.
PROCESSOR = """
import sys
from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor
folder = sys.argv[1]
made = Qwen2VLProcessor(Qwen2VLImageProcessor(), AutoTokenizer.from_pretrained(folder), Qwen2VLVideoProcessor())
made.save_pretrained(folder)
"""
SERVE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest
if __name__ == "__main__":
    folder, adapter, prompt, tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
    llm = LLM(model=folder, enable_lora=True, max_lora_rank=8, dtype="float32", enforce_eager=True,
              max_model_len=256, max_num_seqs=2, limit_mm_per_prompt={"image": 0})
    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    made = [
        llm.generate([{"prompt_token_ids": prompt}], greedy, lora_request=lora)[0].outputs[0].token_ids
        for lora in (None, LoRARequest("a", 1, adapter))
    ]
    print("TOKENS", json.dumps([list(one) for one in made]))
"""


def in_vllm(script: Path, *arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(PYTHON), str(script), *arguments],
        env=environment | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def by_peft(folder: Path, prompt: list[int], adapter: Path | None) -> list[int]:
    [made] = by_transformers(folder, [prompt], adapter, kind=AutoModelForImageTextToText, tokens=TOKENS)
    return made


def test_an_adapter_of_a_text_part_writes_in_vllm_what_it_writes_in_peft(
    smollm2: Path, tmp_path: Path
) -> None:
    folder, adapter = tmp_path / "model", tmp_path / "adapter"
    config = AutoConfig.for_model("qwen2_vl", text_config=TEXT, vision_config=VISION, **IDS)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    tokenizer.save_pretrained(folder)
    for name, text in (("processor.py", PROCESSOR), ("serve.py", SERVE)):
        (tmp_path / name).write_text(text)
    in_vllm(tmp_path / "processor.py", str(folder))

    manifest = tmp_path / "task.yaml"
    asked = task("text-part", adapter, rank=8, modules=["all-linear"], seed=1)
    manifest.write_text(yaml.safe_dump(asked))
    command = [
        *(sys.executable, "-c", "from mlora_operator.cli import main; main()", "run", str(manifest)),
        *("--model", f"{BASE}={folder}", "--dtype", "float32", "--stages", "2", "--timeout", "20m"),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    prompt = tokenizer("Tom has 3 bags of 7 apples. How many")["input_ids"]
    expected = [by_peft(folder, prompt, one) for one in (None, adapter)]
    said = in_vllm(tmp_path / "serve.py", str(folder), str(adapter), json.dumps(prompt), str(TOKENS))
    (line,) = (one for one in said.splitlines() if one.startswith("TOKENS "))
    assert json.loads(line.removeprefix("TOKENS ")) == expected
    assert expected[0] != expected[1]
