"""One task's AdamW beside torch's own on separate parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mlora_worker.lora.adapter import Adapter
from mlora_worker.lora.optimizer import TaskOptimizer
from mlora_worker.protocol import Optimizer, Training
from mlora_worker.stream.items import Update

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("numbers", "theirs"),
    [
        ({"beta1": 0.8}, {"betas": (0.8, 0.999)}),
        ({"beta1": 0.0, "beta2": 0.95}, {"betas": (0.0, 0.95)}),
        ({"epsilon": 1e-3}, {"eps": 1e-3}),
    ],
)
def test_numbers_of_a_user_are_those_of_torch(numbers: dict[str, float], theirs: dict[str, Any]) -> None:
    adapter = Adapter([{"m": (5, 7)}], rank=2, seed=1, dtype=torch.float32, device=torch.device("cpu"))
    plain = adapter.parameters.detach().clone().requires_grad_()
    training = Training(weight_decay=0.1, optimizer=Optimizer.model_validate(numbers))
    optimizer = TaskOptimizer(adapter, training)
    adamw = torch.optim.AdamW([plain], weight_decay=0.1, **theirs)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 21):
        gradient = torch.randn(plain.shape, generator=generator)
        adapter.gradient.copy_(gradient)
        plain.grad = gradient
        adamw.param_groups[0]["lr"] = 0.01
        adamw.step()
        optimizer.apply(Update(step=step, learning_rate=0.01, clip=1.0))
    torch.testing.assert_close(adapter.parameters.detach(), plain.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_equal_adamw_with_clipped_gradients_and_a_moving_rate(dtype: torch.dtype) -> None:
    shapes = [{"m": (5, 7)}, {"n": (4, 3)}]
    adapter = Adapter(shapes, rank=2, seed=1, dtype=dtype, device=torch.device("cpu"))
    start = adapter.export()
    optimizer = TaskOptimizer(adapter, Training(learning_rate=0.5, weight_decay=0.1))
    plain = [tensor.clone().requires_grad_() for tensor in start.values()]
    adamw = torch.optim.AdamW(plain, lr=0.5, weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    for step, (rate, clip) in enumerate([(0.0, 1.0), (0.02, 0.3), (0.01, 1.0)], start=1):
        views = [view for stack in adapter.gradients for view in (stack.a, *stack.b)]
        for view, parameter in zip(views, plain, strict=True):
            view.copy_(torch.randn(view.shape, generator=generator))
            parameter.grad = view * clip
        adamw.param_groups[0]["lr"] = rate
        adamw.step()
        optimizer.apply(Update(step=step, learning_rate=rate, clip=clip))
        assert not adapter.gradient.any()
    for found, wanted in zip(adapter.export().values(), plain, strict=True):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-6, atol=1e-7)
    assert torch.equal(adapter.compute[0].a, adapter.export()[next(iter(start))].to(dtype))


def test_padding_between_tensors_stays_zero() -> None:
    adapter = Adapter([{"m": (5, 7)}], rank=2, seed=1, dtype=torch.float32, device=torch.device("cpu"))
    optimizer = TaskOptimizer(adapter, Training(weight_decay=0.5))
    for stack in adapter.gradients:
        for view in (stack.a, *stack.b):
            view.fill_(1.0)
    optimizer.apply(Update(step=1, learning_rate=0.1, clip=1.0))
    assert int((adapter.parameters != 0).sum()) == 2 * 5 + 7 * 2


@pytest.mark.parametrize("updates", [16_777_216, 16_777_217, 99_999_999])
def test_updates_are_counted_on_where_float32_counts_no_further(updates: int) -> None:
    """All stages and rank 0 compare their counts: one that stays behind would end the group."""
    adapter = Adapter([{"m": (5, 7)}], rank=2, seed=1, dtype=torch.float32, device=torch.device("cpu"))
    optimizer = TaskOptimizer(adapter, Training())
    optimizer.restore(updates, *optimizer.moments)
    assert optimizer.updates == updates
    for count in (1, 2):
        optimizer.apply(Update(step=updates + count, learning_rate=0.1, clip=1.0))
        assert optimizer.updates == updates + count


def test_the_type_of_the_count_changes_no_bit() -> None:
    ends = []
    for kind in (torch.float32, torch.float64):
        adapter = Adapter([{"m": (5, 7)}], rank=2, seed=1, dtype=torch.float32, device=torch.device("cpu"))
        optimizer = TaskOptimizer(adapter, Training(learning_rate=0.1, weight_decay=0.1))
        state = optimizer._rule._adamw.state[adapter.parameters]  # type: ignore[attr-defined]
        state["step"] = state["step"].to(kind)
        generator = torch.Generator().manual_seed(0)
        for step in range(1, 30):
            adapter.gradient.copy_(torch.randn(adapter.gradient.shape, generator=generator))
            optimizer.apply(Update(step=step, learning_rate=0.1 / step, clip=0.5))
        ends.append(adapter.parameters.detach().clone())
    assert torch.equal(*ends)


def grown(optimizer: TaskOptimizer, adapter: Adapter, steps: int) -> list[torch.Tensor]:
    """Steps with random gradients, a moving rate and clipping; the gradients, clipped."""
    generator, gradients = torch.Generator().manual_seed(0), []
    for step in range(1, steps + 1):
        for stack in adapter.gradients:
            for view in (stack.a, *stack.b):
                view.copy_(torch.randn(view.shape, generator=generator))
        gradients.append(adapter.gradient * 0.5)
        optimizer.apply(Update(step=step, learning_rate=0.1 / step, clip=0.5))
    return gradients


@pytest.mark.parametrize(
    ("numbers", "beta1", "beta2"), [({}, 0.9, 0.99), ({"beta1": 0.7}, 0.7, 0.99), ({"beta2": 0.5}, 0.9, 0.5)]
)
def test_lion_goes_by_the_sign_of_its_mean_and_keeps_one_moment(
    numbers: dict[str, float], beta1: float, beta2: float
) -> None:
    adapter = Adapter([{"m": (5, 7)}, {"n": (4, 3)}], rank=2, seed=1, dtype=torch.float32, device=CPU)
    plain = adapter.parameters.detach().clone()
    lion = Optimizer.model_validate({"type": "lion"} | numbers)
    optimizer = TaskOptimizer(adapter, Training(weight_decay=0.1, optimizer=lion))
    moment = torch.zeros_like(plain)
    for step, gradient in enumerate(grown(optimizer, adapter, 20), start=1):
        rate = 0.1 / step
        direction = torch.sign(beta1 * moment + (1 - beta1) * gradient)
        plain = plain * (1 - rate * 0.1) - rate * direction
        moment = beta2 * moment + (1 - beta2) * gradient
    torch.testing.assert_close(adapter.parameters.detach(), plain, rtol=1e-6, atol=1e-7)
    assert len(optimizer.moments) == 1
    torch.testing.assert_close(optimizer.moments[0], moment, rtol=1e-6, atol=1e-7)
    assert (optimizer.updates, optimizer.bytes) == (20, plain.nbytes)


@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_with_a_ratio_b_learns_as_if_its_rate_were_that_multiple_and_a_as_without(kind: str) -> None:
    def trained(rate: float, ratio: float | None) -> dict[str, torch.Tensor]:
        adapter = Adapter([{"m": (5, 7)}, {"n": (4, 3)}], rank=2, seed=1, dtype=torch.float32, device=CPU)
        training = Training(weight_decay=0.1, optimizer=Optimizer.model_validate({"type": kind}))
        optimizer = TaskOptimizer(adapter, training, ratio)
        for step in range(1, 6):
            generator = torch.Generator().manual_seed(step)
            adapter.gradient.copy_(torch.randn(adapter.gradient.shape, generator=generator))
            optimizer.apply(Update(step=step, learning_rate=rate, clip=1.0))
        return adapter.export()

    mixed, slow, fast = trained(0.01, 8.0), trained(0.01, None), trained(0.08, None)
    for name, tensor in mixed.items():
        torch.testing.assert_close(tensor, (fast if "lora_B" in name else slow)[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(slow[name], fast[name])


@pytest.mark.parametrize(("kind", "ratio"), [("adamw", 4.0), ("lion", None), ("lion", 4.0)])
def test_an_optimizer_goes_on_from_its_moments_bit_for_bit(kind: str, ratio: float | None) -> None:
    training = Training(weight_decay=0.1, optimizer=Optimizer.model_validate({"type": kind}))

    def fresh() -> tuple[Adapter, TaskOptimizer]:
        adapter = Adapter([{"m": (5, 7)}], rank=2, seed=1, dtype=torch.float32, device=CPU)
        return adapter, TaskOptimizer(adapter, training, ratio)

    whole, optimizer = fresh()
    first, half = fresh()
    grown(optimizer, whole, 3)
    grown(half, first, 3)
    second, resumed = fresh()
    second.restore(first.export())
    resumed.restore(half.updates, *(moment.clone() for moment in half.moments))
    grown(optimizer, whole, 4)
    grown(resumed, second, 4)
    assert torch.equal(whole.parameters, second.parameters)
    assert optimizer.updates == resumed.updates == 7


def test_an_optimizer_that_is_not_there_is_refused_and_not_taken_for_another() -> None:
    adapter = Adapter([{"m": (5, 7)}], rank=2, seed=1, dtype=torch.float32, device=CPU)
    with pytest.raises(KeyError):
        TaskOptimizer(adapter, Training(optimizer=Optimizer.model_validate({"type": "adamw8bit"})))
