"""transformers' own modules with a state, in torch; and others of their files, which nobody else imports before this.

When these files of transformers are imported, they import other libraries' kernels where they are installed, on a CPU as
well, and call them without being asked. That takes seconds, and what runs is chosen here alone (``choice``): so they are
hidden meanwhile.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

_LIBRARIES = ("fla", "causal_conv1d", "mamba_ssm")


@contextmanager
def hidden(*packages: str) -> Iterator[None]:
    """Importing one fails, unless it was imported before."""
    missing = [name for name in packages if name not in sys.modules]
    sys.modules.update(dict.fromkeys(missing))  # type: ignore[arg-type]  # None: it is not there
    try:
        yield
    finally:
        for name in missing:
            sys.modules.pop(name, None)


with hidden(*_LIBRARIES):
    from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
        GraniteMoeHybridMambaLayer,
        mamba2_chunk_scan,
    )
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP, Lfm2ShortConv
    from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeMLP, Lfm2MoeShortConv
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer
    from transformers.models.qwen3_5.modeling_qwen3_5 import (
        Qwen3_5Attention,
        Qwen3_5GatedDeltaNet,
        torch_chunk_gated_delta_rule,
    )
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
        Qwen3_5MoeAttention,
        Qwen3_5MoeGatedDeltaNet,
    )
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextGatedDeltaNet

# What was imported before may have found them.
DELTA_RULE: Callable[..., tuple[Tensor, Tensor | None]] = inspect.unwrap(torch_chunk_gated_delta_rule)
SCAN: Callable[..., Tensor] = inspect.unwrap(mamba2_chunk_scan)

__all__ = [
    "DELTA_RULE",
    "SCAN",
    "FalconH1Mixer",
    "GraniteMoeHybridMambaLayer",
    "Lfm2MLP",
    "Lfm2MoeMLP",
    "Lfm2MoeShortConv",
    "Lfm2ShortConv",
    "NemotronHMamba2Mixer",
    "Qwen3NextAttention",
    "Qwen3NextGatedDeltaNet",
    "Qwen3_5Attention",
    "Qwen3_5GatedDeltaNet",
    "Qwen3_5MoeAttention",
    "Qwen3_5MoeGatedDeltaNet",
]
