"""Who writes another program's name for a field is told ours, for each name that the page has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
from peft import LoraConfig, VeraConfig
from peft.optimizers import create_loraplus_optimizer
from transformers import TrainingArguments

from mlora_operator.api.crd import task_crd
from mlora_operator.api.suggestions import NOT_HERE, unknown_field

PAGE = (Path(__file__).parents[4] / "docs" / "users" / "tasks.md").read_text()
(_VERSION,) = task_crd()["spec"]["versions"]
SPEC = _VERSION["schema"]["openAPIV3Schema"]["properties"]["spec"]
# Of TRL, which takes half a minute to import; a name that transformers has no more; and what PEFT takes as arguments.
OTHERS = {"max_length", "warmup_ratio"} | {*signature(create_loraplus_optimizer).parameters}
OTHERS |= {
    "beta",
    "loss_type",
    "label_smoothing",
    "cpo_alpha",
    "simpo_gamma",
    "desirable_weight",
    "undesirable_weight",
}


def cells() -> Iterator[tuple[str, list[list[str]]]]:
    """Our field, and the names of each program."""
    table = PAGE.partition("## Names elsewhere")[2].partition("\n- ")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            ours, *theirs = line.strip("| ").split(" |")
            yield ours.strip("`"), [re.findall(r"`(\w+)`", cell) for cell in theirs]


ROWS = list(cells())
NAMES = sorted({(ours, name) for ours, theirs in ROWS for names in theirs for name in names})


def siblings(path: str) -> list[str]:
    node = SPEC
    for part in path.split(".")[:-1]:
        node = node["properties"][part]
    return list(node["properties"])


@pytest.mark.parametrize(("ours", "name"), NAMES)
def test_it_is_told_what_it_is_called_here(ours: str, name: str) -> None:
    last = ours.split(".")[-1]
    assert last in siblings(ours)
    if name in (last, "warmup_steps"):
        return
    assert unknown_field(name, siblings(ours)) == f"unknown field; did you mean {last}?"


@pytest.mark.parametrize("name", NOT_HERE)
def test_what_peft_has_and_a_task_has_not_is_told_with_a_way_out(name: str) -> None:
    assert name in {field.name for field in fields(LoraConfig)}
    first, *rest = name.split("_")
    for written in (name, first + "".join(part.capitalize() for part in rest)):
        told = unknown_field(written, siblings("lora.rank"))
        assert told == f"unknown field; {NOT_HERE[name]}"
        assert "remove it" in told


def test_the_names_of_peft_and_transformers_are_theirs() -> None:
    known = {
        field.name for kind in (LoraConfig, VeraConfig, TrainingArguments) for field in fields(kind)
    } | OTHERS
    assert {name for _, (theirs, *_) in ROWS for name in theirs} <= known
