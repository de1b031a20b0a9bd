"""How the matrices of a base are kept: as its pipeline asks, or as its checkpoint has them.

The linear modules of the decoder layers alone. The embedding is looked up by row, the head multiplies once a microbatch and
decides each token's probability, and norms are small: they stay plain, as in QLoRA.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PretrainedConfig

from mlora_worker.frozen.four_bits import available, four_bit_bytes, nf4
from mlora_worker.frozen.int8 import int8, int8_bytes
from mlora_worker.frozen.linear import Freeze
from mlora_worker.model.architecture import Linear
from mlora_worker.model.errors import UnsupportedModel
from mlora_worker.model.stored_forms import StoredForm, form_of, is_skipped, skipped
from mlora_worker.protocol import Quantization

Bytes = Callable[[Linear], int | None]


def freeze_of(quantization: Quantization) -> Freeze | None:
    """What makes a weight of a plain matrix; None: nothing does. Raises UnsupportedModel where its library is missing."""
    match quantization.type:
        case "nf4":
            need_library("model.quantization nf4")
            return partial(nf4, double=quantization.double_quantization)
        case "int8":
            return int8
        case _:
            return None


def need_library(what: str) -> None:
    """Raises UnsupportedModel."""
    if not available():
        raise UnsupportedModel(
            f"{what} needs bitsandbytes, which is not installed here: run pip install 'mlora-operator[quantised]', or "
            "use a worker image that has it"
        )


def stored_form(config: PretrainedConfig) -> StoredForm | None:
    """Raises UnsupportedModel."""
    return form_of(getattr(config, "quantization_config", None))


def packed_bytes(config: PretrainedConfig, quantization: Quantization | None) -> Bytes:
    """Of a linear module's weight, from the configuration alone; None: it stays plain. Raises UnsupportedModel."""
    form = stored_form(config)
    if form is not None:
        check_once(form, quantization)
        stay = skipped(config.quantization_config)
        return lambda one: (
            None
            if is_skipped(one.path, stay) or (form.experts_only and not one.of_expert)
            else form.bytes_of(one.out_features, one.in_features)
        )
    match quantization:
        case Quantization(type="nf4", double_quantization=double):
            return lambda one: four_bit_bytes(one.out_features, one.in_features, double=double)
        case Quantization(type="int8"):
            return lambda one: int8_bytes(one.out_features, one.in_features)
        case _:
            return lambda _: None


def check_once(form: StoredForm | None, quantization: Quantization | None) -> None:
    """Raises UnsupportedModel where both would round."""
    if form is not None and quantization is not None:
        raise UnsupportedModel(
            f"the base model is quantised already, and model.quantization {quantization.type} would round it again: "
            "remove model.quantization, or use the checkpoint with plain float weights"
        )
