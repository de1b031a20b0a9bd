"""Checkpoints that come quantised: which forms are known, and the weights that their tensors make.

A form is what ``quantization_config`` of config.json says. Matrices stay as they were published; none is rounded again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mlora_worker.frozen.four_bits import FourBitWeight, four_bit_bytes, stored_four_bits
from mlora_worker.frozen.fp8 import BlockFp8Weight, block_fp8_bytes, scales_of
from mlora_worker.frozen.int8 import Int8Weight, int8_bytes
from mlora_worker.frozen.mxfp4 import MXFP4_BLOCK, Mxfp4Weight, mxfp4_bytes
from mlora_worker.model.errors import IncompleteModel, UnsupportedModel

_INSTEAD = (
    "use the checkpoint with plain float weights, with model.quantization nf4 or int8 if memory is short"
)
_REFUSED = {
    "gptq": "its 4-bit matrices are in an order that only its own kernels read",
    "awq": "its 4-bit matrices are in an order that only its own kernels read",
    "compressed-tensors": "its many formats have not been compared",
}
_LARGEST_INT8 = 127


class Tensors(Protocol):
    """Those of the checkpoint. Raises IncompleteModel for one that is not there or has another shape."""

    def names(self) -> Collection[str]: ...
    def stored(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor: ...


class StoredForm(Protocol):
    """One way in which files have their matrices."""

    @property
    def name(self) -> str: ...

    @property
    def beside(self) -> tuple[str, ...]:
        """How names of tensors end that belong to a weight: the rest of the name is the weight's, or its module's."""
        ...

    @property
    def needs_library(self) -> bool: ...

    @property
    def experts_only(self) -> bool:
        """Whether linear modules are plain, and stacked experts alone are packed."""
        ...

    def bytes_of(self, outputs: int, inputs: int) -> int: ...

    def weight(
        self, tensors: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> FourBitWeight | Int8Weight | BlockFp8Weight | None:
        """The tensor ``name``, which is there; None: it is a plain one."""
        ...


@dataclass(frozen=True, slots=True)
class FourBits:
    """bitsandbytes, ``load_in_4bit``."""

    double: bool
    name: str = "bitsandbytes, 4 bits"
    needs_library: bool = True
    experts_only: bool = False

    @property
    def beside(self) -> tuple[str, ...]:
        kinds = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        return *(f".{kind}" for kind in kinds), *(
            f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")
        )

    def bytes_of(self, outputs: int, inputs: int) -> int:
        return four_bit_bytes(outputs, inputs, double=self.double)

    def weight(
        self, tensors: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> FourBitWeight | None:
        there = tensors.names()
        state = {
            end.removeprefix("."): tensors.stored(name + end) for end in self.beside if name + end in there
        }
        if not state:
            return None
        try:
            found = stored_four_bits(tensors.stored(name), state, dtype, device)
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise IncompleteModel(
                f"tensor {name} has no usable 4-bit state in the model's files: {error}"
            ) from None
        if found.shape != shape:
            raise IncompleteModel(
                f"tensor {name} has shape {list(found.shape)} in the model's files, but config.json says {list(shape)}"
            )
        return found


@dataclass(frozen=True, slots=True)
class EightBits:
    """bitsandbytes, ``load_in_8bit``: a scale for each output."""

    name: str = "bitsandbytes, 8 bits"
    needs_library: bool = False
    experts_only: bool = False
    beside: tuple[str, ...] = (".SCB", ".weight_format")

    def bytes_of(self, outputs: int, inputs: int) -> int:
        return int8_bytes(outputs, inputs)

    def weight(
        self, tensors: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> Int8Weight | None:
        largest = f"{name.removesuffix('.weight')}.SCB"
        if largest not in tensors.names():
            return None
        numbers = _of_type(tensors.stored(name, shape), torch.int8, name)
        scales = tensors.stored(largest, shape[:1]).float() / _LARGEST_INT8
        return Int8Weight(own_copy(numbers, device), scales.to(device), dtype)


@dataclass(frozen=True, slots=True)
class Fp8:
    """``fp8`` with a scale for each block, as Qwen3 and DeepSeek-V3 are published, or, where ``block`` is None, with one
    for each output or for the whole matrix: that is kept as one for each output, too."""

    block: tuple[int, int] | None
    name: str = "fp8"
    needs_library: bool = False
    experts_only: bool = False
    beside: tuple[str, ...] = (".weight_scale_inv", ".input_scale", ".activation_scale")

    def bytes_of(self, outputs: int, inputs: int) -> int:
        return block_fp8_bytes(outputs, inputs, self._block(inputs))

    def weight(
        self, tensors: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device
    ) -> BlockFp8Weight | None:
        scale = f"{name}_scale_inv"
        if scale not in tensors.names():
            return None
        numbers = _of_type(tensors.stored(name, shape), torch.float8_e4m3fn, name)
        block = self._block(shape[1])
        grid = scales_of(shape, block)
        found = tensors.stored(scale, None if self.block is None else grid)
        if self.block is None and tuple(found.shape) in ((), (1,), (1, 1), grid[:1]):
            found = found.reshape(-1, 1).expand(grid)
        if tuple(found.shape) != grid or not found.is_floating_point():
            raise IncompleteModel(
                f"tensor {scale} is of type {str(found.dtype).removeprefix('torch.')} and shape {list(found.shape)} in the "
                f"model's files, but must be floats, one for each of {shape[0]} outputs or one for all"
            )
        return BlockFp8Weight(own_copy(numbers, device), own_copy(found.float(), device), block, dtype)

    def _block(self, inputs: int) -> tuple[int, int]:
        return (1, inputs) if self.block is None else self.block


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """gpt-oss: the experts' stacks alone, each matrix by rows of its outputs."""

    name: str = "mxfp4"
    needs_library: bool = False
    experts_only: bool = True
    beside: tuple[str, ...] = ("_blocks", "_scales")

    def bytes_of(self, outputs: int, inputs: int) -> int:
        return mxfp4_bytes(outputs, inputs)

    def weight(self, *_: object) -> None:
        return None

    def stack(
        self,
        tensors: Tensors,
        name: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Callable[[int, slice], Mxfp4Weight]:
        """Of the tensor ``name``, [experts, out, in], which is packed: what gives some rows of one expert."""
        experts, outputs, inputs = shape
        if inputs % MXFP4_BLOCK:
            raise IncompleteModel(
                f"tensor {name} cannot be in blocks: config.json gives it rows of {inputs} numbers"
            )
        count = inputs // MXFP4_BLOCK
        blocks = tensors.stored(f"{name}_blocks", (experts, outputs, count, MXFP4_BLOCK // 2))
        scales = tensors.stored(f"{name}_scales", (experts, outputs, count))
        for part in (blocks, scales):
            _of_type(part, torch.uint8, name)
        return lambda expert, rows: Mxfp4Weight(
            own_copy(blocks[expert, rows], device), own_copy(scales[expert, rows], device), dtype
        )


def form_of(quantization_config: object) -> StoredForm | None:
    """What config.json says. Raises UnsupportedModel for a form that is not known, with the way out."""
    if quantization_config is None:
        return None
    if hasattr(quantization_config, "to_dict"):
        quantization_config = quantization_config.to_dict()
    if not isinstance(quantization_config, Mapping):
        raise UnsupportedModel("quantization_config in config.json of the base model is not a mapping")
    said: Mapping[str, Any] = quantization_config
    method = str(said.get("quant_method") or ("bitsandbytes" if _is_bitsandbytes(said) else "without a name"))
    known = _KNOWN.get(method)
    if known is None:
        why = _REFUSED.get(method, "it has not been compared")
        raise UnsupportedModel(f"the base model is quantised ({method}), and {why}: {_INSTEAD}")
    return known(said)


def skipped(quantization_config: object) -> tuple[str, ...]:
    """Modules that stayed plain, as config.json names them."""
    said = quantization_config if isinstance(quantization_config, Mapping) else {}
    names = said.get("modules_to_not_convert") or said.get("llm_int8_skip_modules") or ()
    return tuple(name for name in names if isinstance(name, str))


def is_skipped(path: str, names: Collection[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") or path.endswith(f".{name}") for name in names)


def _bitsandbytes(said: Mapping[str, Any]) -> StoredForm:
    if said.get("load_in_4bit") or said.get("_load_in_4bit"):
        return FourBits(bool(said.get("bnb_4bit_use_double_quant", False)))
    return EightBits()


def _fp8(said: Mapping[str, Any]) -> StoredForm:
    block = said.get("weight_block_size")
    if block is None:
        return Fp8(None)
    if not (
        isinstance(block, list | tuple)
        and len(block) == 2
        and all(isinstance(n, int) and n > 0 for n in block)
    ):
        raise UnsupportedModel(
            f"the base model is quantised (fp8) with weight_block_size {block!r}, which must be two positive numbers or "
            f"nothing: {_INSTEAD}"
        )
    return Fp8((block[0], block[1]))


_KNOWN: Mapping[str, Callable[[Mapping[str, Any]], StoredForm]] = {
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "mxfp4": lambda _: Mxfp4(),
}


def _is_bitsandbytes(said: Mapping[str, Any]) -> bool:
    return bool(said.get("load_in_4bit") or said.get("load_in_8bit"))


def _of_type(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if tensor.dtype != dtype:
        raise IncompleteModel(
            f"tensor {name} is of type {str(tensor.dtype).removeprefix('torch.')} in the model's files, "
            f"but quantization_config in config.json means {str(dtype).removeprefix('torch.')}"
        )
    return tensor


def own_copy(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A copy of our own: a view of a mapped file may be badly aligned, and changes when the file does. ``dtype``: another
    than that of ``tensor``."""
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device=device).copy_(tensor)
