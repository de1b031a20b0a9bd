"""What the worker refuses about a model or the modules to adapt.

``ModelError``               base: has the reason that goes into the Failed condition, and says what to do
├── ``UnsupportedModel``     the architecture, or an option of it, is not known to be computed right
├── ``IncompleteModel``      tensors are missing in the files, or have not the shape that config.json says
├── ``TooManyStages``        more stages than decoder layers
├── ``UnknownTargetModule``  an entry of targetModules names no linear module of the decoder layers
└── ``InvalidTarget``        targetModules or rank do not fit the model in another way
"""

from __future__ import annotations

from mlora_worker.protocol import FailureReason


class ModelError(ValueError):
    reason = FailureReason.INVALID_SPEC


class UnsupportedModel(ModelError): ...


class IncompleteModel(ModelError): ...


class TooManyStages(ModelError): ...


class UnknownTargetModule(ModelError):
    reason = FailureReason.UNKNOWN_TARGET_MODULE


class InvalidTarget(ModelError): ...
