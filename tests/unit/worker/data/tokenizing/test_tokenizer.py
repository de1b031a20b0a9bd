"""A folder whose tokenizer cannot be used is a mistake in the spec, whatever is wrong with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.data.errors import DataError
from mlora_worker.data.tokenizing.tokenizer import load_tokenizer
from mlora_worker.protocol import FailureReason


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", ""),
        ("tokenizer.json", []),
        ("tokenizer.json", {}),
        ("tokenizer.json", {"added_tokens": [], "model": {"type": "of another version"}}),
        ("tokenizer_config.json", []),
        ("tokenizer_config.json", {"tokenizer_class": 3}),
        ("tokenizer_config.json", {"eos_token": 5}),
    ],
    ids=str,
)
def test_a_broken_tokenizer_is_told(tiny_model: Path, tmp_path: Path, name: str, content: Any) -> None:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / file, tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(DataError, match="the base model's folder has no") as caught:
        load_tokenizer(tmp_path)
    assert caught.value.reason is FailureReason.INVALID_SPEC


def without_template(model: Path, folder: Path) -> None:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / file, folder)
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    content.pop("chat_template", None)
    settings.write_text(json.dumps(content))


def test_a_template_that_only_the_processor_has_is_the_models(tiny_model: Path, tmp_path: Path) -> None:
    without_template(tiny_model, tmp_path)
    assert load_tokenizer(tmp_path).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert load_tokenizer(tmp_path).chat_template == "{{ messages[0].content }}"
    (tmp_path / "chat_template.jinja").write_text("{{ 'the tokenizer has one' }}")
    assert load_tokenizer(tmp_path).chat_template == "{{ 'the tokenizer has one' }}"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"chat_template": 3}', "[" * 1000])
def test_a_broken_file_of_the_processors_template_is_told(
    tiny_model: Path, tmp_path: Path, content: str
) -> None:
    without_template(tiny_model, tmp_path)
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(
        DataError, match=r"chat_template\.json in the base model's folder has no chat_template"
    ):
        load_tokenizer(tmp_path)
