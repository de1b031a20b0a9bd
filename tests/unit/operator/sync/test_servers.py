"""What vLLM and SGLang are asked, and what they say when they will not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlora_operator.sync import ModelServer, parse_server
from mlora_operator.sync.needs import AdapterNeeds
from mlora_operator.sync.requests import ServerRefused
from tests.fixtures.model_server import FakeModelServer, model_server
from tests.fixtures.published import publish


def of(server: FakeModelServer, kind: str | None = None) -> ModelServer:
    return parse_server(f"{kind or server.kind}={server.url}/", server.key, lambda _: None)


@pytest.mark.parametrize(
    ("kind", "replaces", "calls"),
    [
        ("vllm", True, ["load_lora_adapter", "load_lora_adapter", "unload_lora_adapter"]),
        (
            "vllm",
            False,
            ["load_lora_adapter"] * 2 + ["unload_lora_adapter", "load_lora_adapter", "unload_lora_adapter"],
        ),
        (
            "sglang",
            False,
            ["load_lora_adapter", "unload_lora_adapter", "load_lora_adapter", "unload_lora_adapter"],
        ),
    ],
)
def test_an_adapter_is_loaded_replaced_and_unloaded(
    kind: str, replaces: bool, calls: list[str], tmp_path: Path
) -> None:
    first, second = (str(publish(tmp_path / name)) for name in ("a", "b"))
    with model_server(kind, replaces=replaces) as server:
        asked = of(server)
        asked.load("bot", first)
        assert asked.loaded() == {"acme/base": None, "bot": first}
        asked.replace("bot", second)
        assert asked.loaded() == {"acme/base": None, "bot": second}
        asked.unload("bot")
        assert asked.loaded() == {"acme/base": None}
        assert [call for call, _ in server.calls] == calls


@pytest.mark.parametrize("replaces", [True, False])
def test_vllm_is_told_that_experts_come_in_one_piece_whenever_it_loads(
    replaces: bool, tmp_path: Path
) -> None:
    first, second, plain = (str(publish(tmp_path / name)) for name in ("a", "b", "c"))
    with model_server(replaces=replaces) as server:
        of(server).load("bot", first, AdapterNeeds(stacked=True))
        of(server).replace("bot", second, AdapterNeeds(stacked=True))
        of(server).replace("bot", plain, AdapterNeeds())
        loads = [body for path, body in server.asked if path.endswith("/load_lora_adapter")]
        assert {body["lora_path"]: body.get("is_3d_lora_weight") for body in loads} == {
            first: True,
            second: True,
            plain: None,
        }


@pytest.mark.parametrize(
    ("kind", "needs", "words"),
    [
        ("vllm", AdapterNeeds(stacked=True), "need vLLM 0.32 or newer, and this one is 0.31.0"),
        ("sglang", AdapterNeeds(rslora=True), "SGLang scales by alpha / rank"),
        ("vllm", AdapterNeeds(kind="VERA"), "of the kind VERA"),
        ("sglang", AdapterNeeds(dora=True), "it has use_dora"),
        ("vllm", AdapterNeeds(oversized=True), "more than 1,048,576 bytes"),
        ("vllm", AdapterNeeds(stacked=True, lone="down_proj"), "experts.down_proj without the other"),
    ],
)
def test_a_server_is_not_asked_to_load_what_it_would_compute_wrongly(
    kind: str, needs: AdapterNeeds, words: str, tmp_path: Path
) -> None:
    first, second = (str(publish(tmp_path / name)) for name in ("a", "b"))
    with model_server(kind) as server:
        server.version = {"version": "0.31.0"}
        of(server).load("bot", first)
        for ask in (of(server).load, of(server).replace):
            with pytest.raises(ServerRefused, match=f"{kind} at {server.url} does not get it: .*{words}"):
                ask("bot", second, needs)
        assert server.adapters == {"bot": first}


@pytest.mark.parametrize("answer", ["0.32.0", [], {"version": None}, {"version": {}}])
def test_a_vllm_that_does_not_say_its_version_gets_no_experts(answer: object, tmp_path: Path) -> None:
    with model_server() as server:
        server.version = answer
        with pytest.raises(ServerRefused, match="does not say its version"):
            of(server).load("bot", str(publish(tmp_path / "a")), AdapterNeeds(stacked=True))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_what_is_unloaded_already_is_no_problem(kind: str) -> None:
    with model_server(kind) as server:
        of(server).unload("bot")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_why_an_adapter_is_refused_is_said(kind: str, tmp_path: Path) -> None:
    with model_server(kind) as server:
        server.refuses["bot"] = "LoRA rank 48 is greater than max_lora_rank 16"
        with pytest.raises(ServerRefused, match="rank 48 is greater than max_lora_rank 16"):
            of(server).load("bot", str(publish(tmp_path / "a")))


def test_a_server_that_does_not_know_the_call_is_told_apart(tmp_path: Path) -> None:
    with model_server("sglang") as server, pytest.raises(ServerRefused) as refused:
        of(server, "vllm").load("bot", str(publish(tmp_path / "a")))
    assert "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True" in str(refused.value)


def test_a_failure_in_an_answer_of_success_is_one(tmp_path: Path) -> None:
    with model_server("sglang") as server:
        server.fails = [(200, b'{"success": false, "error_message": "no memory"}')]
        with pytest.raises(ServerRefused, match="load_lora_adapter refuses: no memory"):
            of(server).load("bot", str(publish(tmp_path / "a")))


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}", b'{"data": 3}', b"[" * 100_000])
def test_what_lists_no_models_is_no_server_of_models(answer: bytes) -> None:
    with model_server() as server:
        server.fails = [(200, answer)]
        with pytest.raises(ServerRefused, match="does not list models: is it a vllm"):
            of(server).loaded()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("http://127.0.0.1:8000", "write vllm=URL or sglang=URL"),
        ("lorax=http://x", "LoRAX loads from the folder by itself"),
        ("vllm=", "the address is http://HOST:PORT"),
        ("vllm=ftp://x", "the address is http://HOST:PORT"),
        ("vllm=file:///etc/passwd", "the address is http://HOST:PORT"),
        ("vllm=http://user:secret@x", "without user"),
        ("vllm=http://x:99999", "the address is http://HOST:PORT"),
        ("vllm=http://x?a=b", "without user and query"),
    ],
)
def test_an_address_that_is_none_is_refused_before_anything_is_asked(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_server(text, None, lambda _: None)
