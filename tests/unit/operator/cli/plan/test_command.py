"""`mlora plan` on what a cluster knows of its pipeline: no worker process is needed, and nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.cli.app import app
from mlora_operator.cli.output import CommandError
from mlora_operator.cli.plan.command import memory_of
from mlora_operator.local.fits import LearnedPipeline, beside_models
from mlora_operator.local.manifests import ObjectSource, PipelineManifest
from mlora_operator.memory.fit import Coefficients, FittedLine, StageFit
from mlora_operator.memory.learned import to_status
from mlora_operator.memory.origin import origin_of
from tests.fixtures.loratask import loratask
from tests.fixtures.toy_facts import toy_facts, toy_stages

MODEL = "org/model"
FACTS = toy_facts(layers=6, max_positions=256, vocab_size=1000)
STAGES = toy_stages(layers=6, capacity_bytes=2**30)


def pipeline(**spec: Any) -> dict[str, Any]:
    """As `kubectl get lorapipeline p -o yaml` shows one whose workers have run."""
    return {
        "apiVersion": "mlora.dev/v1alpha1",
        "kind": "LoRAPipeline",
        "metadata": {"name": "p", "uid": "1", "resourceVersion": "7"},
        "spec": {"model": {"name": MODEL, "uri": "s3://models/m"}, "stages": 2, **spec},
        "status": {
            "facts": FACTS.model_dump(mode="json", by_alias=True),
            "stages": [stage.model_dump(mode="json", by_alias=True) for stage in STAGES],
        },
    }


def task(name: str, **spec: Any) -> dict[str, Any]:
    return loratask(
        name,
        {
            "baseModel": MODEL,
            "dataset": {"uri": "s3://rows/a.jsonl"},
            "training": {"batchSize": 4, "maxSeqLength": 128, "maxSteps": 10},
            "output": {"uri": f"s3://out/{name}"},
            **spec,
        },
    )


def invoke(folder: Path, objects: list[dict[str, Any]], *options: str) -> tuple[int, str, str]:
    file = folder / "all.yaml"
    file.write_text(yaml.safe_dump_all(objects))
    result = CliRunner().invoke(app, ["plan", str(file), *options])
    if isinstance(result.exception, CommandError):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def planned(
    folder: Path, *objects: dict[str, Any], options: tuple[str, ...] = ()
) -> tuple[int, dict[str, Any]]:
    code, output, errors = invoke(folder, list(objects), "-o", "json", *options)
    assert output, errors
    (one,) = json.loads(output)["pipelines"]
    return code, one


def test_tasks_stages_groups_and_forecast_are_shown(tmp_path: Path) -> None:
    code, one = planned(tmp_path, pipeline(), task("a"), task("b", priority=5))
    assert code == 0
    assert [
        (stage["firstLayer"], stage["lastLayer"], stage["embedding"], stage["head"])
        for stage in one["stages"]
    ] == [
        (0, 2, True, False),
        (3, 5, False, True),
    ]
    assert sum(stage["costShare"] for stage in one["stages"]) == pytest.approx(1)
    assert one["stages"][1]["costShare"] > one["stages"][0]["costShare"], "the head counts"
    assert [
        (t["name"], t["state"], t["tokensPerStep"], t["longestRow"], t["totalSteps"]) for t in one["tasks"]
    ] == [
        ("b", "Admitted", 512, 128, 10),
        ("a", "Admitted", 512, 128, 10),
    ]
    assert sorted(name for group in one["groups"] for name in group["tasks"]) == ["a", "b"]
    assert 0 <= one["bubble"] <= one["idle"] < 1
    assert 1 < one["speedup"] <= 2
    assert one["tokensPerSecond"] is None
    assert one["memorySource"] == "what the workers had when they last ran"


def test_people_read_the_same(tmp_path: Path) -> None:
    code, output, errors = invoke(tmp_path, [pipeline(), task("a"), task("b")], "--tokens-per-second", "100")
    assert code == 0
    for words in (
        "embedding, 0-2",
        "3-5, norm, head",
        "MICROBATCHES",
        "bubble",
        "times one device, ",
        " tokens/s",
    ):
        assert words in output
    assert "a: its rows were not read; each is assumed to have 128 tokens" in output
    assert errors == ""


@pytest.mark.parametrize(
    ("story", "spec", "state", "reason", "words"),
    [
        (
            "a rank above a module's side",
            {"lora": {"rank": 65, "targetModules": ["q_proj"]}},
            "Failed",
            "InvalidSpec",
            "use at most 64",
        ),
        (
            "a module that is not there",
            {"lora": {"targetModules": ["c_attn"]}},
            "Failed",
            "UnknownTargetModule",
            "there are q_proj, v_proj",
        ),
        (
            "rows longer than the positions",
            {"training": {"maxSeqLength": 257}},
            "Failed",
            "InvalidSpec",
            "maxSeqLength is 257, but the base model supports at most 256",
        ),
        ("suspended", {"suspend": True}, "Suspended", "Suspended", "spec.suspend"),
    ],
)
def test_what_becomes_of_a_task(
    tmp_path: Path, story: str, spec: dict[str, Any], state: str, reason: str, words: str
) -> None:
    code, one = planned(tmp_path, pipeline(), task("good"), task("odd", **spec))
    assert code == (1 if state == "Failed" else 0), story
    odd = next(t for t in one["tasks"] if t["name"] == "odd")
    assert (odd["state"], odd["reason"]) == (state, reason)
    assert words in odd["message"]
    assert [group["tasks"] for group in one["groups"]] == [["good"]], "only who is let in travels"


def test_memory_lets_in_makes_wait_or_rejects(tmp_path: Path) -> None:
    """As the operator's admission: in order of priority; a batch that never fits stands in nobody's way."""
    small = {"batchSize": 4, "maxSeqLength": 128, "maxSteps": 10}
    huge = {"batchSize": 512, "maxSeqLength": 256, "maxSteps": 10}
    objects = [
        pipeline(memory={"budget": "95Mi", "margin": 0.0}),
        task("first", priority=9, training=small),
        task("huge", priority=8, training=huge),
        task("second", priority=7, training=small),
        task("third", priority=6, training=small),
    ]
    code, one = planned(tmp_path, *objects)
    assert code == 1
    states = {t["name"]: (t["state"], t["reason"]) for t in one["tasks"]}
    assert states == {
        "first": ("Admitted", "Admitted"),
        "huge": ("Rejected", "ExceedsCapacity"),
        "second": ("Queued", "WaitingForMemory"),
        "third": ("Queued", "WaitingForMemory"),
    }
    told = {t["name"]: t["message"] for t in one["tasks"]}
    assert "on stage 0 even alone (frozen weights 976.56 KiB" in told["huge"]
    assert "95.00 MiB usable" in told["huge"]
    assert "it would fit alone with microbatchTokens: " in told["huge"]
    assert told["third"].startswith("together with the tasks in training it would need ")
    assert all(stage["neededBytes"] <= stage["allowedBytes"] for stage in one["stages"])


@pytest.mark.parametrize(
    ("story", "spec", "options", "allowed", "source"),
    [
        (
            "what was asked for goes first",
            {"memory": {"budget": "1Gi"}},
            ("--memory", "2Gi"),
            2**31,
            "as --memory says",
        ),
        (
            "then the pipeline's budget",
            {"memory": {"budget": "1Gi"}},
            (),
            2**30,
            "the pipeline's memory.budget",
        ),
        ("then what the workers had", {}, (), 2**30, "what the workers had when they last ran"),
    ],
)
def test_whose_memory_is_meant(
    tmp_path: Path, story: str, spec: dict[str, Any], options: tuple[str, ...], allowed: int, source: str
) -> None:
    _, one = planned(tmp_path, pipeline(**spec), task("a"), options=options)
    assert one["memorySource"] == source, story
    assert one["stages"][0]["allowedBytes"] == int(allowed * 0.95)


@pytest.mark.parametrize(
    ("story", "limits", "gpu", "share", "expected"),
    [
        ("a CPU worker has its container's limit", {"memory": "4Gi"}, False, "100", (2**32, 2**32)),
        ("without one, a part of this machine", {}, False, "100", (100, 100)),
        ("a GPU's memory is not known from here", {"memory": "4Gi", "nvidia.com/gpu": 1}, True, "100", None),
        ("nor that of a GPU here", {}, True, None, None),
    ],
)
def test_memory_of_workers_that_never_ran(
    story: str, limits: dict[str, Any], gpu: bool, share: str | None, expected: tuple[int, ...] | None
) -> None:
    spec = {**pipeline()["spec"], "worker": {"resources": {"limits": limits}}}
    place = ObjectSource("f.yaml", 1, "LoRAPipeline", "default", "p")
    manifest = PipelineManifest(place, LoRAPipelineSpec.model_validate(spec))
    assert memory_of(2, manifest, share, None, gpu=gpu).bytes == expected, story


@pytest.mark.parametrize("told_by", ["the manifest's status", "a run on this machine", "nobody"])
def test_what_was_learned_of_the_memory_is_used_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_by: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    objects = [pipeline(), task("a")]
    spec = LoRAPipelineSpec.model_validate(objects[0]["spec"])
    line = FittedLine(Coefficients(b1=10_000.0), 0.02)
    learned = to_status(
        {stage: StageFit(line, line, line, samples=20 + stage, widest=4096) for stage in (0, 1)},
        origin_of(spec, STAGES),
    )
    if told_by == "the manifest's status":
        objects[0]["status"]["memory"] = [one.model_dump(mode="json", by_alias=True) for one in learned]
    elif told_by == "a run on this machine":
        beside_models(tmp_path / "mlora" / "models").keep(LearnedPipeline(memory=learned, stages=STAGES))
    code, out, _ = invoke(tmp_path, objects, "-o", "json")
    assert code == 0
    [found] = json.loads(out)["pipelines"]
    said = next(line for line in found["assumed"] if line.startswith("memory:"))
    if told_by == "nobody":
        assert "an estimate from the model's shape" in said
        return
    assert "learned from 20 microbatches" in said
    tokens = 4 * 128
    for stage, known in zip(found["stages"], STAGES, strict=True):
        activations = stage["neededBytes"] - known.resident_bytes
        assert activations < 3 * 1.1 * 10_000 * tokens + 2**20, (
            "no more than what was learned, and the adapter"
        )


def test_a_task_that_no_pipeline_takes_is_named(tmp_path: Path) -> None:
    other = task("a")
    other["metadata"]["namespace"] = "elsewhere"
    code, _, errors = invoke(tmp_path, [pipeline(), other])
    assert code == 1
    assert "elsewhere/a: NamespaceNotAllowed" in errors


@pytest.mark.parametrize(
    ("objects", "options", "words"),
    [
        ([pipeline()], (), "these files contain no LoRATask"),
        ([task("a")], (), "the location of org/model is not known"),
        ([pipeline(), task("a", lora={"rank": 0})], (), "spec.lora.rank"),
        ([pipeline(), task("a")], ("--memory", "much"), "--memory: 'much' is not a quantity"),
    ],
)
def test_bad_input_ends_with_its_name(
    tmp_path: Path, objects: list[dict[str, Any]], options: tuple[str, ...], words: str
) -> None:
    with pytest.raises(CommandError, match=words) as caught:
        invoke(tmp_path, objects, *options)
    assert caught.value.exit_code == 2
