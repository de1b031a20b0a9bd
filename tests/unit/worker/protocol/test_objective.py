"""Numbers that have no meaning for a type are refused by name; those that are left out are TRL's."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from mlora_worker.protocol import Objective, PreferenceLoss, Training


@pytest.mark.parametrize(
    ("objective", "field"),
    [
        ({"type": "kto", "lossType": "sigmoid"}, "lossType"),
        ({"type": "kto", "lossType": "apo_zero_unpaired", "labelSmoothing": 0.1}, "labelSmoothing"),
        ({"type": "dpo", "lossType": "apo_zero_unpaired"}, "lossType"),
        ({"type": "dpo", "desirableWeight": 1.0}, "desirableWeight"),
        ({"undesirableWeight": 1.0}, "undesirableWeight"),
        ({"beta": 0.1}, "beta"),
        ({"type": "orpo", "lossType": "sigmoid"}, "lossType"),
        ({"type": "cpo", "lossType": "robust"}, "lossType"),
        ({"type": "dpo", "labelSmoothing": 0.1}, "labelSmoothing"),
        ({"type": "cpo", "lossType": "hinge", "labelSmoothing": 0.1}, "labelSmoothing"),
        ({"type": "orpo", "labelSmoothing": 0.1}, "labelSmoothing"),
        ({"type": "dpo", "cpoAlpha": 1.0}, "cpoAlpha"),
        ({"type": "cpo", "simpoGamma": 1.0}, "simpoGamma"),
    ],
)
def test_what_a_type_does_not_have_is_refused(objective: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=f"{field}.*(remove it|correct|depend on)"):
        Objective.model_validate(objective)


@pytest.mark.parametrize(
    "objective",
    [
        {"type": "dpo", "beta": 0.0},
        {"type": "dpo", "beta": 1e4},
        {"type": "dpo", "lossType": "robust", "labelSmoothing": 0.5},
        {"type": "simpo", "simpoGamma": -0.1},
    ],
)
def test_bounds_hold(objective: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Objective.model_validate(objective)


def test_what_is_left_out_is_as_trl_has_it() -> None:
    dpo, cpo, simpo, orpo = (
        Objective.model_validate({"type": kind}) for kind in ("dpo", "cpo", "simpo", "orpo")
    )
    assert {one.temperature for one in (dpo, cpo, simpo, orpo)} == {0.1}
    assert (dpo.loss, cpo.loss) == (PreferenceLoss.SIGMOID, PreferenceLoss.SIGMOID)
    assert [one.likelihood for one in (dpo, cpo, simpo, orpo)] == [0.0, 1.0, 0.0, 1.0]
    assert simpo.gamma == 0.5
    assert [one.has_reference for one in (dpo, cpo, simpo, orpo)] == [True, False, False, False]


def test_answers_are_what_is_trained_by_default() -> None:
    assert Training().preference is None
    assert Training(objective=Objective()).preference is None
    assert Training(objective=Objective.model_validate({"type": "dpo"})).preference is not None
