"""Answer a question with a base model and a fetched adapter, by transformers and PEFT alone.

    python -m examples.serving.generate BASE ADAPTER "What is 2 + 2?"

Nothing of this project is imported: what it needs is ``pip install torch transformers peft``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def answer(base: Path | str, adapter: Path, question: str, most_tokens: int = 200) -> str:
    """``base``: a folder or a hub's name. Raises ValueError for an adapter that is not what its manifest says."""
    check(adapter)
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    template = adapter / "chat_template.jinja"
    if template.exists():  # the one that it was trained with
        tokenizer.chat_template = template.read_text()
    model: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        made = model.generate(**prompt, max_new_tokens=most_tokens, do_sample=False)
    return str(tokenizer.decode(made[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)).strip()


def check(adapter: Path) -> None:
    """Compare each file with the manifest, as ``mlora fetch`` has done: for folders that came in another way."""
    for file in json.loads((adapter / "manifest.json").read_text())["files"]:
        if hashlib.sha256((adapter / file["name"]).read_bytes()).hexdigest() != file["sha256"]:
            raise ValueError(
                f"{adapter / file['name']} is not what the manifest says: copy the adapter again"
            )


def main() -> None:
    options = argparse.ArgumentParser(description="Answer a question with a base model and an adapter.")
    options.add_argument("base", help="folder of the base model, or its name on a hub")
    options.add_argument("adapter", type=Path, help="folder of the adapter")
    options.add_argument("question")
    options.add_argument("--most-tokens", type=int, default=200)
    given = options.parse_args()
    print(answer(given.base, given.adapter, given.question, given.most_tokens))


if __name__ == "__main__":
    main()
