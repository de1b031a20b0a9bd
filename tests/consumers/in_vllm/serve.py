"""Runs in vLLM's own environment: loads a model and adapters in this process, and writes what each answers.

``serve.py ASKED ANSWERED``: both are JSON. Asked: ``engine``, the options of ``LLM``; ``prompt``, ids of tokens;
``tokens``, how many to write; ``adapters``, each None or ``{"path", "is_3d_lora_weight"}``; ``experts_in_torch``, whether a
mixture's experts are computed by this folder's reference. Answered: for each adapter its tokens, or ``{"refused": words}``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    if asked["experts_in_torch"]:
        import experts_in_torch

        experts_in_torch.install()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        enable_lora=True,
        **asked["engine"],
    )
    greedy = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True)
    answers: list[Any] = []
    for number, adapter in enumerate(asked["adapters"], start=1):
        request = None
        if adapter is not None:
            request = LoRARequest(
                str(number), number, adapter["path"], is_3d_lora_weight=adapter["is_3d_lora_weight"]
            )
            try:
                llm.llm_engine.add_lora(request)
            except Exception as error:
                answers.append({"refused": str(error) or repr(error)})
                continue
        [made] = llm.generate([{"prompt_token_ids": asked["prompt"]}], greedy, lora_request=request)
        answers.append(list(made.outputs[0].token_ids))
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
