"""Names that Kubernetes takes, whatever the pipeline is called."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlora_operator.manifests.names import catalogue_name, child_name, safe_name, selector

DNS_1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")

names = st.from_regex(SUBDOMAIN, fullmatch=True).filter(lambda name: len(name) <= 253)


@pytest.mark.parametrize(
    ("pipeline", "child"),
    [
        ("smollm2", "mlora-smollm2"),
        ("7b", "mlora-7b"),
        ("a" * 46, "mlora-" + "a" * 46),
    ],
)
def test_a_plain_name_stays_readable(pipeline: str, child: str) -> None:
    assert child_name(pipeline) == child


@pytest.mark.parametrize("pipeline", ["smollm2.v1", "a" * 47, "a" * 253])
def test_what_had_to_be_changed_carries_a_hash(pipeline: str) -> None:
    assert re.search(r"-[0-9a-f]{8}$", child_name(pipeline))


def test_dots_and_hyphens_do_not_become_one_name() -> None:
    assert child_name("a.b") != child_name("a-b")


@given(names)
def test_a_child_is_a_dns_label_that_leaves_room_for_the_controllers_hash(pipeline: str) -> None:
    child = child_name(pipeline)
    assert DNS_1035.fullmatch(child)
    assert len(child) <= 52
    assert all(len(value) <= 63 for value in selector(pipeline).values())


def test_two_pipelines_never_share_a_child() -> None:
    words = ("".join(letters) for length in range(1, 7) for letters in product("a.-", repeat=length))
    similar = [word for word in words if SUBDOMAIN.fullmatch(word)]
    assert len({child_name(word) for word in similar}) == len(similar) > 50


@pytest.mark.parametrize(
    "model", ["HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-0.5B", "7B", "модель", "x"]
)
def test_a_model_of_the_catalogue_has_a_name_too(model: str) -> None:
    assert DNS_1035.fullmatch(catalogue_name(model))
    assert len(catalogue_name(model)) <= 63


def test_models_that_differ_in_capitals_alone_are_two() -> None:
    assert catalogue_name("Org/Model") != catalogue_name("org/model")
    assert safe_name("model", 63) == "model"
