"""Reads the tensors of a part of a model, each straight to its device and type."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mlora_worker.frozen.experts import SegmentTokens
from mlora_worker.frozen.linear import Freeze, FrozenLinear, freeze_linears
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.frozen.weight import FrozenWeight
from mlora_worker.model.errors import IncompleteModel, UnsupportedModel
from mlora_worker.model.experts import (
    ExpertNames,
    ExpertStack,
    MatrixReader,
    freeze_experts,
    is_of_experts,
    read_experts,
)
from mlora_worker.model.renamed import TensorSource
from mlora_worker.model.stored_forms import Mxfp4, StoredForm, own_copy
from mlora_worker.model.transposed import StoredTransposed

# Types of numbers that stand for themselves.
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Routed:
    """What a layer's experts are made of."""

    stack: ExpertStack
    names: ExpertNames
    segments: SegmentTokens


class TensorReader:
    """``root``: prefix of the decoder's tensors, which files of the bare decoder lack. ``form``: how matrices are
    stored; None: plain."""

    def __init__(
        self,
        source: TensorSource,
        root: str,
        dtype: torch.dtype,
        device: torch.device,
        form: StoredForm | None = None,
    ) -> None:
        self._source, self._root, self._dtype, self._device = source, root, dtype, device
        self._form, self._names = form, frozenset(source.names())
        self.plain_names = (
            self._names
            if form is None
            else frozenset(name for name in self._names if not name.endswith(form.beside))
        )

    def names(self) -> frozenset[str]:
        return self._names

    def has(self, *names: str | None) -> bool:
        return not self._names.isdisjoint(names)

    def read(
        self,
        name: str,
        shape: Sequence[int],
        other_name: str | None = None,
        *,
        transposed: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """``dtype``: another than the stage's."""
        wanted = tuple(reversed(shape)) if transposed else tuple(shape)
        found = self._plain(name, self._found(name, other_name), wanted)
        return own_copy(found.T if transposed else found, self._device, dtype or self._dtype)

    def _plain(
        self, name: str, stored_name: str, shape: tuple[int, ...], other: tuple[int, ...] | None = None
    ) -> Tensor:
        found = self.stored(stored_name, shape, other)
        if found.dtype not in _PLAIN:
            raise IncompleteModel(
                f"tensor {name} is of type {str(found.dtype).removeprefix('torch.')} in the model's files, but "
                "quantization_config in config.json says nothing of how it is quantised"
            )
        return found

    def stored(
        self, name: str, shape: tuple[int, ...] | None = None, other: tuple[int, ...] | None = None
    ) -> Tensor:
        """As the files have it. Raises IncompleteModel for another shape than one of these."""
        found = self._source.tensor(name)
        if shape is not None and tuple(found.shape) not in (shape, other):
            raise IncompleteModel(
                f"tensor {name} has shape {list(found.shape)} in the model's files, "
                f"but config.json says {list(shape)}"
            )
        return found

    def _found(self, name: str, other_name: str | None = None) -> str:
        """What the files call it."""
        known = (name, name.removeprefix(self._root), other_name)
        stored = next((one for one in known if one in self._names), None)
        if stored is None:
            raise IncompleteModel(f"the model's files have no tensor {name}, which its config.json requires")
        return stored

    def fill(
        self,
        model: PreTrainedModel,
        module: nn.Module,
        prefix: str,
        other_weight: str | None = None,
        freeze: Freeze = PlainWeight,
        routed: Routed | None = None,
        plain: str | None = None,
    ) -> None:
        """Replace the meta tensors of ``module``, a part of ``model``, by those of the source below ``prefix``, and its
        linear modules by frozen ones. ``other_weight``: what its weight may be stored as instead. ``routed``: its
        experts. ``plain``: beginning of paths whose linear modules stay as they are."""
        compute_buffers(model, module, self._device)
        names = None if routed is None else routed.names

        def stays(path: str) -> bool:
            kept = not path or (plain is not None and path.startswith(plain))
            return kept or (names is not None and names.is_of_router(path))

        linears = {
            name for name, one in module.named_modules() if isinstance(one, nn.Linear) and not stays(name)
        }
        state = {
            name: self.read(
                prefix + name,
                like.shape,
                other_weight if name == "weight" else prefix + names.stored(name) if names else None,
                dtype=like.dtype,  # a router may be wider than the rest
            )
            for name, like in module.state_dict().items()
            if name.rpartition(".")[0] not in linears and not is_of_experts(name, names)
        }
        module.load_state_dict(state, strict=False, assign=True)
        if routed is not None:
            parts = read_experts(routed.stack, routed.names, prefix, self._matrices(freeze))
            freeze_experts(module, routed.names, parts, routed.segments)
        freeze_linears(module, lambda path, linear: self._frozen(f"{prefix}{path}", linear, freeze), stays)
        module.requires_grad_(False)
        left = [
            name for name, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta
        ]
        if left:
            raise UnsupportedModel(
                f"{prefix}{left[0]} is a buffer that this worker does not know how to compute"
            )

    def _matrices(self, freeze: Freeze) -> MatrixReader:
        """For experts, whose names in files are known only to ``experts``."""

        def has(name: str) -> bool:
            return self.has(name, name.removeprefix(self._root))

        def stack(name: str, shape: tuple[int, ...]) -> Tensor:
            return self._plain(name, self._found(name), shape)

        def turned(name: str, shape: tuple[int, int, int]) -> Tensor:
            found = self._plain(name, self._found(name), shape, (shape[0], shape[2], shape[1]))
            return found if tuple(found.shape) == shape else found.transpose(1, 2)

        def packed(name: str, shape: tuple[int, int, int]) -> Callable[[int, slice], FrozenWeight] | None:
            if not isinstance(self._form, Mxfp4) or not has(f"{name}_blocks"):
                return None
            found = self._found(f"{name}_blocks").removesuffix("_blocks")
            return self._form.stack(self, found, shape, self._dtype, self._device)

        def own(part: Tensor) -> Tensor:
            return own_copy(part, self._device, self._dtype)

        return MatrixReader(
            has,
            lambda name, shape: self._weight(name, shape, freeze),
            stack,
            turned,
            packed,
            own,
            lambda part: freeze(own(part)),
        )

    def _weight(
        self, name: str, shape: tuple[int, int], freeze: Freeze, *, transposed: bool = False
    ) -> FrozenWeight:
        weight: FrozenWeight | None = None
        if self._form is not None and not transposed:
            weight = self._form.weight(self, self._found(name), shape, self._dtype, self._device)
        return freeze(self.read(name, shape, transposed=transposed)) if weight is None else weight

    def _frozen(self, path: str, linear: nn.Linear, freeze: Freeze) -> FrozenLinear:
        outputs, inputs = linear.weight.shape
        transposed = isinstance(linear, StoredTransposed)
        weight = self._weight(f"{path}.weight", (outputs, inputs), freeze, transposed=transposed)
        bias = None if linear.bias is None else self.read(f"{path}.bias", linear.bias.shape)
        return FrozenLinear(weight, bias)


def compute_buffers(model: PreTrainedModel, module: nn.Module, device: torch.device) -> None:
    """Buffers that no file has (a scale of the embedding) are set by the model's own initialisation, which does nothing to
    parameters while they are on the meta device. One that it leaves alone stays there."""
    for one in module.modules():
        stored = one.state_dict(keep_vars=True)
        made = {
            name: torch.full_like(buffer, torch.nan, device=device)
            for name, buffer in one.named_buffers(recurse=False)
            if name not in stored and buffer.is_meta and buffer.is_floating_point()
        }
        if not made:
            continue
        former = {name: one.get_buffer(name) for name in made}
        for name, buffer in made.items():
            one.register_buffer(name, buffer, persistent=False)
        model.base_model._init_weights(one)
        for name in made:
            if one.get_buffer(name).isnan().any():
                one.register_buffer(name, former[name], persistent=False)
