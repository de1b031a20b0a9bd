"""The kernels between a layer's products beside transformers' modules and autograd: in Triton's interpreter, or on a GPU
with ``MLORA_TEST_DEVICE=cuda``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import CohereConfig, GemmaConfig, LlamaConfig, Phi3Config, Qwen3Config
from transformers.models.cohere.modeling_cohere import CohereAttention, CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from transformers.models.phi3 import modeling_phi3
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from mlora_worker.frozen.int8 import int8
from mlora_worker.frozen.linear import Freeze, FrozenLinear, freeze_linears
from mlora_worker.frozen.plain import PlainWeight
from mlora_worker.runtime.kernel_compiler import launch
from tests.fixtures.interpreted import DEVICE, elementwise, fused_on_gpu
from tests.fixtures.stories import stories

SIZES: dict[str, Any] = {
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# The interpreter rounds to bfloat16 by cutting, which is twice as far off.
LIMITS = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TYPES = pytest.mark.parametrize("dtype", LIMITS, ids=str)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter adds up a block element by element."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(elementwise, "NORM_BLOCK", 128)


def frozen(module: nn.Module, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return nn.ModuleList([module]).requires_grad_(False).to(DEVICE, dtype)


def drawn(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(found: Tensor, wanted: Tensor, limit: float) -> None:
    assert found.dtype == wanted.dtype
    assert (found.double() - wanted.double()).norm() <= limit * wanted.double().norm()


def llama_mlp(act: str) -> LlamaMLP:
    return LlamaMLP(LlamaConfig(**SIZES, hidden_act=act))


MODULES = {
    "norm": lambda: LlamaRMSNorm(40, eps=1e-3),
    "norm of Gemma": lambda: GemmaRMSNorm(40),
    "silu": lambda: llama_mlp("silu"),
    "gelu": lambda: llama_mlp("gelu"),
    "gelu by tanh": lambda: GemmaMLP(GemmaConfig(**SIZES, hidden_act="gelu_pytorch_tanh")),
    "gate and up in one": lambda: Phi3MLP(Phi3Config(**SIZES, pad_token_id=0)),
}


@TYPES
@pytest.mark.parametrize("name", MODULES)
def test_outputs_and_input_gradients_equal_those_of_the_module_replaced(
    name: str, dtype: torch.dtype
) -> None:
    plain = frozen(MODULES[name](), dtype)
    fused = copy.deepcopy(plain)
    assert fused_on_gpu.fuse_on_gpu(fused) == 1
    x, upstream = drawn(1, 7, 40, dtype=dtype), drawn(40, 7, 1, seed=2, dtype=dtype).permute(2, 1, 0)
    results = []
    for one in (plain, fused):
        leaf = x.clone().requires_grad_()
        y = one[0](leaf)
        y.backward(upstream)
        assert leaf.grad is not None
        results.append((y.detach(), leaf.grad))
    for found, wanted in zip(results[1], results[0], strict=True):
        close(found, wanted, LIMITS[dtype])


def test_each_activation_is_told_from_the_others() -> None:
    kinds = []
    for act in ("silu", "gelu", "gelu_pytorch_tanh"):
        layers = frozen(llama_mlp(act), torch.bfloat16)
        fused_on_gpu.fuse_on_gpu(layers)
        kinds.append(layers[0].kind)
    assert kinds == [0, 1, 2]


def test_a_norm_rounds_where_the_module_that_it_replaces_does() -> None:
    modes = []
    for norm in (LlamaRMSNorm(40), GemmaRMSNorm(40)):
        layers = frozen(norm, torch.float16)
        fused_on_gpu.fuse_on_gpu(layers)
        modes.append((layers[0].offset, layers[0].rounds))
    assert modes == [(0.0, True), (1.0, False)]


@pytest.mark.parametrize(
    "module",
    [
        frozen(CohereLayerNorm(40)),  # subtracts the mean
        frozen(llama_mlp("relu")),
        nn.ModuleList([LlamaRMSNorm(40)]),  # its weight is trained
        frozen(LlamaRMSNorm(40), torch.float64),
        frozen(CohereAttention(CohereConfig(**SIZES, pad_token_id=0), 0)),  # rotates neighbours, not halves
    ],
)
def test_what_differs_is_left_alone(module: Any) -> None:
    kind = type(module[0])
    assert fused_on_gpu.fuse_on_gpu(module) == 0
    assert type(module[0]) is kind


def test_norms_of_heads_and_rotation_within_a_layer_are_found_and_share_their_weights() -> None:
    layers = frozen(Qwen3Attention(Qwen3Config(**SIZES, head_dim=8), 0))
    weight = layers[0].q_norm.weight
    assert fused_on_gpu.fuse_on_gpu(layers) == 3
    assert layers[0].q_norm.weight is weight


@pytest.mark.parametrize("freeze", [PlainWeight, int8], ids=["plain", "int8"])
def test_modules_whose_matrices_are_frozen_already_are_found_as_well(freeze: Freeze) -> None:
    layers = frozen(LlamaMLP(LlamaConfig(**SIZES)))
    layers.append(frozen(LlamaAttention(LlamaConfig(**SIZES, head_dim=10), 0))[0])
    freeze_linears(layers, lambda _, one: FrozenLinear(freeze(one.weight), one.bias))
    before = copy.deepcopy(layers[0])
    assert fused_on_gpu.fuse_on_gpu(layers) == 2
    x = drawn(1, 7, 40)
    close(layers[0](x), before(x), LIMITS[torch.float32])


@pytest.mark.parametrize("rotated", [10, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_attention_s_heads_are_rotated_by_one_launch(rotated: int, dtype: torch.dtype) -> None:
    """Where only a part of each head is rotated, too; transformers' own function stays as it is."""
    launches = []

    def counted(*arguments: Any, **options: Any) -> None:
        launches.append(arguments[0])
        launch(*arguments, **options)

    layers = frozen(Phi3Attention(Phi3Config(**SIZES, pad_token_id=0), 0), dtype)
    before = modeling_phi3.apply_rotary_pos_emb
    assert fused_on_gpu.fuse_on_gpu(layers, counted) == 1
    assert isinstance(layers[0], Phi3Attention)
    own = layers[0].forward.__func__.__globals__["apply_rotary_pos_emb"]
    assert modeling_phi3.apply_rotary_pos_emb is before
    assert own is not before
    launches.clear()
    check_rotation(own, before, 4, 2, 10, rotated, dtype)
    assert len(launches) == 2


