"""What a fit of a pipeline's memory was made of: as long as that is the same, the fit goes on. Pure.

Part of it is what decides how many bytes a microbatch of a given shape takes: the weights and their type, the cut into
stages, recomputation, and what computes: the worker's image and environment (kernels, allocator), and whether that is a CPU
or a GPU. The width of microbatches, the budget, threads, nodes and all that is about scheduling change which shapes there
are, or who looks after them, and not what a shape takes.

The image that the operator gives to pipelines which name none is no part of it, since not everybody who asks knows it:
it stands beside (``LearnedMemory.image``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_worker.protocol import StageReport

_LENGTH = 12  # hexadecimal digits


def origin_of(spec: LoRAPipelineSpec, stages: Sequence[StageReport]) -> str:
    """A short name of it; equal for equal origins. ``stages``: as the workers have told them."""
    return named_origin(spec, (stage.device for stage in stages))


def named_origin(spec: LoRAPipelineSpec, devices: Iterable[str]) -> str:
    """The same before any worker has told. ``devices``: of the stages, such as cpu, cuda, cuda:0."""
    model, worker = spec.model, spec.worker
    weights = [model.uri, model.revision, model.dtype]
    if model.quantization.type != "none":
        weights.append(model.quantization.label)
    made_of = [
        weights,
        spec.stages,
        spec.recompute_activations,
        [worker.image, worker.env],
        sorted({device.partition(":")[0] for device in devices}),
    ]
    return hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()[:_LENGTH]
