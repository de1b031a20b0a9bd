"""vLLM writes the tokens that PEFT writes, of adapters that ``mlora sync`` brings it while it runs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from mlora_operator.cli.sync.command import main as sync_main
from tests.consumers.conftest import BASE, TOKENS, Store, Sync, Vllm

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]

QUESTIONS = ("Tom has 3 bags of 7 apples. How many apples are there?", "What is 12 times 4?")


@pytest.fixture(scope="session")
def prompts(smollm2: Path) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": one}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for one in QUESTIONS
    ]


def by_transformers(
    base: Path,
    prompts: list[list[int]],
    adapter: Path | None = None,
    *,
    kind: Any = AutoModelForCausalLM,
    tokens: int = TOKENS,
) -> list[list[int]]:
    """Greedy tokens of the base, with ``adapter`` by PEFT where there is one."""
    model: Any = kind.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    model.eval()
    model.generation_config.eos_token_id = None  # the same number of tokens, whatever they are
    written = []
    with torch.inference_mode():
        for prompt in prompts:
            made = model.generate(
                input_ids=torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
            written.append(made[0, len(prompt) :].tolist())
    return written


def by_vllm(vllm: Vllm, prompts: list[list[int]], model: str) -> list[list[int]]:
    return [vllm.tokens(model, prompt) for prompt in prompts]


@pytest.fixture(scope="session")
def of_base(vllm: Vllm, smollm2: Path, prompts: list[list[int]]) -> list[list[int]]:
    """What both say without an adapter: without that, nothing could be said of one."""
    expected = by_transformers(smollm2, prompts)
    assert by_vllm(vllm, prompts, BASE) == expected
    return expected


@pytest.mark.parametrize("adapter", ["two-stage", "rank-48", "figures"])
def test_an_adapter_that_comes_while_vllm_runs_writes_what_peft_writes(
    adapter: str,
    vllm: Vllm,
    store: Store,
    sync: Sync,
    smollm2: Path,
    prompts: list[list[int]],
    of_base: list[list[int]],
) -> None:
    assert adapter not in vllm.models()
    store.publish(adapter, adapter)
    sync.await_news("loaded", adapter)
    expected = by_transformers(smollm2, prompts, store.trained / adapter)
    assert by_vllm(vllm, prompts, adapter) == expected
    assert all(one != base for one, base in zip(expected, of_base, strict=True))
    assert by_vllm(vllm, prompts, BASE) == of_base
    store.remove(adapter)
    sync.await_news("unloaded", adapter)


def test_the_call_that_loads_knows_every_field_that_it_is_sent(vllm: Vllm) -> None:
    """It would pass over others without a word."""
    with urllib.request.urlopen(f"{vllm.url}/openapi.json", timeout=60) as answer:
        schemas = json.loads(answer.read())["components"]["schemas"]
    sent = {"lora_name", "lora_path", "load_inplace", "is_3d_lora_weight"}
    assert sent <= schemas["LoadLoRAAdapterRequest"]["properties"].keys()


def test_what_vllm_does_not_compute_is_refused_in_words_and_the_others_are_loaded(
    vllm: Vllm, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for adapter, name in (("dora", "dora"), ("vera", "vera"), ("two-stage", "beside")):
        store.publish(adapter, name)
    command = [store.folder.as_uri(), "-d", str(tmp_path / "shown"), "--server", f"vllm={vllm.url}"]
    assert sync_main([*command, "--once", "-o", "json"]) != 0
    news = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    problems = {one["name"]: one["message"] for one in news if one["type"] == "problem"}
    assert problems.keys() == {"dora", "vera"}
    assert "vLLM does not yet support DoRA" in problems["dora"]
    assert "of the kind VERA" in problems["vera"]
    assert vllm.models() & {"dora", "vera", "beside"} == {"beside"}
    store.remove("beside")
    sync_main([*command, "--once", "--prune"])
    assert "beside" not in vllm.models()


def test_a_synced_folder_is_one_that_vllms_resolver_loads_from(
    vllm: Vllm, store: Store, smollm2: Path, prompts: list[list[int]], of_base: list[list[int]]
) -> None:
    for adapter in ("by-path", "two-stage"):
        store.publish(adapter, adapter)
    assert sync_main([store.folder.as_uri(), "-d", str(vllm.resolved), "--once"]) == 0
    expected = by_transformers(smollm2, prompts, store.trained / "by-path")
    assert by_vllm(vllm, prompts, "by-path") == expected
    assert all(one != base for one, base in zip(expected, of_base, strict=True))
    with pytest.raises(urllib.error.HTTPError) as refused:  # it names its base otherwise
        vllm.tokens("two-stage", prompts[0])
    assert refused.value.code == 404


def test_an_adapter_that_is_replaced_writes_as_the_new_one_and_one_that_is_removed_is_unknown(
    vllm: Vllm,
    store: Store,
    sync: Sync,
    smollm2: Path,
    prompts: list[list[int]],
    of_base: list[list[int]],
) -> None:
    store.publish("two-stage", "bot")
    sync.await_news("loaded", "bot")
    former = by_transformers(smollm2, prompts, store.trained / "two-stage")
    assert by_vllm(vllm, prompts, "bot") == former  # its cache now holds these prompts

    store.publish("better", "bot")
    sync.await_news("reloaded", "bot")
    better = by_transformers(smollm2, prompts, store.trained / "better")
    assert by_vllm(vllm, prompts, "bot") == better
    assert all(one not in (other, base) for one, other, base in zip(better, former, of_base, strict=True))

    store.remove("bot")
    sync.await_news("unloaded", "bot")
    with pytest.raises(urllib.error.HTTPError) as refused:
        vllm.tokens("bot", prompts[0])
    assert refused.value.code == 404
    assert by_vllm(vllm, prompts, BASE) == of_base
