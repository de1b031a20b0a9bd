"""``python -m mlora_worker.commands.merge``: a fetched adapter and its base become one model.

Reads a ``MergeQuestion`` as JSON from standard input and writes a ``MergeAnswer`` to standard output. PEFT itself merges,
in float32 whatever the base is stored in, and the sum is rounded once, to the type of the file.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from mlora_worker.commands.adapter_check import UnusableAdapter, check_adapter, json_object
from mlora_worker.commands.stdio import reply
from mlora_worker.model.text_part import TEXT_PARTS
from mlora_worker.protocol import (
    MANIFEST_NAME,
    STACKED,
    AdapterManifest,
    Failure,
    FailureReason,
    MergeAnswer,
    MergeQuestion,
)
from mlora_worker.storage.artifacts.adapter import CONFIG_NAME, TEMPLATE_NAME, WEIGHTS_NAME
from mlora_worker.storage.base_model.model_names import is_small
from mlora_worker.storage.object_store.scratch import sha256_of
from mlora_worker.storage.versioned_json import read_document

_LARGEST_FILE = "5GB"  # of weights; more are shards
# Adapter, base, the empty folder to fill, the type that is wished for, and the adapter's files -> the type of the numbers.
Write = Callable[[Path, Path, Path, str | None, Collection[str]], str]


def main() -> None:
    reply("mlora_worker.commands.merge", MergeQuestion, merge)


def merge(question: MergeQuestion) -> MergeAnswer:
    """Never raises for what is wrong with the folders: that is the answer."""
    if importlib.util.find_spec("peft") is None:
        return failure("merging needs PEFT: run pip install peft")
    return written_whole(question, _write)


def written_whole(question: MergeQuestion, write: Write) -> MergeAnswer:
    """The folder that ``write`` fills comes to its name whole or not at all. Never raises for what is wrong with the
    folders: that is the answer."""
    adapter, base, target = Path(question.adapter), Path(question.base), Path(question.output)
    try:
        listed = check_folders(adapter, base, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as held:  # beside it
            made = Path(held) / "made"
            made.mkdir()
            dtype = write(adapter, base, made, question.dtype, listed)
            size = sum(path.stat().st_size for path in made.iterdir())
            made.rename(target)
    except UnusableAdapter as error:
        return failure(str(error))
    except Exception as error:  # damaged weights break the libraries anywhere, with any error
        return failure(f"{base} or {adapter} cannot be read: {type(error).__name__}: {str(error)[:1000]}")
    return MergeAnswer(bytes=size, dtype=dtype)


def _write(adapter: Path, base: Path, made: Path, wished: str | None, listed: Collection[str]) -> str:
    dtype = _merged(adapter, base, made, wished)
    _copy_small_files(adapter, base, made, listed)
    return dtype


def check_folders(adapter: Path, base: Path, target: Path) -> frozenset[str]:
    """The names of the adapter's files: other files there are ignored. Raises UnusableAdapter for what is not an adapter
    or not a base, is damaged, or would be written over.
    """
    for folder, name, what in (
        (adapter, CONFIG_NAME, "an adapter: download it first with mlora fetch"),
        (base, "config.json", "a base model: give the folder of the model that the adapter was trained on"),
    ):
        if not (folder / name).is_file():
            raise UnusableAdapter(f"{folder} has no {name} and is not the folder of {what}")
    json_object(base / "config.json")
    if target.exists():
        raise UnusableAdapter(f"{target} already exists: choose another path, or remove it")
    manifest = adapter / MANIFEST_NAME
    if not manifest.is_file():  # PEFT's own folders have none
        check_adapter(adapter)
        return frozenset(path.name for path in adapter.iterdir())
    try:
        files = read_document(AdapterManifest, manifest.read_bytes()).files
    except ValueError:
        raise UnusableAdapter(f"{manifest} is not the manifest of an adapter: fetch it again") from None
    for file in files:
        path = adapter / file.name
        if not path.is_file() or sha256_of(path) != file.sha256:
            raise UnusableAdapter(f"{path} does not match the adapter's manifest: fetch it again")
    check_adapter(adapter)
    return frozenset(file.name for file in files)


def _merged(adapter: Path, base: Path, made: Path, wished: str | None) -> str:
    """Writes the weights; the type that they have."""
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    if getattr(config, "quantization_config", None) is not None:
        raise UnusableAdapter("the base model is quantised: use the model with plain float weights")
    stored = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = wished or stored
    kind = AutoModelForImageTextToText if config.model_type in TEXT_PARTS else AutoModelForCausalLM
    model = kind.from_pretrained(
        base, local_files_only=True, trust_remote_code=False, dtype=torch.float32, use_safetensors=True
    )
    _check_shapes(model, adapter)
    loaded = PeftModel.from_pretrained(model, str(adapter))
    whole = loaded.merge_and_unload(safe_merge=True)
    whole.to(getattr(torch, dtype)).save_pretrained(made, max_shard_size=_LARGEST_FILE)
    return dtype


def _check_shapes(model: torch.nn.Module, adapter: Path) -> None:
    """Raises UnusableAdapter when the adapter is of another model: PEFT would only say which tensor has which size."""
    from safetensors import safe_open

    modules = dict(model.named_modules())
    with safe_open(adapter / WEIGHTS_NAME, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping
            path, _, which = name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".")
            module = modules.get(path.removesuffix(".base_layer"))
            weights = [getattr(module, one, None) for one in ("weight", *STACKED)]
            side = file.get_slice(name).get_shape()[1 if which == "lora_A" else 0]
            if not any(weight is not None and side in weight.shape for weight in weights):
                raise UnusableAdapter(
                    f"the adapter belongs to another base model: {path} does not fit; give the base model that it "
                    f"was trained on"
                )


def _copy_small_files(adapter: Path, base: Path, made: Path, listed: Collection[str]) -> None:
    """Tokenizer and settings of generation as the base has them; the chat template that the adapter was trained with.
    ``listed``: the adapter's own files."""
    for path in base.iterdir():
        if path.is_file() and is_small(path.name) and not (made / path.name).exists():
            shutil.copyfile(path, made / path.name)
    own = adapter / TEMPLATE_NAME
    if own.name in listed and own.is_file():
        (made / "chat_template.json").unlink(missing_ok=True)
        shutil.copyfile(own, made / TEMPLATE_NAME)
        settings = made / "tokenizer_config.json"
        if settings.is_file():
            content = json.loads(settings.read_text(encoding="utf-8"))
            if content.pop("chat_template", None) is not None:  # else there would be two
                settings.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def failure(words: str) -> MergeAnswer:
    return MergeAnswer(failure=Failure(reason=FailureReason.INVALID_SPEC, message=words))


if __name__ == "__main__":
    main()
