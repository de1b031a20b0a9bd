"""A frozen weight of any kind multiplies as its dense matrix does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mlora_worker.frozen.biased import BiasedWeight
from mlora_worker.frozen.linear import FrozenLinear, freeze_linears
from mlora_worker.frozen.plain import DenseMultiplier, PlainWeight
from mlora_worker.frozen.weight import FrozenWeight, Multiplier


class Halved(FrozenWeight):
    """Kept in half precision, and dense for a pass alone, as quantised weights are."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        self.shape = (matrix.shape[0], matrix.shape[1])
        self.register_buffer("narrow", matrix.detach().half())

    def dense(self, dtype: torch.dtype) -> Tensor:
        narrow: Tensor = self.get_buffer("narrow")
        return narrow.to(dtype)

    def multiplier(self, dtype: torch.dtype) -> Multiplier:
        return DenseMultiplier(self.dense(dtype))


def example() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(5, 3, generator=generator).half().float(),
        torch.randn(5, generator=generator),
        torch.randn(2, 4, 3, generator=generator),
    )


@pytest.mark.parametrize("kind", [PlainWeight, Halved])
def test_both_products_are_those_of_the_dense_matrix(kind: type[PlainWeight] | type[Halved]) -> None:
    matrix, bias, x = example()
    weight = kind(matrix)
    rows, multiplier = x.reshape(-1, 3), weight.multiplier(torch.float32)
    wanted = rows @ weight.dense(torch.float32).T
    torch.testing.assert_close(multiplier.times(rows), wanted)
    out = torch.empty(8, 5)
    assert multiplier.times(rows, bias, out).data_ptr() == out.data_ptr()
    torch.testing.assert_close(out, wanted + bias)
    total = torch.empty(8, 3)
    assert multiplier.back(out, out=total).data_ptr() == total.data_ptr()
    torch.testing.assert_close(total, out @ matrix)
    torch.testing.assert_close(multiplier.back(out, onto=total), 2 * out @ matrix)


def test_a_weight_with_a_bias_adds_it_to_its_products_and_has_the_gradient_of_the_matrix() -> None:
    matrix, bias, x = example()
    weight = BiasedWeight(PlainWeight(matrix), bias)
    rows, multiplier = x.reshape(-1, 3), weight.multiplier(torch.float64)
    wanted = rows.double() @ matrix.double().T + bias.double()
    torch.testing.assert_close(multiplier.times(rows.double()), wanted)
    torch.testing.assert_close(multiplier.times(rows.double(), bias.double()), wanted + bias.double())
    torch.testing.assert_close(multiplier.back(wanted), wanted @ matrix.double())
    torch.testing.assert_close(weight(x).reshape(-1, 5), wanted.float())
    assert weight.resident_bytes == 4 * (15 + 5)


@pytest.mark.parametrize("kind", [PlainWeight, Halved])
def test_a_frozen_module_computes_what_the_linear_module_did_and_hands_gradients_on(
    kind: type[PlainWeight] | type[Halved],
) -> None:
    matrix, bias, x = example()
    linear = nn.Linear(3, 5)
    linear.weight.data, linear.bias.data = matrix, bias
    wanted_x, found_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    wanted = linear(wanted_x)
    layer = nn.Sequential(linear)
    assert freeze_linears(layer, lambda _, one: FrozenLinear(kind(one.weight), one.bias)) == 1
    frozen = layer[0]
    assert isinstance(frozen, FrozenLinear)
    assert (frozen.in_features, frozen.out_features) == (3, 5)
    found = frozen(found_x)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(1))
    wanted.backward(upstream)
    found.backward(upstream)
    torch.testing.assert_close(found_x.grad, wanted_x.grad)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


def test_bytes_are_those_that_lie_there() -> None:
    matrix, bias, _ = example()
    assert PlainWeight(matrix).resident_bytes == 4 * 15
    assert Halved(matrix).resident_bytes == 2 * 15
    assert PlainWeight(matrix).dense(torch.float32).data_ptr() == matrix.data_ptr()
    layer = nn.Sequential(FrozenLinear(Halved(matrix), bias))
    assert sum(t.nbytes for t in (*layer.parameters(), *layer.buffers())) == 2 * 15 + 4 * 5
