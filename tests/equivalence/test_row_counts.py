"""No bit depends on neighbours, even with a matrix library whose sums depend on how many rows a product has: each task's
rows are multiplied by themselves, also by matrices that it does not adapt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from mlora_worker.frozen.plain import DenseMultiplier, PlainWeight
from mlora_worker.protocol import LoRAConfig
from tests.equivalence.tasks import Base, Row, Task, train
from tests.equivalence.test_onednn import STEPS, TRAINING, neighbours, same_bits

TARGETS = {
    "all of the model": {"target_modules": ("all-linear",)},
    "one module": {"target_modules": ("o_proj",)},
    "the last layer alone": {"target_modules": ("all-linear",), "layers_to_transform": (1,)},
}


@pytest.fixture
def library_that_counts_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    times, back = DenseMultiplier.times, DenseMultiplier.back

    def counting(product: Tensor) -> Tensor:
        return product.mul_(1 + 1e-4 * len(product))

    def own_times(
        self: DenseMultiplier, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        return counting(times(self, x, bias, out))

    def own_back(
        self: DenseMultiplier, grad: Tensor, onto: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        total = counting(back(self, grad, None, None))
        total = total if onto is None else onto + total
        target = onto if out is None else out
        return total if target is None else target.copy_(total)

    def own_forward(self: PlainWeight, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return own_times(DenseMultiplier(self.dense(x.dtype)), x.flatten(0, -2), bias).view(*x.shape[:-1], -1)

    monkeypatch.setattr(DenseMultiplier, "times", own_times)
    monkeypatch.setattr(DenseMultiplier, "back", own_back)
    monkeypatch.setattr(PlainWeight, "forward", own_forward)


@pytest.mark.usefixtures("library_that_counts_rows")
@pytest.mark.parametrize("adapted", TARGETS)
def test_a_task_beside_neighbours_has_the_bits_of_itself_alone(
    base: Base, rows: Callable[..., list[Row]], adapted: str
) -> None:
    def subject() -> Task:
        lora = LoRAConfig.model_validate({"rank": 8, "alpha": 16, "dropout": 0.1} | TARGETS[adapted])
        return Task("subject", lora, TRAINING, rows(22, 1), STEPS)

    alone = train(base, 1, [subject()])["subject"]
    first, last = neighbours(rows)
    own = LoRAConfig(rank=4, alpha=8, target_modules=("o_proj",))
    beside = Task("beside", own, TRAINING, rows(9, 5, 10, 30), STEPS)
    together = train(base, 1, [first, beside, subject(), last])["subject"]
    assert set(alone.microbatches) == set(together.microbatches) == {1}
    assert same_bits(together, alone)
