"""Quantities, durations, networks and labels, as manifests have them. Pure."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from mlora_operator.api.rules import NETWORK


def _network(text: str) -> str:
    """The network that an address with a prefix lies in, as people write it: 10.0.0.1/8 is 10.0.0.0/8."""
    try:
        return str(ip_network(text, strict=False))
    except ValueError as error:
        raise ValueError(f"{text!r} is not a network such as 10.0.0.0/8: {error}") from error


def _as_text(value: object) -> object:
    """A quantity without a unit may be written as a number, as everywhere in Kubernetes."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


_INT_OR_STRING = Field(json_schema_extra={"x-kubernetes-int-or-string": True})
Quantity = Annotated[
    str,
    Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"),
    BeforeValidator(_as_text),
    _INT_OR_STRING,
]
# Less than a byte is none; the m of 500m is a thousandth, and stands where M was meant.
Size = Annotated[
    str,
    Field(max_length=32, pattern=r"^([1-9][0-9]*(\.[0-9]+)?|0\.[0-9]+)(k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$"),
    BeforeValidator(_as_text),
    _INT_OR_STRING,
]
Duration = Annotated[str, Field(max_length=32, pattern=r"^([0-9]+(\.[0-9]+)?(ms|s|m|h))+$")]
Weight = Annotated[float, Field(strict=True, ge=0.001, le=1000)]
Network = Annotated[str, Field(max_length=64, pattern=NETWORK), AfterValidator(_network)]
LabelValue = Annotated[str, Field(max_length=63)]
LabelKey = Annotated[str, Field(max_length=317)]  # prefix/name
AnnotationValue = Annotated[str, Field(max_length=4096)]
NamespaceName = Annotated[str, Field(max_length=253)]
