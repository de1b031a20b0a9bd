"""What runs on this machine have learned of their pipelines' memory, kept for the next run and for ``mlora plan``.

One file for each origin (``memory/origin.py``): the same weights in the same stages on the same kind of device. It is a
cache: what is not there, or cannot be read or written, is learned anew.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from mlora_operator.api import pipeline as lorapipeline
from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.pipeline_status import LearnedMemory, PipelineStatus
from mlora_operator.local.machine import Machine
from mlora_operator.local.objects import LocalObjects
from mlora_operator.memory.fit import StageFit
from mlora_operator.memory.learned import fits_of
from mlora_operator.memory.origin import named_origin
from mlora_operator.reconcile.ports import Gone
from mlora_operator.reconcile.state.snapshot import Key
from mlora_worker.protocol import StageReport

log = logging.getLogger(__name__)

FOLDER = "memory"  # beside that of the base models


class LearnedPipeline(BaseModel, frozen=True):
    """Of one pipeline: what was learned of its stages, and the stages as their workers told them."""

    memory: tuple[LearnedMemory, ...] = ()
    stages: tuple[StageReport, ...] = ()

    @property
    def fits(self) -> Mapping[int, StageFit]:
        return fits_of(self.memory)


@dataclass(frozen=True, slots=True)
class FitStore:
    folder: Path

    def read(self, origin: str) -> LearnedPipeline:
        try:
            known = LearnedPipeline.model_validate_json(self._path(origin).read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            return LearnedPipeline()
        return known if all(one.origin == origin for one in known.memory) else LearnedPipeline()

    def keep(self, known: LearnedPipeline) -> None:
        """Nothing where nothing was measured."""
        if not known.memory or not all(one.samples for one in known.memory):
            return
        path = self._path(known.memory[0].origin)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(".tmp")
            draft.write_text(known.model_dump_json(by_alias=True), encoding="utf-8")
            draft.replace(path)
        except OSError as error:
            log.warning("the learned memory model cannot be saved: %s", error)

    def _path(self, origin: str) -> Path:
        return self.folder / f"{origin}.json"


def beside_models(models: Path) -> FitStore:
    """``models``: folder of the downloaded base models."""
    return FitStore(models.parent / FOLDER)


def local_origin(spec: LoRAPipelineSpec, machine: Machine, device: str) -> str:
    """``device``: as the user wished it, which may be auto."""
    gpus = device == "cuda" or (device == "auto" and bool(machine.gpus))
    return named_origin(spec, ["cuda" if gpus else "cpu"])


def recall(objects: LocalObjects, key: Key, fits: FitStore, machine: Machine, device: str) -> None:
    """Give a pipeline that has learned nothing yet what a former run has."""
    raw = next(
        one
        for one in objects.of_kind(lorapipeline.KIND)
        if (one["metadata"]["namespace"], one["metadata"]["name"]) == (key.namespace, key.name)
    )
    if raw.get("status", {}).get("memory"):
        return
    known = fits.read(local_origin(LoRAPipelineSpec.model_validate(raw["spec"]), machine, device))
    if known.memory:
        patch = {"memory": _plain(known.memory)}
        try:
            objects.patch_status(lorapipeline.KIND, key, raw["metadata"]["uid"], patch)
        except Gone:
            return


def remember(status: PipelineStatus, fits: FitStore) -> None:
    fits.keep(LearnedPipeline(memory=status.memory, stages=status.stages))


def _plain(memory: Sequence[LearnedMemory]) -> list[object]:
    return [one.model_dump(mode="json", by_alias=True) for one in memory]
