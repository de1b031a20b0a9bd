"""Which kernels the layers with a state take on a GPU: those that compute what torch does row by row.

They are tried when a stage is loaded, on one module of each shape that the stage has, with random rows of one token to more
than two chunks. Outputs and gradients of each row have to equal those of the plain form, and each row alone has to give the
same bits as among the others. What fails is not taken, and the log says why. So no list of models, devices or versions is
kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from mlora_worker.model.attention import PackedRows
from mlora_worker.model.recurrent.looking_back import Kernels, LookingBack
from mlora_worker.runtime.kernel_compiler import Launch, launch, missing_for_triton

log = logging.getLogger(__name__)

TORCH, OWN = "torch", "Triton"
_TRIED_ROWS = (1, 66, 3, 130, 64)
# Of a row's norm, or of the usual row's where that is larger.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}


class Library(Protocol):
    """Scans over packed rows."""

    name: str

    def delta_rule(
        self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, rows: PackedRows
    ) -> Tensor: ...
    def scan(self, c: Tensor, b: Tensor, x: Tensor, decay: Tensor, rows: PackedRows) -> Tensor: ...


def choose_kernels(layers: nn.Module, device: torch.device) -> str | None:
    """Give the layers with a state below ``layers`` the kernels that hold; returns whose, and None without such layers."""
    if not any(True for _ in _looking_back(layers)):
        return None
    missing = missing_for_triton() if device.type == "cuda" else None
    if device.type != "cuda" or missing is not None:
        if missing is not None:
            log.warning("layers with a state take rows one by one in torch: %s", missing)
        return TORCH
    return take_kernels(layers, _installed, launch)


def take_kernels(layers: nn.Module, library: Callable[[], Library], launch: Launch) -> str:
    """``library``: raises ImportError where there is none. It is asked for only if there are scans."""
    from mlora_worker.model.recurrent.convolution import convolve

    def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, rows: PackedRows, silu: bool) -> Tensor:
        return convolve(x, weight, bias, rows, silu, launch)

    taken = Kernels(convolve=convolved)
    why = _fault(layers, taken)
    if why is not None:
        log.warning("layers with a state take rows one by one in torch: the convolution %s", why)
        taken = Kernels()
    name = TORCH if taken.convolve is None else OWN
    if any(one.scans for one in _looking_back(layers)):
        try:
            found = library()
        except ImportError as error:
            why = f"there is no flash-linear-attention ({error})"
        except Exception as error:  # as below: it may not fit the compiler that is there
            why = f"flash-linear-attention cannot be imported: {type(error).__name__}: {error}"
        else:
            scanning = taken._replace(delta_rule=found.delta_rule, scan=found.scan)
            why = _fault(layers, scanning)
            if why is None:
                taken, name = scanning, found.name
            else:
                why = f"{found.name} {why}"
        if why is not None:
            log.warning("states are carried through rows one by one in torch, which costs time: %s", why)
    for one in _looking_back(layers):
        one.kernels = taken
    return name


def _installed() -> Library:
    from mlora_worker.model.recurrent.flash_linear_attention import FlashLinearAttention

    return FlashLinearAttention()


def _looking_back(layers: nn.Module) -> Iterator[LookingBack]:
    return (one for one in layers.modules() if isinstance(one, LookingBack))


def _fault(layers: nn.Module, kernels: Kernels) -> str | None:
    """What is wrong with the kernels; None: nothing."""
    tried = set()
    for module in _looking_back(layers):
        shape = type(module), module.widths()
        if shape in tried:
            continue
        tried.add(shape)
        try:
            why = _difference(module, kernels)
        except Exception as error:  # of another library, or of the compiler: training goes on without them
            why = f"failed: {type(error).__name__}: {error}"
        if why is not None:
            return why
    return None


def _difference(module: LookingBack, kernels: Kernels) -> str | None:
    weight = module.convolution.weight
    if weight.dtype not in _TOLERANCES:
        return f"is not for {weight.dtype}"
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)

    rows = PackedRows(_TRIED_ROWS, weight.device)
    parts = tuple(drawn(1, rows.tokens, width) for width in module.widths())
    with torch.no_grad():
        upstream = drawn(*module.looked(parts, rows).shape)
    wanted = _with_gradients(module, Kernels(), parts, upstream, rows)
    found = _with_gradients(module, kernels, parts, upstream, rows)
    worst = max(_apart(*pair, rows) for pair in zip(found, wanted, strict=True))
    if not worst <= _TOLERANCES[weight.dtype]:
        return f"differs from torch by {worst:.1e}"
    for length, own in zip(rows.lengths, rows.slices, strict=True):
        lonely = PackedRows((length,), weight.device)
        given = (tuple(one[:, own].clone() for one in parts), upstream[:, own].clone())
        alone = _with_gradients(module, kernels, *given, lonely)
        if not all(torch.equal(one, other[:, own]) for one, other in zip(alone, found, strict=True)):
            return f"gives a row of {length} tokens other bits beside others than alone"
    return None


def _with_gradients(
    module: LookingBack, kernels: Kernels, parts: tuple[Tensor, ...], upstream: Tensor, rows: PackedRows
) -> tuple[Tensor, ...]:
    """What the module looks back at by ``kernels``, and the gradients of the parts."""
    former, module.kernels = module.kernels, kernels
    try:
        leaves = [one.clone().requires_grad_() for one in parts]
        with torch.enable_grad():
            y = module.looked(leaves, rows)
        return y.detach(), *torch.autograd.grad(y, leaves, upstream.to(y.dtype))
    finally:
        module.kernels = former


def _apart(found: Tensor, wanted: Tensor, rows: PackedRows) -> float:
    """The largest over rows, in parts of the row's norm, or of the usual row's of as many tokens where that is larger."""
    if found.shape != wanted.shape:
        return torch.inf
    usual = wanted.double().square().mean().sqrt()
    worst = 0.0
    for own in rows.slices:
        one, other = found[:, own].double(), wanted[:, own].double()
        norm = torch.maximum(other.norm(), usual * other.numel() ** 0.5)
        worst = max(worst, float(((one - other).norm() / norm).nan_to_num(torch.inf, torch.inf)))
    return worst
