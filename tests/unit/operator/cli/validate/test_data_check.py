"""`mlora validate --data`: settings from options and files, and what people see of rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlora_operator.cli import exit_codes
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.validate.data_check import exit_code, print_answer, question_of
from mlora_operator.local.manifests import Manifests, read_manifests
from mlora_worker.protocol import (
    DataCounts,
    DatasetFormat,
    Failure,
    FailureReason,
    HistogramBar,
    LookAnswer,
    ShownPart,
    TrainOn,
)

FILES = """
apiVersion: mlora.dev/v1alpha1
kind: LoRAPipeline
metadata: {name: toy}
spec: {model: {name: org/tiny, uri: "s3://models/tiny"}, stages: 1}
---
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {name: t1}
spec:
  baseModel: org/tiny
  dataset: {uri: "s3://b/rows.csv", format: alpaca, fields: {output: answer}, limit: 5}
  training: {maxSeqLength: 64}
  output: {uri: "s3://b/out"}
"""


def manifests(text: str = FILES) -> Manifests:
    read = read_manifests([("files.yaml", text)])
    assert not read.problems
    return read


def test_settings_are_the_tasks_and_the_model_is_that_of_its_pipeline(tmp_path: Path) -> None:
    question = question_of(manifests(), str(tmp_path / "other.jsonl"), "org/tiny", {}, [], 3)
    assert question.model.uri == "s3://models/tiny"
    assert question.dataset.uri == (tmp_path / "other.jsonl").as_uri()
    assert (question.dataset.format, question.dataset.limit) == (DatasetFormat.ALPACA, 5)
    assert question.dataset.fields.output == "answer"
    assert question.training.max_seq_length == 64


def test_stars_in_a_path_stand_for_files_unless_one_is_called_so(tmp_path: Path) -> None:
    def asked() -> str | None:
        return question_of(manifests(), str(tmp_path / "a b*.jsonl"), "org/tiny", {}, [], 3).dataset.uri

    assert asked() == f"{tmp_path.as_uri()}/a%20b*.jsonl"
    (tmp_path / "a b*.jsonl").touch()
    assert asked() == f"{tmp_path.as_uri()}/a%20b%2A.jsonl"


STORES = """
apiVersion: mlora.dev/v1alpha1
kind: LoRAPipeline
metadata: {name: toy, namespace: platform}
spec:
  model: {name: org/tiny, uri: "s3://models/tiny"}
  stages: 1
  storage: {endpoint: "https://models:1", addressing: virtual, secretRef: {name: keys}}
---
apiVersion: v1
kind: Secret
metadata: {name: keys, namespace: platform}
stringData: {AWS_ACCESS_KEY_ID: " m\n", AWS_SECRET_ACCESS_KEY: ms, HF_TOKEN: t1, ca.crt: PEM}
---
apiVersion: mlora.dev/v1alpha1
kind: LoRATask
metadata: {name: t1, namespace: team}
spec:
  baseModel: org/tiny
  dataset: {uri: "s3://b/rows.csv"}
  output: {uri: "s3://b/out"}
  storage: {endpoint: "http://rows:2", region: eu, secretRef: {name: keys}}
