"""Nothing that crosses the protocol is of any size."""

import json
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from mlora_worker import protocol
from mlora_worker.bounds import MOST, MOST_REAL, MOST_WORDS
from mlora_worker.protocol import (
    AdapterManifest,
    Failure,
    FailureReason,
    Message,
    ModelFacts,
    Plan,
    Report,
    StageReport,
    TaskReport,
)
from mlora_worker.stream.timeline import Timeline
from tests.bounds import unbounded

MESSAGES = sorted(
    {
        one
        for one in vars(protocol).values()
        if isinstance(one, type) and issubclass(one, Message) and one is not Message
    },
    key=lambda one: one.__name__,
)


@pytest.mark.parametrize("message", [*MESSAGES, Timeline], ids=lambda one: one.__name__)
def test_every_number_text_and_list_of_the_protocol_has_bounds(message):
    assert unbounded(message) == []


def test_the_protocol_is_walked_whole():
    assert {Plan, Report, AdapterManifest, protocol.WorkerConfig, protocol.SurveyAnswer} <= set(MESSAGES)
    assert {protocol.SurveyQuestion, protocol.LookQuestion, protocol.LookAnswer} <= set(MESSAGES)


class _Inner(BaseModel):
    number: int


class _Loose(BaseModel):
    number: Annotated[int, Field(ge=0)]
    real: Annotated[float, Field(le=1)]
    text: str | None
    listed: tuple[Annotated[str, Field(max_length=1)], ...]
    mapped: Annotated[dict[str, Annotated[int, Field(ge=0, le=1)]], Field(max_length=1)]
    inner: Annotated[tuple[_Inner, ...], Field(max_length=1)]
    opaque: dict[str, Any]
    fixed: tuple[bool, bool]
    tight: Annotated[str, Field(max_length=1)] = ""


def test_the_walk_finds_what_has_no_bound():
    found = [line.removeprefix("_Loose.") for line in unbounded(_Loose)]
    assert [line for line in found if line.startswith(("fixed", "tight"))] == []
    assert {line.partition(":")[0] for line in found} == {
        "number", "real", "text", "listed", "mapped (key)", "inner[]", "opaque", "opaque (key)", "opaque[]"
    }  # fmt: skip


MODULE = {"stage": 0, "name": "q_proj", "inFeatures": 8, "outFeatures": 8, "count": 2}
FACTS = {
    "hiddenSize": 8, "intermediateSize": 16, "layers": 2, "attentionHeads": 2, "vocabSize": 64, "maxPositions": 128,
    "dtypeBytes": 4, "modules": [MODULE],
}  # fmt: skip
STAGE = {
    "stage": 0, "firstLayer": 0, "lastLayer": 1, "device": "cpu", "residentBytes": 1, "capacityBytes": 2
}  # fmt: skip


@pytest.mark.parametrize("field", ["residentBytes", "capacityBytes", "stage", "firstLayer", "lastLayer"])
@pytest.mark.parametrize("value", [10**400, -1, 2**63, True, "1", 1.5])
def test_a_stage_has_no_number_that_is_out_of_all_bounds(field, value):
    with pytest.raises(ValidationError):
        StageReport.model_validate_json(json.dumps(STAGE | {field: value}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"hiddenSize": 10**400},
        {"vocabSize": 2**31},
        {"layers": 10**9},
        {"modules": [MODULE | {"count": 10**9}]},
        {"modules": [MODULE] * 1025},  # each is harmless by itself
        {"modules": [MODULE | {"path": f"{number}.*." + "x" * 500} for number in range(300)]},
        {"modules": [MODULE | {"path": "a." * 12}]},
        {"modules": [MODULE | {"path": "layers.*.q_proj", "firstLayer": 1}]},
    ],
    ids=["hidden", "vocabulary", "layers", "count", "sum", "paths", "parts", "beyond the last layer"],
)
def test_facts_that_would_keep_the_operator_counting_are_refused(wrong):
    assert ModelFacts.model_validate_json(json.dumps(FACTS))
    with pytest.raises(ValidationError):
        ModelFacts.model_validate_json(json.dumps(FACTS | wrong))


def test_a_report_whose_facts_are_of_other_stages_is_refused():
    report = {
        "runId": "r", "sequence": 1, "planGeneration": 0, "ready": True, "facts": FACTS, "stages": [STAGE]
    }  # fmt: skip
    assert Report.model_validate_json(json.dumps(report))
    report["facts"] = FACTS | {"modules": [MODULE | {"stage": 1}]}
    with pytest.raises(ValidationError, match="stage 1, and there are 1 stages"):
        Report.model_validate_json(json.dumps(report))


ADAPTER = {"uri": "s3://a/b", "sha256": "ab" * 32, "bytes": 1}
TASK = {"uid": "u", "phase": "Training", "step": 3, "totalSteps": 3, "resumedStep": 2, "adapter": ADAPTER}


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 4},
        {"resumedStep": 4},
        {"step": MOST, "totalSteps": 1},
        *(
            {"adapter": ADAPTER | {"sha256": text}}
            for text in ("", "0", "AB" * 32, "ab" * 32 + "\n", "\x1b]0;a\x07" * 10)
        ),
    ],
)
def test_a_task_is_not_reported_beyond_its_end_nor_with_a_digest_that_is_none(wrong):
    assert TaskReport.model_validate_json(json.dumps(TASK))
    assert TaskReport.model_validate_json(json.dumps(TASK | {"totalSteps": 0})), (
        "its rows are not counted yet"
    )
    with pytest.raises(ValidationError):
        TaskReport.model_validate_json(json.dumps(TASK | wrong))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"tasks":' * 5_000, '{"sequence":' + "9" * 100_000 + "}"])
def test_a_report_that_is_nested_or_has_digits_without_end_is_refused(text):
    with pytest.raises(ValidationError):
        Report.model_validate_json(text)


def test_a_sentence_that_is_too_long_is_cut_and_no_fault():
    """A worker of a former version, and a store that answers with a page of HTML, stay understood."""
    failure = Failure(reason=FailureReason.INVALID_SPEC, message="x" * 10_000)
    assert failure.message == "x" * MOST_WORDS
    told = Failure.model_validate_json(json.dumps({"reason": "InvalidSpec", "message": "y" * 10_000}))
    assert len(told.message) == MOST_WORDS


def test_what_is_at_its_bound_can_still_be_reckoned_with():
    assert float(MOST) * 2 < float("inf")
    assert float("inf") > MOST_REAL**3
