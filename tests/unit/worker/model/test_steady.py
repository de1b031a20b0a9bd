"""Element by element, a row has the same bits whatever is beside it, on any number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    LlamaConfig,
)
from transformers.models.gemma3n.modeling_gemma3n import Gemma3nRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP

from mlora_worker.frozen.linear import freeze_linears
from mlora_worker.model.fused import FusedGatedMLP, _SiluTimes, fuse
from mlora_worker.model.steady import (
    SteadyGelu,
    SteadyGemma3nNorm,
    SteadyGemma4Norm,
    SteadySilu,
    in_parts,
    make_steady,
    steady_sigmoid,
)

ROWS, MORE = 101, (102, 205, 377)
LFM2 = [(Lfm2Config, Lfm2ForCausalLM), (Lfm2MoeConfig, Lfm2MoeForCausalLM)]
TINY = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
WIDE = {"intermediate_size": 4864, "block_auto_adjust_ff_dim": False}


@pytest.fixture(params=[1, 3, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Numbers that do not divide a row into whole vectors."""
    former = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(former)


def drawn(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(0)).to(dtype)


def with_gradient(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = module(x)
    (grad,) = torch.autograd.grad(y, x, x.detach() / 2 + 1)
    return y.detach(), grad


class Sigmoid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return steady_sigmoid(x)


class InParts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return in_parts(torch.sigmoid, x)


class Times(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _SiluTimes.apply(x, x.roll(1, dims=1))
        return y


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [4864, 70, 1])
@pytest.mark.parametrize(
    "module",
    [SteadySilu(), SteadyGelu("none"), SteadyGelu("tanh"), Sigmoid(), InParts(), Times()],
    ids=lambda one: type(one).__name__,
)
def test_a_row_has_the_bits_of_itself_alone(module: nn.Module, size: int, dtype: torch.dtype) -> None:
    alone = with_gradient(module, drawn(ROWS, size, dtype))
    for rows in MORE:
        x = torch.cat([drawn(ROWS, size, dtype), drawn(rows - ROWS, size, dtype)])
        for found, wanted in zip(with_gradient(module, x), alone, strict=True):
            assert torch.equal(found[:ROWS], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_they_are_torchs_functions(dtype: torch.dtype) -> None:
    x = drawn(7, 4864, dtype)
    pairs = (
        (SteadySilu(), nn.SiLU()),
        (SteadyGelu("none"), nn.GELU()),
        (SteadyGelu("tanh"), nn.GELU("tanh")),
        (Sigmoid(), nn.Sigmoid()),
        (InParts(), nn.Sigmoid()),
    )
    for own, plain in pairs:
        for found, wanted in zip(with_gradient(own, x), with_gradient(plain, x), strict=True):
            torch.testing.assert_close(found, wanted)
    shaped = with_gradient(SteadySilu(), x.view(1, 7, 4864).transpose(0, 1))
    assert torch.equal(shaped[0].squeeze(1), with_gradient(SteadySilu(), x)[0])


@pytest.mark.parametrize(
    ("theirs", "steady"), [(Gemma3nRMSNorm, SteadyGemma3nNorm), (Gemma4RMSNorm, SteadyGemma4Norm)]
)
def test_gemmas_norm_of_a_token_and_its_gradient_do_not_depend_on_the_others(
    theirs: Any, steady: type[nn.Module]
) -> None:
    norm = theirs(40)
    x = drawn(ROWS, 40, torch.float32)
    wanted = with_gradient(norm, x)
    norm.__class__ = steady
    alone = with_gradient(norm, x)
    for found, one in zip(alone, wanted, strict=True):
        torch.testing.assert_close(found, one)
    for rows in MORE:
        both = with_gradient(norm, torch.cat([x, drawn(rows - ROWS, 40, torch.float32)]))
        assert all(torch.equal(found[:ROWS], one) for found, one in zip(both, alone, strict=True))


@pytest.mark.usefixtures("threads")
def test_the_gated_feed_forward_of_a_token_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    mlp = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=4864)).requires_grad_(False)
    layers = nn.ModuleList([mlp])
    freeze_linears(layers)
    fuse(layers)
    if not isinstance(layers[0], FusedGatedMLP):
        pytest.skip("numba is missing")
    gate = layers[0].gate_proj(drawn(377, 64, torch.float32))
    whole = _SiluTimes.apply(gate, gate)
    assert torch.equal(whole[:ROWS], _SiluTimes.apply(gate[:ROWS].clone(), gate[:ROWS].clone()))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "gelu", "gelu_new", "gelu_python_tanh"])
def test_the_activation_of_a_models_token_does_not_depend_on_the_others(activation: str) -> None:
    config = GemmaConfig(
        hidden_size=8, intermediate_size=4864, num_hidden_layers=1, num_attention_heads=1, head_dim=8,
        num_key_value_heads=1, vocab_size=8, hidden_act=activation, hidden_activation=activation,
    )  # fmt: skip
    model = GemmaForCausalLM(config)
    make_steady(model)
    function = model.model.layers[0].mlp.act_fn
    x = drawn(377, 4864, torch.float32)
    whole, alone = with_gradient(function, x), with_gradient(function, x[:ROWS])
    assert all(torch.equal(found[:ROWS], wanted) for found, wanted in zip(whole, alone, strict=True))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("config", "causal"), LFM2, ids=["dense", "mixture"])
def test_a_feed_forward_that_calls_its_activation_is_no_exception(config: Any, causal: Any) -> None:
    model = causal(config(vocab_size=8, layer_types=["conv"], **TINY, **WIDE)).requires_grad_(False)
    make_steady(model)
    mlp = model.model.layers[0].feed_forward
    seen: list[Tensor] = []
    mlp.w2.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    x = drawn(377, 8, torch.float32)
    mlp.w1.forward = mlp.w3.forward = lambda rows: drawn(377, 4864, torch.float32)[: len(rows)]
    for rows in (x, x[:ROWS]):
        mlp(rows)
    assert torch.equal(seen[0][:ROWS], seen[1])