"""


def test_stores_are_those_of_the_files_with_the_keys_of_their_secrets_or_of_the_machine() -> None:
    here = {"HF_TOKEN": "t2"}
    question = question_of(manifests(STORES), "s3://b/r", "org/tiny", {}, [], 3, environment=here)
    model, rows = question.model_storage, question.storage
    assert (model.endpoint, model.addressing, model.ca_certificate) == ("https://models:1", "virtual", "PEM")
    assert model.access_key is not None
    assert model.access_key.get_secret_value() == "m"
    assert (rows.endpoint, rows.region, rows.access_key) == (
        "http://rows:2",
        "eu",
        None,
    )  # its Secret is not there
    assert [one.hub_token and one.hub_token.get_secret_value() for one in (model, rows)] == ["t1", "t2"]
    asked = question_of(
        manifests(STORES), "s3://b/r", "org/tiny", {}, [], 3, s3_endpoint="http://here:3", environment={}
    )
    assert asked.model_storage.endpoint == asked.storage.endpoint == "http://here:3"
    assert asked.storage.hub_token is None


def test_options_win_and_a_folder_is_a_model(tmp_path: Path) -> None:
    options = {
        "format": DatasetFormat.MESSAGES,
        "trainOn": TrainOn.LAST_ANSWER,
        "maxSeqLength": 99,
        "fileFormat": None,
    }
    question = question_of(manifests(), "https://host/x", str(tmp_path), options, ["messages=turns"], 0)
    assert question.model.uri == tmp_path.as_uri()
    assert question.dataset.uri == "https://host/x"
    assert (question.dataset.format, question.dataset.train_on) == (
        DatasetFormat.MESSAGES,
        TrainOn.LAST_ANSWER,
    )
    assert question.dataset.fields.messages == "turns"
    assert question.training.max_seq_length == 99


@pytest.mark.parametrize(
    ("model", "fields", "told"),
    [
        ("absent/model", [], "no LoRAPipeline in the files serves it"),
        ("org/tiny", ["prompt"], "write NAME=COLUMN"),
        ("org/tiny", ["promt=x"], "promt"),
    ],
)
def test_what_cannot_be_meant_is_told(model: str, fields: list[str], told: str) -> None:
    with pytest.raises(CommandError, match=told) as caught:
        question_of(manifests(), "rows.jsonl", model, {}, fields, 1)
    assert caught.value.exit_code == exit_codes.INVALID


def test_rows_are_shown_with_what_is_learnt_marked_and_nothing_that_a_terminal_obeys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_answer(
        LookAnswer(
            counts=DataCounts(
                rows=3,
                used=2,
                dropped={"NoAnswer": 1},
                first_dropped={"NoAnswer": (2,)},
                tokens=9,
                special_tokens=1,
                format=DatasetFormat.SHAREGPT,
            ),
            longest=5,
            histogram=(HistogramBar(low=0, high=4, rows=1), HistogramBar(low=4, high=8, rows=1)),
            shown=((ShownPart(text="2+2? [red]\x1b[31m", learnt=False), ShownPart(text="4", learnt=True)),),
        )
    )
    out = capsys.readouterr().out
    assert "2 of 3 rows are used: 9 tokens" in out
    assert "format: sharegpt" in out
    assert "dropped as NoAnswer: 1 (first in 2)" in out
    assert "with special tokens in their own text: 1" in out
    assert "4 to 7 tokens" in out
    assert "2+2? [red]\\u001b[31m⟦4⟧" in out
    assert "\x1b[31m" not in out


def test_the_two_answers_of_a_pair_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    pair = tuple(
        ShownPart(text=text, learnt=learnt, answer=answer)
        for answer, texts in (("chosen", ("2+2 is", " 4.")), ("rejected", ("2+2 is", " 5.")))
        for learnt, text in zip((False, True), texts, strict=True)
    )
    print_answer(LookAnswer(counts=DataCounts(rows=1, used=1), longest=9, shown=(pair, pair)))
    assert capsys.readouterr().out.count("chosen: 2+2 is⟦ 4.⟧\nrejected: 2+2 is⟦ 5.⟧\n") == 2


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (FailureReason.INVALID_ROW, exit_codes.INVALID),
        (FailureReason.STORAGE_UNREACHABLE, exit_codes.UNREACHABLE),
        (FailureReason.ACCESS_DENIED, exit_codes.UNREACHABLE),
    ],
)
def test_the_exit_code_tells_wrong_rows_from_a_store_that_is_away(reason: FailureReason, code: int) -> None:
    assert exit_code(LookAnswer(failure=Failure(reason=reason, message="x"))) == code
    assert exit_code(None) == exit_code(LookAnswer()) == exit_codes.OK


def test_a_template_in_a_config_map_has_to_be_given_as_a_file() -> None:
    text = FILES.replace("limit: 5}", "limit: 5, chatTemplateRef: {name: templates, key: bot}}")
    with pytest.raises(CommandError, match="pass it with --chat-template FILE"):
        question_of(manifests(text), "rows.jsonl", "org/tiny", {}, [], 3)
    question = question_of(manifests(text), "rows.jsonl", "org/tiny", {"chatTemplate": "{{ m }}"}, [], 3)
    assert question.dataset.chat_template == "{{ m }}"
    assert question.dataset.chat_template_ref is None
    inline = FILES.replace("limit: 5}", "limit: 5, chatTemplate: '{{ a }}'}")
    assert question_of(manifests(inline), "r.jsonl", "org/tiny", {}, [], 3).dataset.chat_template == "{{ a }}"


def test_a_model_on_a_hub_is_read_at_its_pipelines_revision_and_hub() -> None:
    spec = 'uri: "hf://org/tiny", revision: v1}, stages: 1, worker: {hubEndpoint: "http://mirror:80"}}'
    text = FILES.replace('uri: "s3://models/tiny"}, stages: 1}', spec)
    question = question_of(manifests(text), "rows.jsonl", "org/tiny", {}, [], 3)
    assert (question.model.uri, question.model.revision) == ("hf://org/tiny", "v1")
    assert question.hub_endpoint == "http://mirror:80"
    assert question_of(manifests(), "rows.jsonl", "hf://org/other", {}, [], 3).model.uri == "hf://org/other"
