"""What an adapter's own files say of the server that it needs, and which servers are not given it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlora_operator.sync import needs
from mlora_operator.sync.needs import AdapterNeeds, needs_of, sglang_lacks, vllm_lacks
from mlora_worker.protocol import EXPERTS, STACKED
from tests.fixtures.published import published_config

GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def unasked() -> str:
    raise AssertionError("its version decides nothing here")


def test_the_names_of_experts_are_those_of_the_protocol() -> None:
    assert (needs.EXPERTS, needs.STACKED) == (EXPERTS, STACKED)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"r": 8, "target_modules": ["q_proj"]}, AdapterNeeds()),
        ({"peft_type": "VERA"}, AdapterNeeds(kind="VERA")),
        ({"peft_type": "\x1b[2J" + "a" * 100_000}, AdapterNeeds(kind="unknown")),
        ({"use_dora": True}, AdapterNeeds(dora=True)),
        ({"use_rslora": True, "rank_pattern": {}}, AdapterNeeds(rslora=True)),
        ({"alpha_pattern": {"q_proj": 4}}, AdapterNeeds(by_module=True)),
        ({"rank_pattern": {"q_proj": 4}}, AdapterNeeds(by_module=True)),
        ({"target_parameters": [DOWN, GATE_UP]}, AdapterNeeds(stacked=True)),
        # Of shared experts and dense layers PEFT knows the weight alone; their file is that of any linear module.
        ({"target_parameters": ["mlp.shared_experts.up_proj.weight"]}, AdapterNeeds()),
        ({"target_parameters": [DOWN]}, AdapterNeeds(stacked=True, lone="down_proj")),
        ({"target_parameters": [GATE_UP]}, AdapterNeeds(stacked=True, lone="gate_up_proj")),
        (
            {"target_parameters": [f"layers.2.{DOWN}", f"layers.2.{GATE_UP}", f"layers.3.{DOWN}"]},
            AdapterNeeds(stacked=True, lone="down_proj"),
        ),
    ],
)
def test_needs_are_read_from_the_configuration(
    config: dict[str, Any], expected: AdapterNeeds, tmp_path: Path
) -> None:
    assert needs_of(published_config(tmp_path / "bot", config)) == expected


def test_the_type_of_the_base_is_read_from_the_manifest(tmp_path: Path) -> None:
    folder = published_config(
        tmp_path / "bot", {"target_parameters": [DOWN, GATE_UP]}, baseModelType="mixtral"
    )
    assert needs_of(folder) == AdapterNeeds(stacked=True, base_type="mixtral")


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 100_000, b'{"target_parameters": 3}', b"\xff"])
def test_what_cannot_be_read_needs_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_bytes(content)
    assert needs_of(tmp_path) == needs_of(tmp_path / "none") == AdapterNeeds()


@pytest.mark.parametrize(
    "found", [AdapterNeeds(stacked=True, base_type="qwen3_moe"), AdapterNeeds(by_module=True)]
)
@pytest.mark.parametrize(
    ("version", "taken"),
    [
        ("0.32.0", True),
        ("0.32.1rc2.dev3+gabc", True),
        ("0.100.0", True),
        ("1.0", True),
        ("0.31.9", False),
        ("0.4.2", False),
        ("dev", False),
        ("", False),
    ],
)
def test_vllm_gets_figures_by_module_and_experts_from_its_first_version_that_reads_them(
    found: AdapterNeeds, version: str, taken: bool
) -> None:
    why = vllm_lacks(found, lambda: version)
    assert (why is None) == taken
    assert taken or "need vLLM 0.32 or newer" in str(why)


@pytest.mark.parametrize("found", [AdapterNeeds(), AdapterNeeds(rslora=True)])
def test_what_every_vllm_reads_goes_to_any(found: AdapterNeeds) -> None:
    assert vllm_lacks(found, unasked) is None


@pytest.mark.parametrize("base_type", ["mixtral", "minimax_m2", "llama4", "llama4_text"])
def test_experts_that_vllm_would_not_find_or_take_wrongly_are_kept_from_it(base_type: str) -> None:
    assert f"the experts of {base_type}" in str(
        vllm_lacks(AdapterNeeds(stacked=True, base_type=base_type), unasked)
    )
    assert vllm_lacks(AdapterNeeds(base_type=base_type), unasked) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (AdapterNeeds(stacked=True), "routed experts has not been compared"),
        (AdapterNeeds(by_module=True), "one rank and one alpha"),
        (AdapterNeeds(rslora=True), r"alpha / sqrt(rank)"),
    ],
)
def test_sglang_gets_none_that_it_would_scale_wrongly(found: AdapterNeeds, words: str) -> None:
    assert words in str(sglang_lacks(found, unasked))
    assert sglang_lacks(AdapterNeeds(), unasked) is None


def test_a_configuration_that_is_too_large_to_read_hides_nothing_from_servers(tmp_path: Path) -> None:
    folder = published_config(
        tmp_path / "bot", {"rank_pattern": {"q_proj": 4}, "padding": "x" * needs.LARGEST}
    )
    assert needs_of(folder) == AdapterNeeds(oversized=True)


@pytest.mark.parametrize("version", ["9" * 5000 + ".1", "0.1" + "x" * 100_000])
def test_whatever_a_server_says_of_its_version_is_answered_in_few_words(version: str) -> None:
    assert len(str(vllm_lacks(AdapterNeeds(by_module=True), lambda: version))) < 300
