"""How well the model predicts, with no thought of gradients: the sum of cross entropies, and how often it is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mlora_worker.frozen.weight import FrozenWeight
from mlora_worker.model.loss import IGNORED, supervised_of_parts
from mlora_worker.model.transfer import to_device
from mlora_worker.runtime.precision import product_dtype
from mlora_worker.stream.footprint import chunk_rows


@torch.no_grad()
def part_scores(
    hidden: Tensor,
    labels: Tensor,
    part_tokens: Sequence[int],
    norm: Callable[[Tensor], Tensor],
    head_weight: FrozenWeight,
    logit_cap: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """[parts, 2] float64: over the supervised positions of each part, the sum of cross entropies, and the number of those
    whose target is the most likely token; each counted as it weighs where there are ``weights`` [tokens] float64, in the
    host's memory.

    hidden [tokens, size]: output of the last decoder layer. labels [tokens] int64, in the host's memory, ``IGNORED`` where
    nothing is predicted. part_tokens: tokens of each part, in order. head_weight [vocabulary, size]. Logits exist for a
    chunk of positions at a time, as in training.
    """
    positions = (labels != IGNORED).nonzero().squeeze(1)
    counts = supervised_of_parts(labels, part_tokens)
    device = hidden.device
    normed = norm(hidden.index_select(0, to_device(positions, device)))
    targets = to_device(labels[positions], device)
    heavy = None if weights is None else to_device(weights[positions], device)
    wide = product_dtype(normed.dtype, device)
    head = head_weight.multiplier(wide)
    chunk = chunk_rows(head_weight.shape[0], device.type)
    found = torch.zeros(len(normed), 2, dtype=torch.float64, device=device)
    for start in range(0, len(normed), chunk):
        logits = head.times(normed[start : start + chunk].to(wide))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if logit_cap is not None:
            logits = (logits / logit_cap).tanh() * logit_cap
        wanted = targets[start : start + chunk]
        losses = logits.logsumexp(dim=1) - logits.gather(1, wanted[:, None]).squeeze(1)
        found[start : start + chunk, 0] = losses
        found[start : start + chunk, 1] = logits.argmax(dim=1) == wanted
    if heavy is not None:
        found *= heavy[:, None]
    # Each part by itself, so that the order of additions knows nothing of the others.
    return torch.stack([own.sum(dim=0) for own in torch.split(found, counts)])
