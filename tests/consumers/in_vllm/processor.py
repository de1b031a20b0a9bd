"""Runs in vLLM's own environment, which has what reads images: ``processor.py TYPE FOLDER`` writes a processor beside a
model of that type. vLLM asks for it also where no image comes.
"""

from __future__ import annotations

import sys

from transformers import AutoTokenizer


def main() -> None:
    model_type, folder = sys.argv[1:]
    if model_type == "qwen2_vl":
        from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

        made = Qwen2VLProcessor(
            Qwen2VLImageProcessor(), AutoTokenizer.from_pretrained(folder), Qwen2VLVideoProcessor()
        )
    else:
        from transformers import Gemma3ImageProcessor, Gemma3Processor

        named = {"image_token": "<|im_start|>", "boi_token": "<repo_name>", "eoi_token": "<file_sep>"}
        tokenizer = AutoTokenizer.from_pretrained(folder, extra_special_tokens=named)
        made = Gemma3Processor(Gemma3ImageProcessor(), tokenizer, image_seq_length=4)
    made.save_pretrained(folder)


if __name__ == "__main__":
    main()
