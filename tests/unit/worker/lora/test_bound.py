"""Tables from what is known of tasks since their load, beside tables from a list of segments."""

from __future__ import annotations

import gc

import torch

from mlora_worker.lora.bound import BoundGroups, Placed, TaskPart, TaskProducts
from mlora_worker.lora.dropout import token_keys
from mlora_worker.lora.triton_tables import TableGroup
from tests.fixtures.interpreted import triton_products

INPUTS, OUTPUTS = 10, (6, 4)


def part(group: int, rank: int, members: tuple[int, ...] = (0, 1)) -> TaskPart:
    a = torch.zeros(len(members) * rank, INPUTS)
    b = tuple(torch.zeros(OUTPUTS[member], rank) for member in members)
    return TaskPart(
        group=group, rank=rank, members=members, a=a, b=b, grad_a=torch.zeros_like(a),
        grad_b=tuple(torch.zeros_like(one) for one in b), scale=1.0 + rank, mask_name=f"group {group}",
    )  # fmt: skip


def task(*parts: TaskPart, dropout: float = 0.0) -> TaskProducts:
    return TaskProducts(parts, dropout)


def placed(*tasks: tuple[TaskProducts, int], step: int = 1) -> list[Placed]:
    """With how many tokens each."""
    made, start = [], 0
    for number, (one, tokens) in enumerate(tasks):
        keys = token_keys(number, step, 0, (tokens,)) if one.dropout else None
        made.append(Placed(one, slice(start, start := start + tokens), 0.25 / (1 + number), keys))
    return made


DROPPING = task(part(0, 4), part(1, 17, (1,)), part(3, 2), dropout=0.3)
TWICE = task(part(0, 2, (0,)), part(0, 16, (1,)), part(3, 1))  # two ranks on one group
PLAIN = task(part(3, 8))


def same(own: object, other: object) -> None:
    if isinstance(own, triton_products.Rounds) and isinstance(other, triton_products.Rounds):
        assert len(own.rounds) == len(other.rounds)
        for one, two in zip(own.rounds, other.rounds, strict=True):
            same(one, two)
        return
    assert isinstance(own, TableGroup)
    assert isinstance(other, TableGroup)
    for name in ("table", "tiles", "chunks"):
        assert torch.equal(getattr(own, name), getattr(other, name)), name
    assert (own.token_keys is None) == (other.token_keys is None)
    if own.token_keys is not None and other.token_keys is not None:
        for segment in own:  # who keeps everything has any keys
            rows = segment.rows
            assert segment.mask is None or torch.equal(own.token_keys[rows], other.token_keys[rows])
    for name in ("size", "low_elements", "partial_elements", "widest_slab", "widest", "aligned", "vector"):
        assert getattr(own, name) == getattr(other, name), name
    assert [id(one.a) for one in own] == [id(one.a) for one in other]
    assert [one.rows for one in own] == [one.rows for one in other]


def test_they_are_those_that_lists_of_segments_give() -> None:
    products = triton_products.TritonProducts()
    for step in (1, 2):  # the second time from what was written the first time
        own = placed((DROPPING, 70), (TWICE, 3), (PLAIN, 40), (DROPPING, 5), step=step)
        bound = BoundGroups(4, own)
        lists = [bound[group] for group in range(4)]
        found, wanted = products.prepare(bound), products.prepare(lists)
        for group in (0, 1, 3):
            same(found[group], wanted[group])
        assert len(found[2]) == len(wanted[2]) == 0


def test_a_task_that_drops_out_keeps_everything_when_it_is_evaluated() -> None:
    products = triton_products.TritonProducts()
    (training,) = placed((DROPPING, 9))
    evaluating = Placed(DROPPING, training.rows, training.weight, None)
    for one in (training, evaluating, training):
        bound = BoundGroups(4, [one])
        same(products.prepare(bound)[0], products.prepare([bound[0]])[0])


def test_nothing_is_kept_of_a_task_that_has_left() -> None:
    products = triton_products.TritonProducts()
    own = task(part(0, 4))
    products.prepare(BoundGroups(1, placed((own, 5))))
    assert len(products._rows) == 1
    del own
    gc.collect()
    assert not products._rows


def test_without_adapters_there_is_nothing_to_prepare() -> None:
    bound = BoundGroups(2, placed((task(), 5)))
    assert [len(own) for own in triton_products.TritonProducts().prepare(bound)] == [0, 0]
