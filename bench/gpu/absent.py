"""One layer of a model on a GPU that need not be there: what is launched for it, and what is kept for its backward.

Tensors of torch's meta device have shapes and no numbers: autograd keeps what it keeps on a GPU, and nothing is computed.
Attention is the one of a GPU. This project's own kernels are counted where they would be started.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_utils import AttentionInterface

from bench.dispatched import CountOperators
from bench.gpu.shapes import SHAPES
from mlora_worker.frozen.linear import FrozenLinear, freeze_linears
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.lora.dropout import dropout_mask
from mlora_worker.lora.groups import GroupSegment
from mlora_worker.lora.linear import Bound, adapt_linears
from mlora_worker.lora.triton_products import TritonProducts
from mlora_worker.lora.triton_tables import TableGroup
from mlora_worker.model.architecture import decoder_layers, meta_model
from mlora_worker.model.attention import PackedRows, attention_of_packed_halves
from mlora_worker.model.fused_on_gpu import fuse_on_gpu

NOWHERE = torch.device("meta")
ATTENTION = "mlora_packed_on_a_gpu"
RANK, TASKS, ROWS = 16, 8, (222, 222)  # of each task
GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
# Operators that start nothing: they look at the same numbers in another way, or only take memory.
_NOTHING = {
    *(
        "view",
        "_unsafe_view",
        "reshape",
        "transpose",
        "t",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
    ),
    *("unsqueeze", "squeeze", "expand", "detach", "alias", "as_strided", "unbind", "lift_fresh"),
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
}


@dataclass(frozen=True)
class LayerCosts:
    """Of one layer and one microbatch."""

    forward: Counter[str]  # what is launched, by name
    backward: Counter[str]
    kept: dict[
        str, float
    ]  # bytes a token for the backward, by shape and type; what all layers share is left out

    @property
    def launches(self) -> int:
        return self.forward.total() + self.backward.total()

    @property
    def kept_bytes(self) -> float:
        """A token."""
        return sum(self.kept.values())


class Launched(CountOperators):  # type: ignore[no-untyped-call]
    """Counts operators that start something, and stands where kernels of this project are started."""

    def note(self, func: Any) -> None:
        name = str(func).split(".")[1]
        if name not in _NOTHING:
            self.seen[name] += 1

    def start(self, kernel: Any, *_: Any, **__: Any) -> None:
        self.seen[kernel.fn.__name__] += 1

    def taken(self) -> Counter[str]:
        seen, self.seen = self.seen, Counter()
        return seen


def layer_costs(shape: str, dtype: torch.dtype = torch.bfloat16, *, fused: bool = True) -> LayerCosts:
    """All linear modules adapted by ``TASKS`` tasks with dropout. ``fused``: else transformers' own operations lie between
    the products."""
    config = LlamaConfig(**(SHAPES[shape] | {"num_hidden_layers": 1, "vocab_size": 512}))
    model = meta_model(config, dtype)
    layer = decoder_layers(model)[0]
    launched = Launched()
    lengths = ROWS * TASKS
    tokens = sum(lengths)
    model.config._attn_implementation = ATTENTION
    if fused:
        fuse_on_gpu(layer, launched.start, lambda *_: 0.0)
    freeze_linears(layer, lambda _, linear: FrozenLinear(PlainWeight(linear.weight), linear.bias))
    bound = Bound()
    linears = {n: m for n, m in layer.named_modules() if isinstance(m, FrozenLinear)}
    paths = [[n for name in names for n in linears if n.endswith(name)] for names in GROUPS]
    products = _Absent(launch=launched.start)
    groups = adapt_linears(layer, linears, paths, products, bound)
    bound.groups = products.prepare([_segments(group.shapes, dtype) for group in groups])
    hidden = torch.empty(1, tokens, config.hidden_size, dtype=dtype, device=NOWHERE, requires_grad=True)
    shared = {
        name: torch.empty(1, tokens, config.head_dim, dtype=dtype, device=NOWHERE) for name in ("cos", "sin")
    }
    rows = PackedRows(lengths, NOWHERE)
    known = {
        _storage(one) for one in (*layer.parameters(), *shared.values(), rows.position_ids, rows.boundaries)
    }
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage(tensor) not in known:
            kept.setdefault(_storage(tensor), tensor)
        return tensor

    run = partial(
        layer, hidden, attention_mask=None, position_ids=rows.position_ids,
        position_embeddings=(shared["cos"], shared["sin"]), packed=rows,
    )  # fmt: skip
    with torch.no_grad():
        run()  # makes what is kept for all microbatches
    launched.taken()
    with launched, torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        output = run()
        forward = launched.taken()
        torch.autograd.backward(output, output.detach())
        backward = launched.taken()
    sizes: Counter[str] = Counter()
    for tensor in kept.values():
        sizes[f"{list(tensor.shape)} {tensor.dtype}"] += tensor.untyped_storage().nbytes()
    return LayerCosts(forward, backward, {name: size / tokens for name, size in sizes.items()})


class _Absent(TritonProducts):
    """Tables need addresses, which fake tensors do not have: each group gets one of the right size."""

    def prepare(self, groups: Sequence[Sequence[GroupSegment]]) -> Sequence[Sequence[GroupSegment]]:
        made = []
        for segments in groups:
            count, members = len(segments), len(segments[0].members)
            tokens = segments[-1].rows.stop
            maps = torch.empty(-(-tokens // 64), 2, dtype=torch.int64, device=NOWHERE)
            made.append(
                TableGroup(
                    size=count,
                    operands=(segments[0].a, *segments[0].b),
                    make=partial(tuple, segments),
                    table=torch.empty(count, 32, dtype=torch.int64, device=NOWHERE),
                    tiles=maps,
                    chunks=maps,
                    token_keys=torch.empty(tokens, dtype=torch.int64, device=NOWHERE),
                    low_elements=tokens * members * RANK,
                    partial_elements=count,
                    widest_slab=RANK,
                    widest=RANK * members,
                    aligned=True,
                    vector=8,
                )
            )
        return made


def _segments(shapes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[GroupSegment]:
    inputs, tokens = shapes[0][0], sum(ROWS)
    a = torch.empty(RANK * len(shapes), inputs, dtype=dtype, device=NOWHERE)
    b = tuple(torch.empty(outputs, RANK, dtype=dtype, device=NOWHERE) for _, outputs in shapes)
    one = GroupSegment(
        rows=slice(0, tokens), rank=RANK, members=tuple(range(len(shapes))), a=a, b=b, grad_a=a.float(),
        grad_b=tuple(one.float() for one in b), scale=2.0, weight=1.0,
        mask=dropout_mask(torch.empty(tokens, dtype=torch.int64), "m", inputs, 0.05),
    )  # fmt: skip
    return [replace(one, rows=slice(task * tokens, (task + 1) * tokens)) for task in range(TASKS)]


def _attention(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: Any, **options: Any) -> Any:
    return attention_of_packed_halves(query, key, value, options["packed"], options["scaling"], None), None


AttentionInterface.register(ATTENTION, _attention)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]
