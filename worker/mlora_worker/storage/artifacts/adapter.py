"""The finished adapter in PEFT's layout: its configuration, the checks before it leaves, and publishing.

An adapter exists when its manifest does. Order of writing: a mark says whose upload it is, the old manifest goes, then come
weights, configuration and model card, and the new manifest last; the mark goes behind it. A reader that starts from the
manifest never sees half an adapter, whenever the writer is killed.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlora_worker.protocol import (
    MANIFEST_NAME,
    AdapterDtype,
    AdapterInfo,
    AdapterManifest,
    AdapterType,
    DataCounts,
    EvaluationRecord,
    FailureReason,
    InitialWeights,
    LoRAConfig,
    ManifestFile,
    ModelSource,
    TaskPlan,
    is_parameter,
)
from mlora_worker.storage.artifacts.existing_output import check_free, remove_mark, set_mark
from mlora_worker.storage.artifacts.model_card import model_card
from mlora_worker.storage.errors import ObjectNotFound, StorageError
from mlora_worker.storage.limits import DOCUMENT
from mlora_worker.storage.object_store.scratch import save_tensors, sha256_of
from mlora_worker.storage.object_store.store import Store
from mlora_worker.storage.uri import join
from mlora_worker.storage.versioned_json import read_document, version_of

VERSION = 1  # of manifests that this worker writes; those of later ones stay untouched
WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
CARD_NAME = "README.md"
HISTORY_NAME = "history.jsonl"
TEMPLATE_NAME = "chat_template.jinja"  # as transformers names it

_NAMED_OFFENDERS = 5
_MOST_FILES = 64  # of an adapter


class InvalidAdapter(Exception):
    """The tensors are no adapter that anybody could use; names the first that are wrong."""

    reason = FailureReason.INVALID_ADAPTER


def adapter_config(
    lora: LoRAConfig,
    base_model: str,
    revision: str | None,
    target_modules: Sequence[str],
    *,
    fan_in_fan_out: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """PEFT's adapter_config.json. ``base_model`` is what the user wrote, never a path in a pod;
    ``target_modules`` are resolved module names or paths, never ``all-linear`` or patterns, so nothing is left to exclude.
    Those that are parameters (``is_parameter``) become ``target_parameters``, which PEFT 0.17 and later know.
    ``fan_in_fan_out``: the base has its weights transposed (GPT-2). ``seed``: what VeRA's random matrices follow from.

    PEFT refuses a file with a field that its version does not know. So what came after 0.5 stands there only where it is
    not at its default: such an adapter needs that version anyway.
    """
    if not base_model.strip() or not target_modules:
        raise ValueError("the configuration of an adapter needs a base model and target modules")
    parameters = sorted({name for name in target_modules if is_parameter(name)})
    every = {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "revision": revision,
        "inference_mode": True,
        "r": lora.rank,
        "target_modules": sorted({*target_modules} - {*parameters}),
        "bias": "none",
        "fan_in_fan_out": fan_in_fan_out,
        "modules_to_save": None,
        "layers_to_transform": None,
        "layers_pattern": None,
    }
    if lora.type is AdapterType.VERA:
        return every | {
            "peft_type": "VERA",
            "projection_prng_key": seed,
            "save_projection": True,
            "vera_dropout": lora.dropout,
            "d_initial": lora.vera_start,
            "init_weights": True,
        }
    config = every | {
        "peft_type": "LORA",
        # Serving engines read alpha as an integer.
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": lora.dropout,
        "init_lora_weights": True
        if lora.init_lora_weights is InitialWeights.DEFAULT
        else lora.init_lora_weights.value,
    }
    newer = {
        "target_parameters": parameters,
        "rank_pattern": dict(sorted(lora.rank_pattern.items())),
        "alpha_pattern": {key: _number(alpha) for key, alpha in sorted(lora.alpha_pattern.items())},
        "use_rslora": lora.use_rslora,
        "use_dora": lora.use_dora,
    }
    return config | {name: value for name, value in newer.items() if value}


def same_config(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations say the same: what is empty, or false, may be left out."""
    return {key: value for key, value in one.items() if value} == {
        key: value for key, value in other.items() if value
    }


