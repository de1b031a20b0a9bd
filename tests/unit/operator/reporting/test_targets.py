"""How places are written, and what is said where a library is missing."""

from __future__ import annotations

import pytest

from mlora_operator.reporting.curves import LibraryMissing
from mlora_operator.reporting.targets import ReportTarget, check_installed, target


@pytest.mark.parametrize(
    ("text", "kind", "place"),
    [
        ("tensorboard:./runs", "tensorboard", "./runs"),
        (
            "mlflow:https://user@mlflow.acme.example:5000/x",
            "mlflow",
            "https://user@mlflow.acme.example:5000/x",
        ),
        ("wandb:acme/adapters", "wandb", "acme/adapters"),
    ],
)
def test_a_place_is_what_follows_the_first_colon(text: str, kind: str, place: str) -> None:
    assert target(text) == ReportTarget(kind, place)


@pytest.mark.parametrize("text", ["tensorboard", "wandb:", "aim:./x", "./runs", ""])
def test_anything_else_is_told_how_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match="tensorboard:FOLDER, mlflow:URL or wandb:PROJECT"):
        target(text)


def test_a_missing_library_is_told_with_the_extra_that_brings_it() -> None:
    with pytest.raises(LibraryMissing, match=r"pip install 'mlora-operator\[mlflow\]'"):
        check_installed(ReportTarget("mlflow", "http://x"), find=lambda _: None)
    check_installed(ReportTarget("mlflow", "http://x"), find=lambda name: name)
