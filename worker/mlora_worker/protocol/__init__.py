"""What the operator and a pipeline's coordinator say to each other; the one door between the two houses.

``PUT /v1/plan``    a ``Plan``: the operator's whole wish for this pipeline. Idempotent; an older generation is ignored.
``GET /v1/report``  a ``Report``: the whole truth about this pipeline. ``?after=SEQUENCE&wait=SECONDS`` long-polls.
                    ``X-MLoRA-Report: N``: the format that the asker understands (``as_understood_by``); without it, 1.
``PUT /v1/texts/SHA256``  rows or a chat template of a ConfigMap that a plan names by digest and the report ``lacks``.
``GET /v1/timeline``  what every stage did lately: a ``Timeline`` (stream/timeline.py). ``?microbatches=N``: the newest.
``GET /healthz``    200 while the coordinator's threads live; needs no token.

All other bodies are JSON with camelCase names. Every request but ``/healthz`` carries ``Authorization: Bearer <token>``.
The user-facing parts (``DatasetSpec``, ``LoRASpec``, ``TrainingSpec``) are the very types that the LoRATask CRD is made
from, so a value that the API server accepted means the same in the worker. A plan says them as ``Dataset``, ``LoRAConfig``
and ``Training``, which have defaults of their own: those of a spec may change, those of a plan may not. Numbers are strict:
``"1e-4"`` and ``true`` are not numbers.

Both read addresses with one parser (``addresses.py``) and apply one rule about networks, too: ``is_refused``; and one about
what may be shown: ``without_credentials``.

Every number, text and list in here has bounds (``bounds.py``); a test walks all types.

Its files:

``message``        The base of all that crosses a process border, and the version of what is said
``adapter_config`` The adapter that a user asks for, in PEFT's names (part of the LoRATask spec)
``dataset``        The rows that a user names (part of the LoRATask spec)
``row_shapes``     Which format rows have, as their keys tell
``training``       How a user's task is trained and evaluated (part of the LoRATask spec)
``objective``      What an adapter is trained for (part of the LoRATask spec)
``plan``           The plan: operator to coordinator
``quantization``   How the frozen matrices of a base are kept (part of the LoRAPipeline spec)
``model``          The shape of a base model, and its stages
``report``         The report: coordinator to operator
``worker_config``  How a rank is started
``questions``      What the operator's commands ask the worker's commands over its standard input
``manifest``       The manifest of a finished adapter, which is written last
``networks``       Addresses that only a worker can reach: the operator judges what is written, a worker what it is led to
``redaction``      What may be shown in logs, statuses and events

Who uses it imports from here, not from them. Pure: pydantic only.
"""

from __future__ import annotations

from mlora_worker.bounds import Amount, Count, Real
from mlora_worker.protocol.adapter_config import (
    DORA_WITH_DROPOUT,
    EXPERTS,
    NO_TARGETS,
    ODD_RANK,
    ONLY_VERA,
    OTHER_START,
    PARAMETERS_BY_LAYER,
    PLAIN_PARAMETERS,
    SERVED_RANKS,
    STACKED,
    STARTS,
    USUAL_ALPHA,
    VERA_ALONE,
    WEIGHT,
    AdapterDtype,
    AdapterType,
    Alpha,
    Entry,
    InitFrom,
    InitialWeights,
    LoRAConfig,
    LoRASpec,
    Rank,
    is_parameter,
)
from mlora_worker.protocol.dataset import (
    ColumnName,
    ConfigMapReference,
    Dataset,
    DatasetFields,
    DatasetFormat,
    DatasetSettings,
    DatasetSpec,
    FileFormat,
    TrainOn,
)
from mlora_worker.protocol.manifest import MANIFEST_NAME, AdapterManifest, ManifestFile
from mlora_worker.protocol.message import (
    CONFIG_KEY,
    DNS_NAME,
    PROTOCOL_VERSION,
    REPORT_FORMAT,
    REPORT_HEADER,
    ConfigKey,
    DatasetUri,
    EndpointUrl,
    FolderUri,
    Message,
    ModelUri,
    ObjectName,
)
from mlora_worker.protocol.model import (
    BorderShape,
    ExpertShape,
    ModelFacts,
    ModelSource,
    ModuleShape,
    StageReport,
    StateShape,
)
from mlora_worker.protocol.networks import METADATA_SERVICES, embedded_ipv4, is_refused
from mlora_worker.protocol.objective import (
    LOSSES_OF,
    OBJECTIVE_FLAWS,
    Objective,
    ObjectiveType,
    PreferenceLoss,
)
from mlora_worker.protocol.plan import (
    KMS_KEY,
    Addressing,
    Checksums,
    Encryption,
    KmsKeyId,
    Plan,
    StorageAccess,
    StoreKey,
    TaskPlan,
)
from mlora_worker.protocol.quantization import Quantization, QuantizationType
from mlora_worker.protocol.questions import (
    MOST_SHOWN,
    HistogramBar,
    LookAnswer,
    LookQuestion,
    MergeAnswer,
    MergeQuestion,
    RowSummary,
    ShownPart,
    StageShape,
    SurveyAnswer,
    SurveyQuestion,
    TaskAnswer,
    TaskQuestion,
)
from mlora_worker.protocol.redaction import indented, one_line, without_credentials, without_keys
from mlora_worker.protocol.report import (
    LONGEST_FILE,
    MOST_SAMPLES,
    AdapterInfo,
    DataCounts,
    EvaluationRecord,
    Failure,
    FailureReason,
    MemoryExhausted,
    MemorySample,
    PreferenceRecord,
    Report,
    StepRecord,
    TaskPhase,
    TaskReport,
    WireReport,
)
from mlora_worker.protocol.row_shapes import (
    FIRST_ROWS,
    ROW_SHAPES,
    SHAPE_OF,
    FormatNotDetected,
    NamedFormat,
    RowShape,
    detected_format,
    keys_of,
    truth_of,
)
from mlora_worker.protocol.training import (
    USUAL_SEQ_LENGTH,
    EarlyStopping,
    Evaluation,
    Optimizer,
    OptimizerType,
    Overlong,
    Schedule,
    Training,
    TrainingSettings,
    TrainingSpec,
)
from mlora_worker.protocol.worker_config import HUB_ENDPOINT, WorkerConfig

