"""How the frozen matrices of a base are kept (part of the LoRAPipeline spec). Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mlora_worker.protocol.message import Message

QuantizationType = Literal["none", "nf4", "int8"]


class Quantization(Message):
    """Of the linear modules of the decoder layers. The embedding, the head and norms stay in the base's dtype."""

    type: QuantizationType = Field(
        default="none",
        description="none: as dtype says. nf4: 4 bits a weight, in blocks of 64 (QLoRA). int8: 8 bits a weight, with a "
        "scale for each output.",
    )
    double_quantization: Annotated[bool, Field(strict=True)] = Field(
        default=True, description="nf4: quantize the scales of the blocks, too."
    )

    @property
    def label(self) -> str:
        """A short name; equal for what gives equal weights."""
        return f"{self.type}, double" if self.type == "nf4" and self.double_quantization else self.type
