"""The base of all that crosses a process border, and the version of what is said. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
)
from pydantic.alias_generators import to_camel

from mlora_worker import addresses

PROTOCOL_VERSION = 1
# 2: TaskReport.crowded_out and released; 3: Report.lacks, DataCounts.special_tokens; 4: FailureReason.OUTPUT_EXISTS
# 5: Report.held; 6: DataCounts.first_dropped_in; 7: StageReport.parameters, products, quantized
# 8: DataCounts.format, TaskReport.preference, EvaluationRecord.preference; 9: ModelFacts.experts
# 10: PreferenceRecord.kl and what it may leave out, DatasetFormat.UNPAIRED_PREFERENCE
# 11: ExpertShape.path; 12: ExpertShape.swapped; 13: StageReport.recurrence; 14: ModelFacts.borders, never_adapted
# 15: ModelFacts.states, MemorySample.expert_rows
REPORT_HEADER, REPORT_FORMAT = "X-MLoRA-Report", 15


class Message(BaseModel):
    """Base of all that crosses a process border: frozen, camelCase, unknown fields refused, NaN never valid."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_none=True)


# Names of Kubernetes objects: whatever becomes part of a request is one, so that no text of a user is ever a path.
DNS_NAME = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
CONFIG_KEY = r"^[-._a-zA-Z0-9]+$"
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_NAME)]
ConfigKey = Annotated[str, Field(min_length=1, max_length=253, pattern=CONFIG_KEY)]


DatasetUri = Annotated[
    str, Field(max_length=1024, pattern=addresses.DATA), AfterValidator(addresses.checked_data)
]
FolderUri = Annotated[
    str, Field(max_length=1024, pattern=addresses.FOLDER), AfterValidator(addresses.checked_folder)
]
ModelUri = Annotated[
    str, Field(max_length=1024, pattern=addresses.MODEL), AfterValidator(addresses.checked_model)
]
EndpointUrl = Annotated[
    str, Field(max_length=512, pattern=addresses.ENDPOINT), AfterValidator(addresses.checked_endpoint)
]