__all__ = [
    "CONFIG_KEY",
    "DNS_NAME",
    "DORA_WITH_DROPOUT",
    "EXPERTS",
    "FIRST_ROWS",
    "HUB_ENDPOINT",
    "KMS_KEY",
    "LONGEST_FILE",
    "LOSSES_OF",
    "MANIFEST_NAME",
    "METADATA_SERVICES",
    "MOST_SAMPLES",
    "MOST_SHOWN",
    "NO_TARGETS",
    "OBJECTIVE_FLAWS",
    "ODD_RANK",
    "ONLY_VERA",
    "OTHER_START",
    "PARAMETERS_BY_LAYER",
    "PLAIN_PARAMETERS",
    "PROTOCOL_VERSION",
    "REPORT_FORMAT",
    "REPORT_HEADER",
    "ROW_SHAPES",
    "SERVED_RANKS",
    "SHAPE_OF",
    "STACKED",
    "STARTS",
    "USUAL_ALPHA",
    "USUAL_SEQ_LENGTH",
    "VERA_ALONE",
    "WEIGHT",
    "AdapterDtype",
    "AdapterInfo",
    "AdapterManifest",
    "AdapterType",
    "Addressing",
    "Alpha",
    "Amount",
    "BorderShape",
    "Checksums",
    "ColumnName",
    "ConfigKey",
    "ConfigMapReference",
    "Count",
    "DataCounts",
    "Dataset",
    "DatasetFields",
    "DatasetFormat",
    "DatasetSettings",
    "DatasetSpec",
    "DatasetUri",
    "EarlyStopping",
    "Encryption",
    "EndpointUrl",
    "Entry",
    "Evaluation",
    "EvaluationRecord",
    "ExpertShape",
    "Failure",
    "FailureReason",
    "FileFormat",
    "FolderUri",
    "FormatNotDetected",
    "HistogramBar",
    "InitFrom",
    "InitialWeights",
    "KmsKeyId",
    "LoRAConfig",
    "LoRASpec",
    "LookAnswer",
    "LookQuestion",
    "ManifestFile",
    "MemoryExhausted",
    "MemorySample",
    "MergeAnswer",
    "MergeQuestion",
    "Message",
    "ModelFacts",
    "ModelSource",
    "ModelUri",
    "ModuleShape",
    "NamedFormat",
    "ObjectName",
    "Objective",
    "ObjectiveType",
    "Optimizer",
    "OptimizerType",
    "Overlong",
    "Plan",
    "PreferenceLoss",
    "PreferenceRecord",
    "Quantization",
    "QuantizationType",
    "Rank",
    "Real",
    "Report",
    "RowShape",
    "RowSummary",
    "Schedule",
    "ShownPart",
    "StageReport",
    "StageShape",
    "StateShape",
    "StepRecord",
    "StorageAccess",
    "StoreKey",
    "SurveyAnswer",
    "SurveyQuestion",
    "TaskAnswer",
    "TaskPhase",
    "TaskPlan",
    "TaskQuestion",
    "TaskReport",
    "TrainOn",
    "Training",
    "TrainingSettings",
    "TrainingSpec",
    "WireReport",
    "WorkerConfig",
    "detected_format",
    "embedded_ipv4",
    "indented",
    "is_parameter",
    "is_refused",
    "keys_of",
    "one_line",
    "truth_of",
    "without_credentials",
    "without_keys",
]
