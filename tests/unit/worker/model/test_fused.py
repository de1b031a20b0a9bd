"""Norms and gated activations in one pass, beside transformers' own."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import GemmaConfig, LlamaConfig, Phi3Config, Qwen3Config
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.phi3 import modeling_phi3
from transformers.models.phi3.modeling_phi3 import Phi3Attention
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from mlora_worker.model.fused import FusedGatedMLP, FusedRMSNorm, fuse
from mlora_worker.runtime.numba_loops import AVAILABLE

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="needs numba")
CONFIG = {"hidden_size": 40, "intermediate_size": 56, "num_attention_heads": 4, "num_key_value_heads": 2}


def frozen(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.ModuleList:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return nn.ModuleList([module]).requires_grad_(False).to(dtype)


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        (LlamaRMSNorm(40, eps=1e-3), FusedRMSNorm),
        (LlamaMLP(LlamaConfig(**CONFIG)), FusedGatedMLP),
    ],
)
@pytest.mark.parametrize("shape", [(1, 7, 40), (1, 1, 40), (1, 5, 3, 40)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_outputs_and_input_gradients_equal_those_of_the_module_replaced(
    module: nn.Module, kind: type[nn.Module], shape: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    """In bfloat16 the exact one is that of the same numbers in float32."""
    plain = frozen(copy.deepcopy(module), dtype)
    fused = copy.deepcopy(plain)
    assert fuse(fused) == 1
    assert isinstance(fused[0], kind)
    plain = plain.float()
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    results = []
    for one, own in ((plain, torch.float32), (fused, dtype)):
        leaf = x.to(own).requires_grad_()
        y = one[0](leaf)
        # A gradient that is not contiguous, as views in a model make them.
        y.backward(
            torch.randn(*reversed(shape), generator=torch.Generator().manual_seed(2))
            .to(dtype)
            .to(own)
            .permute(*reversed(range(len(shape))))
        )
        assert leaf.grad is not None
        results.append((y.detach(), leaf.grad))
    for found, wanted in zip(results[1], results[0], strict=True):
        assert (found - wanted).norm() <= tolerance * wanted.norm()


@pytest.mark.parametrize(
    "module",
    [
        frozen(GemmaRMSNorm(40)),  # multiplies by 1 + weight
        frozen(LlamaMLP(LlamaConfig(**CONFIG, hidden_act="gelu"))),
        frozen(LlamaMLP(LlamaConfig(**CONFIG, hidden_act="gelu")), torch.bfloat16),
        frozen(GemmaRMSNorm(40), torch.bfloat16),
        frozen(LlamaRMSNorm(40), torch.float16),
        nn.ModuleList([LlamaRMSNorm(40)]),  # its weight is trained
    ],
)
def test_what_differs_is_left_alone(module: nn.Module) -> None:
    if isinstance(module[0], GemmaRMSNorm):
        assert GemmaConfig().rms_norm_eps > 0
    assert fuse(module) == 0


def test_norms_within_a_layer_are_found_and_share_their_weights() -> None:
    layers = frozen(Qwen3Attention(Qwen3Config(**CONFIG, head_dim=8), 0))
    weight = layers[0].q_norm.weight
    assert fuse(layers) == 3, "both, and the rotation of heads"
    assert layers[0].q_norm.weight is weight


@pytest.mark.parametrize("rotated", [10, 4], ids=["whole heads", "a part of each"])
@pytest.mark.parametrize("by_token", [True, False], ids=["token by token", "head by head"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
def test_heads_are_rotated_in_one_pass_there_and_back(
    rotated: int, by_token: bool, dtype: torch.dtype, tolerance: float
) -> None:
    """Also where only a part of each head is rotated; transformers' own function stays as it is."""
    before = modeling_phi3.apply_rotary_pos_emb
    layers = frozen(Phi3Attention(Phi3Config(**CONFIG, pad_token_id=0), 0), dtype)
    assert fuse(layers) == 1
    own = type(layers[0]).forward.__globals__["apply_rotary_pos_emb"]
    assert modeling_phi3.apply_rotary_pos_emb is before
    assert own is not before
    angles = torch.randn(1, 7, rotated, generator=torch.Generator().manual_seed(1))
    results = []
    for function, kind in ((own, dtype), (before, torch.float32)):
        cos, sin = angles.cos().to(dtype).to(kind), angles.sin().to(dtype).to(kind)
        generator = torch.Generator().manual_seed(2)

        def heads(count: int) -> torch.Tensor:
            shape = (1, 7, count, 10) if by_token else (1, count, 7, 10)
            made = torch.randn(shape, generator=generator).to(dtype).to(kind)  # noqa: B023
            return made.transpose(1, 2) if by_token else made

        q, k = heads(4).requires_grad_(), heads(2).requires_grad_()
        both = function(q, k, cos, sin)
        torch.autograd.backward(both, [heads(4), heads(2)])
        assert q.grad is not None
        assert k.grad is not None
        results.append((*(one.detach() for one in both), q.grad, k.grad))
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).norm() <= tolerance * wanted.norm()


def test_a_token_s_heads_do_not_depend_on_the_others_nor_are_others_arguments_touched() -> None:
    layers = frozen(LlamaAttention(LlamaConfig(**CONFIG), 0))
    fuse(layers)
    own = type(layers[0]).forward.__globals__["apply_rotary_pos_emb"]
    q, k, cos, sin = (torch.randn(1, n, 9, 10) for n in (4, 2, 1, 1))
    many = own(q, k, cos[0], sin[0])
    few = own(q[:, :, 3:5], k[:, :, 3:5], cos[0, :, 3:5], sin[0, :, 3:5])
    for one, other in zip(many, few, strict=True):
        assert torch.equal(one[:, :, 3:5], other)
    halves = own(q.bfloat16(), k.bfloat16(), cos[0], sin[0])
    plain = modeling_llama.apply_rotary_pos_emb(q.bfloat16(), k.bfloat16(), cos[0], sin[0])
    assert all(map(torch.equal, halves, plain)), "types that are mixed are left to transformers"


def test_a_token_does_not_depend_on_the_others() -> None:
    norm = frozen(LlamaRMSNorm(40))
    fuse(norm)
    x = torch.randn(9, 40)
    assert torch.equal(norm[0](x)[3:5], norm[0](x[3:5]))


def test_a_norm_in_bfloat16_rounds_as_transformers_does_and_knows_infinity_and_nan() -> None:
    plain = frozen(LlamaRMSNorm(40), torch.bfloat16)
    norm = copy.deepcopy(plain)
    assert fuse(norm) == 1
    x = torch.randn(200, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
    found, wanted = norm[0](x), plain[0](x)
    same = (found == wanted).float().mean()
    assert same > 0.99, "the sum of squares is added up in another order, and nothing else differs"
    x[0, 0], x[1, 0], x[2] = torch.inf, torch.nan, -3e38
    found = norm[0](x)
    assert found[0].isnan().any()
    assert found[1].isnan().all()
    assert torch.equal(found[3:], norm[0](x[3:]))
