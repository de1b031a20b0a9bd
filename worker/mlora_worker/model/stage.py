"""The modules of one stage and how tokens go through them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mlora_worker.frozen.biased import BiasedWeight
from mlora_worker.frozen.experts import FrozenExperts, SegmentTokens
from mlora_worker.frozen.linear import FrozenLinear
from mlora_worker.frozen.quantised import QuantisedWeight
from mlora_worker.frozen.weight import FrozenWeight
from mlora_worker.model.altup import Gathered, Spread
from mlora_worker.model.architecture import Architecture
from mlora_worker.model.attention import PackedRows
from mlora_worker.model.borders import Border, KeysAndValues, still_shared
from mlora_worker.model.layer_inputs import LayerInputs
from mlora_worker.model.loss import segment_losses
from mlora_worker.model.rotary import CosSin, cos_sin
from mlora_worker.stream.libraries import KERNEL_BYTES

_PROBED_TOKENS = 4


@dataclass(frozen=True, eq=False)
class Stage:
    """Frozen modules of stage ``index`` of ``stages``. ``layers`` are decoder layers ``layer_range`` of the
    model.
    """

    index: int
    stages: int
    architecture: Architecture
    layer_range: range
    layers: nn.ModuleList
    rotary: nn.Module | None  # None: positions are learned
    layer_types: tuple[str | None, ...]  # of these layers, where frequencies differ by it
    embedding: nn.Module | None  # first stage
    positions: nn.Module | None  # first stage, where they are learned
    norm: nn.Module | None  # last stage
    head_weight: FrozenWeight | None  # [vocabulary, size], last stage; perhaps with a bias
    logit_cap: float | None  # logits become cap * tanh(logits / cap)
    embedding_factor: float  # embeddings are multiplied by it
    logit_factor: float  # logits are, before they are capped
    linears: dict[str, FrozenLinear]  # of these layers, by the path in the whole model
    dtype: torch.dtype
    device: torch.device
    layer_inputs: LayerInputs | None = None  # first stage, where layers have inputs of their own
    spread: Spread | None = None  # first stage, where hidden states have copies
    gathered: Gathered | None = None  # last stage, the same
    segments: SegmentTokens = field(default_factory=SegmentTokens)  # that routed experts cut their rows by
    recurrence: str | None = None  # what carries states from token to token; None: no layer has one

    @property
    def first(self) -> bool:
        return self.index == 0

    @property
    def last(self) -> bool:
        return self.index == self.stages - 1

    @property
    def entering(self) -> Border:
        """What of a token comes to this stage."""
        return self.architecture.border(self.layer_range.start)

    @property
    def leaving(self) -> Border:
        """What of a token goes on from this stage."""
        return self.architecture.border(self.layer_range.stop)

    @property
    def experts(self) -> dict[str, FrozenExperts]:
        """Routed experts of these layers, by their path in the whole model."""
        first = self.layer_range.start
        return {
            stack.path: self.layers[stack.layer - first].get_submodule(stack.inside)  # type: ignore[misc]
            for stack in self.architecture.experts
            if stack.layer in self.layer_range
        }

    @property
    def products(self) -> str:
        """The library that multiplies with its weights."""
        return next((one.weight.library for one in self.linears.values()), FrozenWeight.library)

    @property
    def parameters(self) -> int:
        """Numbers in the frozen weights, however many bytes each takes; a tied head on one stage counts once."""
        parts = (self.layers, *self._ends)
        inside = [module for part in parts if part is not None for module in part.modules()]
        weights = [module for module in inside if isinstance(module, FrozenWeight)]
        own = [
            tensor
            for module in inside
            if not isinstance(module, FrozenWeight)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        ]
        if isinstance(self.head_weight, BiasedWeight):
            own.append(self.head_weight.get_buffer("bias"))
        if self.head_weight is not None and not (self.architecture.tied_head and self.first):
            weights.append(self.head_weight)
        return sum(tensor.numel() for tensor in own) + sum(math.prod(weight.shape) for weight in weights)

    @property
    def _ends(self) -> tuple[nn.Module | None, ...]:
        """What there is beside the layers and the head."""
        return self.embedding, self.positions, self.layer_inputs, self.spread, self.gathered, self.norm

    @property
    def quantised(self) -> bool:
        """Whether matrices become dense for a pass."""
        return any(isinstance(one, QuantisedWeight) for one in self.layers.modules())

    @property
    def resident_bytes(self) -> int:
        """Bytes of the frozen weights, and of a library's kernels; a tied head on one stage counts once."""
        parts = (self.rotary, *self._ends, self.head_weight)
        whole = nn.ModuleList([self.layers, *(part for part in parts if part is not None)])
        tensors = (*whole.parameters(), *whole.buffers())
        kernels = 0 if self.products == FrozenWeight.library else KERNEL_BYTES
        return sum({t.data_ptr(): t.nbytes for t in tensors}.values()) + kernels

    def embed(self, token_ids: Tensor, rows: PackedRows) -> Tensor:
        """[tokens] -> [tokens, entering.width]."""
        assert self.embedding is not None
        hidden: Tensor = self.embedding(token_ids)
        if self.embedding_factor != 1:
            hidden = hidden * self.embedding_factor
        if self.positions is not None:
            hidden = hidden + self.positions(rows.position_ids[0])
        self.segments.counts = rows.segments
        inputs = None if self.layer_inputs is None else self.layer_inputs(token_ids, hidden)
        if self.spread is not None:
            hidden = self.spread(hidden)
        return self.entering.joined(hidden, inputs)

    def run_layers(
        self, states: Tensor, rows: PackedRows, recompute: Callable[[], None] | None = None
    ) -> Tensor:
        """[tokens, entering.width] -> [tokens, leaving.width], which are hidden states and nothing else in most models; see
        ``through_layers``."""
        learnt, inputs = self.entering.divided(states)
        return self.leaving.joined(self.through_layers(learnt, inputs, rows, recompute), inputs)

    def through_layers(
        self,
        learnt: Tensor,
        inputs: Tensor | None,
        rows: PackedRows,
        recompute: Callable[[], None] | None = None,
    ) -> Tensor:
        """[tokens, entering.learnt] -> [tokens, leaving.learnt] through this stage's decoder layers. ``inputs`` [tokens,
        entering.inputs]: those of these layers, then of later ones.

        ``recompute``: keep only each layer's input for the backward, which runs the layer once more; it is called before
        every layer, also then, so that the layer sees the same adapters.
        """
        hidden, keys = self.entering.unpacked(learnt)
        embeddings: dict[str | None, CosSin | None] = {
            kind: None if self.rotary is None else cos_sin(self.rotary, hidden, rows, kind)
            for kind in dict.fromkeys(self.layer_types)
        }
        size, shared = self.architecture.layer_inputs, self.architecture.shared_keys
        more: list[dict[str, Tensor]] = [
            {} if inputs is None else {"per_layer_input": inputs[None, :, at * size : (at + 1) * size]}
            for at in range(len(self.layers))
        ]

        def run(
            at: int, hidden: Tensor, keys: dict[str, KeysAndValues]
        ) -> tuple[Tensor, dict[str, KeysAndValues]]:
            if recompute is not None:
                recompute()
            self.segments.counts = rows.segments
            known = dict(keys)
            output: Tensor | tuple[Tensor, ...] = self.layers[at](
                hidden,
                attention_mask=None,
                position_ids=rows.position_ids,
                position_embeddings=embeddings[self.layer_types[at]],
                packed=rows,
                **more[at],
                **({"shared_kv_states": known} if shared else {}),
            )
            used = still_shared(shared, self.layer_range[at] + 1)
            left = {one.kind: known[one.kind] for one in used}
            return output[0] if isinstance(output, tuple) else output, left

        for at in range(len(self.layers)):
            if recompute is None:
                hidden, keys = run(at, hidden, keys)
            else:
                hidden, keys = checkpoint(
                    run, at, hidden, keys, use_reentrant=False, preserve_rng_state=False
                )
        if self.gathered is not None:
            hidden = self.gathered(hidden)
        return self.leaving.packed(hidden, keys)

    @torch.no_grad()
    def input_groups(self) -> tuple[tuple[str, ...], ...]:
        """Paths of the linears of this stage, those together that read the same tensor; in the order of their calls.

        Found by watching a few tokens go through: what a layer does with its modules is written in its code alone. The
        grouping of a layer is its own, so it is the same on any number of stages.
        """
        paths = {id(module): path for path, module in self.linears.items()}
        calls: list[tuple[str, Tensor]] = []

        def watch(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            calls.append((paths[id(module)], arguments[0]))

        hooks = [module.register_forward_pre_hook(watch) for module in self.linears.values()]
        try:
            width = self.entering.width
            hidden = torch.ones(_PROBED_TOKENS, width, dtype=self.dtype, device=self.device)
            self.run_layers(hidden, PackedRows((_PROBED_TOKENS,), self.device))
        finally:
            for hook in hooks:
                hook.remove()
        groups: dict[int, list[str]] = {}  # the inputs are held by ``calls``, so their ids stay theirs
        for path, x in calls:
            if path not in groups.setdefault(id(x), []):
                groups[id(x)].append(path)
        return tuple(map(tuple, groups.values()))

    def losses(
        self,
        hidden: Tensor,
        labels: Tensor,
        segment_tokens: tuple[int, ...],
        weights: Tensor | None = None,
        task_tokens: tuple[int, ...] | None = None,
    ) -> Tensor:
        """[segments] float64: sums of cross entropies over each segment's supervised positions, or over those of any other
        parts; see ``segment_losses``."""
        assert self.head_weight is not None
        end = self.normed, self.head_weight, self.logit_cap
        return segment_losses(hidden, labels, segment_tokens, *end, weights, task_tokens)

    def normed(self, hidden: Tensor) -> Tensor:
        """What the head multiplies; a factor of the logits is one of its input."""
        assert self.norm is not None
        normed: Tensor = self.norm(hidden)
        return normed if self.logit_factor == 1 else normed * self.logit_factor

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, size] -> [tokens, vocabulary]: to look at, never while training."""
        assert self.head_weight is not None
        logits: Tensor = self.head_weight(self.normed(hidden))
        return logits if self.logit_cap is None else (logits / self.logit_cap).tanh() * self.logit_cap