def check_rotation(
    own: Any, plain: Any, heads: int, key_heads: int, size: int, rotated: int, dtype: torch.dtype
) -> None:
    cos, sin = (drawn(1, 5, rotated, seed=seed, dtype=dtype) for seed in (3, 4))
    results = []
    for function in (own, plain):
        # As a model has them: projections of each token, seen as heads.
        q, k = (drawn(1, 5, n, size, seed=n, dtype=dtype).requires_grad_() for n in (heads, key_heads))
        both = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        torch.autograd.backward(both, [drawn(*one.shape, seed=7, dtype=dtype) for one in both])
        results.append((*(one.detach() for one in both), q.grad, k.grad))
    for found, wanted in zip(*results, strict=True):
        close(found, wanted, LIMITS[dtype])


def test_a_layout_that_the_kernel_does_not_know_is_left_to_transformers() -> None:
    layers = frozen(LlamaAttention(LlamaConfig(**SIZES), 0))
    fused_on_gpu.fuse_on_gpu(layers)
    own = layers[0].forward.__func__.__globals__["apply_rotary_pos_emb"]
    q, k, cos, sin = drawn(2, 4, 3, 10), drawn(2, 2, 3, 10), drawn(2, 3, 10), drawn(2, 3, 10)
    wanted = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
    for found, one in zip(own(q, k, cos, sin), wanted, strict=True):
        assert torch.equal(found, one)


@settings(
    max_examples=stories(15), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    size=st.integers(1, 70),
    rows=st.integers(0, 5),
    offset=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 9),
)
def test_a_norm_of_any_size_has_autograd_s_gradient(size: int, rows: int, offset: float, seed: int) -> None:
    x = drawn(rows, size, seed=seed).requires_grad_()
    weight, upstream = drawn(size, seed=seed + 1), drawn(rows, size, seed=seed + 2)
    y = elementwise.RMSNorm.apply(x, weight, 1e-2, offset, False, launch)
    wanted = (offset + weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    (found,), (expected,) = (torch.autograd.grad(one, x, upstream) for one in (y, wanted))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 17, 1030])
def test_gate_and_up_alone_are_kept_of_a_gated_activation(size: int) -> None:
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    gate, up = (drawn(1, 2, size, seed=seed).requires_grad_() for seed in (1, 2))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        y = elementwise.Gated.apply(gate, up, 0, launch)
    assert {one.data_ptr() for one in kept} == {gate.data_ptr(), up.data_ptr()}
    wanted = nn.functional.silu(gate) * up
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
    upstream = drawn(1, 2, size, seed=3)
    for found, expected in zip(
        *(torch.autograd.grad(one, (gate, up), upstream) for one in (y, wanted)), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_token_does_not_depend_on_the_others() -> None:
    norm = frozen(LlamaRMSNorm(40))
    fused_on_gpu.fuse_on_gpu(norm)
    x = drawn(9, 40)
    assert torch.equal(norm[0](x)[3:5], norm[0](x[3:5]))
