"""What a run learns of its pipeline's memory, the next run and ``mlora plan`` know."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from mlora_operator.api import API_VERSION
from mlora_operator.api import pipeline as lorapipeline
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.pipeline_status import PipelineStatus
from mlora_operator.local.fits import FitStore, LearnedPipeline, beside_models, local_origin, recall, remember
from mlora_operator.local.machine import Machine
from mlora_operator.local.objects import LocalObjects
from mlora_operator.memory.fit import Coefficients, FittedLine, StageFit
from mlora_operator.memory.learned import to_status
from mlora_operator.reconcile.state.snapshot import Key
from tests.fixtures.toy_facts import toy_stages

MACHINE = Machine(cpus=2, memory_bytes=2**30)
LINE = FittedLine(Coefficients(b1=1234.0), 0.02)
FIT = StageFit(LINE, LINE, LINE, samples=20, widest=512)
SPEC = {"model": {"name": "m", "uri": "file:///models/m"}, "stages": 2}
KEY = Key("default", "p")


def status_of(origin: str, fit: StageFit = FIT) -> PipelineStatus:
    return PipelineStatus(memory=to_status({0: fit, 1: fit}, origin), stages=toy_stages(layers=4))


def a_run(folder: Path, spec: dict[str, object]) -> LocalObjects:
    objects = LocalObjects(folder, lambda: datetime.now(UTC))
    meta = {"namespace": KEY.namespace, "name": KEY.name}
    objects.apply({"apiVersion": API_VERSION, "kind": lorapipeline.KIND, "metadata": meta, "spec": spec})
    return objects


def test_the_next_run_of_the_same_pipeline_begins_with_what_the_former_has_learned(tmp_path: Path) -> None:
    fits = beside_models(tmp_path / "mlora" / "models")
    origin = local_origin(LoRAPipelineSpec.model_validate(SPEC), MACHINE, "auto")
    remember(status_of(origin), fits)
    cases = {
        "same": (SPEC, "cpu", True),
        "wider": ({**SPEC, "microbatchTokens": 64}, "auto", True),
        "cut": ({**SPEC, "stages": 3}, "cpu", False),
        "gpu": (SPEC, "cuda", False),
    }
    for name, (spec, device, known) in cases.items():
        objects = a_run(tmp_path / name, spec)
        recall(objects, KEY, fits, MACHINE, device)
        [raw] = objects.of_kind(lorapipeline.KIND)
        status = PipelineStatus.model_validate(raw.get("status", {}))
        assert LearnedPipeline(memory=status.memory).fits == ({0: FIT, 1: FIT} if known else {}), name


def test_what_was_learned_in_this_run_stays(tmp_path: Path) -> None:
    fits = FitStore(tmp_path)
    origin = local_origin(LoRAPipelineSpec.model_validate(SPEC), MACHINE, "cpu")
    remember(status_of(origin), fits)
    objects = a_run(tmp_path / "run", SPEC)
    [raw] = objects.of_kind(lorapipeline.KIND)
    now = status_of(origin, replace(FIT, samples=30)).model_dump(mode="json", by_alias=True)
    objects.patch_status(lorapipeline.KIND, KEY, raw["metadata"]["uid"], {"memory": now["memory"]})
    recall(objects, KEY, fits, MACHINE, "cpu")
    [raw] = objects.of_kind(lorapipeline.KIND)
    assert [one["samples"] for one in raw["status"]["memory"]] == [30, 30]


def test_what_was_not_measured_or_cannot_be_read_is_nothing(tmp_path: Path) -> None:
    fits = FitStore(tmp_path)
    remember(status_of("prior", replace(FIT, samples=0)), fits)
    assert fits.read("prior") == LearnedPipeline()
    (tmp_path / "broken.json").write_text("{")
    assert fits.read("broken") == LearnedPipeline()
    remember(status_of("one"), fits)
    (tmp_path / "one.json").rename(tmp_path / "other.json")
    assert fits.read("other") == LearnedPipeline(), "the file's name is not what was learned from"
    remember(status_of("one"), FitStore(tmp_path / "other.json"))  # no folder: a warning, no error