def named_base(task: TaskPlan, source: ModelSource) -> tuple[str, str | None]:
    """Name and revision of the base for the configuration. Another name that the user gives is of another repository, so
    the pipeline's revision does not go with it.
    """
    if task.base_model_name is not None:
        return task.base_model_name, None
    return source.name, source.revision


def as_written(tensors: Mapping[str, Tensor], dtype: AdapterDtype) -> dict[str, Tensor]:
    """The weights in the type of the file. What was finite may overflow in float16, and what was small may become zero:
    ``check_adapter`` is for these.
    """
    return {name: tensor.to(getattr(torch, dtype.value)) for name, tensor in tensors.items()}


def _number(alpha: float) -> int | float:
    return int(alpha) if float(alpha).is_integer() else alpha


_NEVER_LEARNT = (
    "a module whose tensor is all zero has learned nothing: it had no gradient at any step (rows of one or two tokens "
    "leave nothing to attention), the learning rate was 0 (as in a warm-up's first step), or its changes are too small "
    "for output.dtype. Look at the lengths of the rows (mlora validate --data), do more steps, leave the module out of "
    "lora.targetModules, or set output.dtype to float32"
)


def check_adapter(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raises InvalidAdapter unless the names and shapes are exactly ``expected``, every value is finite, and no lora_B
    is all zero (an all-zero B is a module that never learnt).
    """
    wanted, found = set(expected), set(tensors)
    flaws = {
        "missing": sorted(wanted - found),
        "unexpected": sorted(found - wanted),
        "of another shape": sorted(
            name for name in found & wanted if tuple(tensors[name].shape) != tuple(expected[name])
        ),
        "not finite": sorted(name for name in tensors if not bool(torch.isfinite(tensors[name]).all())),
        "all zero": sorted(
            name
            for name in tensors
            if ("lora_B" in name or "vera_lambda_b" in name) and not bool(tensors[name].any())
        ),
    }
    problems = [
        f"{len(names)} of {len(wanted)} tensors {flaw}: {_first(names)}"
        for flaw, names in flaws.items()
        if names
    ]
    if flaws["all zero"]:
        problems.append(_NEVER_LEARNT)
    if problems or not wanted:
        raise InvalidAdapter(
            "the adapter is invalid and was not published: " + ("; ".join(problems) or "it has no tensors")
        )


@dataclass(frozen=True, slots=True)
class FinishedAdapter:
    """All that is published of a task that has done its steps. ``step`` and ``evaluation`` are those of ``tensors``,
    ``loss`` that of the last training step. ``history``: the losses' file, empty when there is none. ``quantization``: of
    the base that it was trained on. ``base_type``: the base's ``model_type``, where servers of the adapter need it.
    """

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]
    step: int
    loss: float | None
    data: DataCounts | None
    evaluation: EvaluationRecord | None = None
    history: bytes = b""
    quantization: str | None = None
    base_type: str | None = None


def save_weights(tensors: Mapping[str, Tensor], folder: Path) -> Path:
    """The weights' file in ``folder``. Raises StorageError where there is no room for it."""
    return save_tensors(tensors, folder / WEIGHTS_NAME, "adapter")


def publish_adapter(
    store: Store,
    output_uri: str,
    weights: Path,
    config: Mapping[str, Any],
    *,
    task: TaskPlan,
    step: int,
    loss: float | None,
    data: DataCounts | None,
    evaluation: EvaluationRecord | None = None,
    history: bytes = b"",
    quantization: str | None = None,
    base_type: str | None = None,
) -> AdapterInfo:
    """Writes a checked adapter below ``output_uri``. Raises StorageError; may be called again after one.

    ``weights`` is its tensors' file, by ``save_weights``. The others are as in ``FinishedAdapter``. The returned size and
    SHA-256 are those of the weights' file.

    What lies there whole already, of this task and with these weights, stays: the store has written the manifest and its
    answer was lost. To begin anew would take back what others may have seen. Raises OutputExists for what others have
    brought there while the task trained.
    """
    files = [ManifestFile(name=WEIGHTS_NAME, bytes=weights.stat().st_size, sha256=sha256_of(weights))]
    present = find_published(store, output_uri)
    if present is not None and present.fingerprint == fingerprint(task) and files[0] in present.files:
        remove_mark(store, output_uri)
        return published_info(output_uri, present)
    check_free(store, output_uri, task)
    loss = loss if loss is not None and math.isfinite(loss) else None
    set_mark(store, output_uri, task)
    store.delete(join(output_uri, MANIFEST_NAME))
    store.write_file(join(output_uri, WEIGHTS_NAME), weights)
    card = model_card(
        task=task,
        config=config,
        step=step,
        loss=loss,
        data=data,
        evaluation=evaluation,
        quantization=quantization,
    )
    for name, content in (
        (CONFIG_NAME, (json.dumps(dict(config), indent=2, allow_nan=False) + "\n").encode()),
        (CARD_NAME, card.encode()),
        (TEMPLATE_NAME, (task.chat_template or "").encode()),
        (HISTORY_NAME, history),
    ):
        if not content:  # a task that has none; what a former adapter had there would be taken for its own
            store.delete(join(output_uri, name))
            continue
        files.append(ManifestFile(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest()))
        store.write(join(output_uri, name), content)
    manifest = AdapterManifest(
        task_uid=task.uid,
        namespace=task.namespace,
        name=task.name,
        fingerprint=fingerprint(task),
        base_model=task.base_model,
        step=step,
        loss=loss,
        evaluation=evaluation,
        files=tuple(files),
        quantization=quantization,
        base_model_type=base_type,
    )
    store.write(join(output_uri, MANIFEST_NAME), written_manifest(manifest))
    remove_mark(store, output_uri)
    return published_info(output_uri, manifest)


def written_manifest(manifest: AdapterManifest) -> bytes:
    """Without what says nothing, so that former versions, which do not know it, read the others."""
    unsaid = {name for name in ("quantization", "base_model_type") if getattr(manifest, name) is None}
    return manifest.model_dump_json(by_alias=True, indent=2, exclude=unsaid).encode()


def find_published(store: Store, output_uri: str) -> AdapterManifest | None:
    """The manifest of a complete adapter; None when there is none, or when a file that it lists is gone or
    has another size. Whose adapter it is, its ``fingerprint`` tells. Raises StorageError, also for a manifest of a version
    that is not known here: nobody may take that for nothing, and write over it.
    """
    place = join(output_uri, MANIFEST_NAME)
    try:
        data = store.read(place, DOCUMENT)
        version = version_of(data)
        if isinstance(version, int) and version > VERSION:
            raise StorageError(
                FailureReason.INVALID_SPEC,
                f"{place} has format version {version}, this worker supports {VERSION}: use the worker version that "
                f"wrote it, or another address",
            )
        manifest = read_document(AdapterManifest, data)
        there = _may_be_whole(manifest) and all(
            store.size(join(output_uri, file.name)) == file.bytes for file in manifest.files
        )
    except (ObjectNotFound, ValueError):
        return None
    return manifest if there else None


def _may_be_whole(manifest: AdapterManifest) -> bool:
    """Whether it lists what an adapter has, and no more than can be asked for."""
    names = [file.name for file in manifest.files]
    return len(names) == len(set(names)) <= _MOST_FILES and WEIGHTS_NAME in names


def published_info(output_uri: str, manifest: AdapterManifest) -> AdapterInfo:
    """What a report says of a published adapter. Raises ValueError for a manifest that lists no weights."""
    for file in manifest.files:
        if file.name == WEIGHTS_NAME:
            return AdapterInfo(uri=output_uri, sha256=file.sha256, bytes=file.bytes)
    raise ValueError(f"the manifest below {output_uri} lists no {WEIGHTS_NAME}")


def fingerprint(task: TaskPlan) -> str:
    """SHA-256 of a task's uid and of all that decides its result: neither its keys nor its place in the queue.

    What stands at its default is left out, so that an upgrade which brings new fields finds what was published before. Of a
    plan that is without its rows now, it is what it was with them.
    """
    if task.known_fingerprint is not None:
        return task.known_fingerprint
    lasting = task.model_dump(
        mode="json",
        by_alias=True,
        exclude={
            "storage",
            "output_overwrite",
            "priority",
            "admitted",
            "started",
            "generation",
            "dataset_digest",
            "template_digest",
        },
        exclude_defaults=True,
    )
    return hashlib.sha256(json.dumps(lasting, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _first(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMED_OFFENDERS])
    return shown + (", ..." if len(names) > _NAMED_OFFENDERS else "")
