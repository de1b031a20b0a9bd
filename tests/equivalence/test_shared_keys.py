"""Models whose later layers need more than hidden states: keys of earlier layers, inputs of their own, several copies.

What crosses a border between stages has gradients, goes to several layers, and is made of rows of several tasks: no bit of
a result may depend on where the borders are, on neighbours, on recomputation or on a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlora_worker.protocol import LoRAConfig, Training
from tests.equivalence.tasks import Base, Row, Task, assert_same, engines_of, train
from tests.equivalence.test_onednn import same_bits
from tests.equivalence.test_resume import Crashed, assert_bit_identical, crash_at, play, whole
from tests.fixtures.memory_store import MemoryStore
from tests.fixtures.model_options import FAMILY, TARGETS, VARIANTS

KINDS = ["gemma4_text, keys shared", "gemma3n_text"]
# Wide enough for products whose bits depend on the number of rows. torch computes the last elements of a tensor in another
# way where there are less than 32: as in published models, all widths are multiples of that.
WIDE = {
    "hidden_size": 96, "head_dim": 32, "num_key_value_heads": 1, "intermediate_size": 64,
    "hidden_size_per_layer_input": 32,
}  # fmt: skip
TRAINING = Training(
    batch_size=3, learning_rate=2e-3, max_grad_norm=0.5, seed=5, checkpoint_every_steps=2, warmup_steps=2
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def base(small_model: Any, kind: str) -> Base:
    model_type, options = VARIANTS.get(kind, (kind, FAMILY.get(kind, {})))
    sizes = {name: size for name, size in WIDE.items() if options.get(name) != 0}
    saved = small_model(model_type, **({"num_hidden_layers": 4} | options | sizes))
    return Base(saved.folder, saved.model)


def task(
    kind: str, rows: Callable[..., list[Row]], name: str, seed: int, steps: int = 6, **options: Any
) -> Task:
    targets = TARGETS.get(kind, ("all-linear",))
    lora = LoRAConfig(**({"rank": 4, "dropout": 0.1, "target_modules": targets} | options))
    return Task(name, lora, TRAINING, rows(11, seed, vocabulary=97), steps)


@pytest.mark.parametrize("kind", [*KINDS, "gemma4_text"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_task_has_the_bits_of_itself_alone_beside_any_neighbour(
    base: Base, kind: str, rows: Callable[..., list[Row]], recompute: bool
) -> None:
    own = task(kind, rows, "own", 1)
    before = task(kind, rows, "before", 2, rank=2)
    behind = task(kind, rows, "behind", 3, target_modules=("v_proj",))
    alone = train(base, 1, [own], recompute=recompute)["own"]
    assert set(alone.microbatches) == {1}
    for company in ([before, own], [own, behind], [behind, own, before]):
        beside = train(base, 1, company, recompute=recompute)["own"]
        assert beside.microbatches == alone.microbatches
        assert same_bits(beside, alone)


def test_no_bit_depends_on_where_the_borders_are(
    base: Base, kind: str, rows: Callable[..., list[Row]]
) -> None:
    """Of four layers the last two use keys: up to a border behind each layer. Steps of one row are not cut."""
    single = TRAINING.model_copy(update={"batch_size": 1})
    own = Task("own", LoRAConfig(rank=4, target_modules=TARGETS[kind]), single, rows(6, 1, vocabulary=97), 5)
    whole_model, *cut = (train(base, stages, [own])["own"] for stages in (1, 2, 3, 4))
    assert all(same_bits(one, whole_model) for one in cut)


@pytest.mark.parametrize("stages", [2, 4])
def test_recomputation_changes_no_bit_where_several_microbatches_are_in_flight(
    base: Base, kind: str, rows: Callable[..., list[Row]], stages: int
) -> None:
    tasks = [task(kind, rows, "a", 1), task(kind, rows, "b", 2, target_modules=("k_proj", "v_proj"))]
    kept, again = (train(base, stages, tasks, budget=40, recompute=each) for each in (False, True))
    for name in ("a", "b"):
        assert max(kept[name].microbatches) > 1
        assert same_bits(again[name], kept[name])
    one = train(base, 1, tasks)
    for name in ("a", "b"):
        assert_same(kept[name], one[name], losses=1e-6, weights=1e-5)


def test_keys_that_only_later_stages_use_are_learnt(
    base: Base, kind: str, rows: Callable[..., list[Row]]
) -> None:
    """Gradients of the keys and values that the last two layers use come back to the layers that made them."""
    own = task(kind, rows, "own", 1, target_modules=("k_proj", "v_proj"), layers_to_transform=(0, 1))
    trained = train(base, 4, [own])["own"]
    for name, tensor in trained.adapter.items():
        if "lora_B" in name:
            assert tensor.any(), name
    assert same_bits(train(base, 4, [own], recompute=True)["own"], trained)


def test_a_task_goes_on_after_a_crash_bit_for_bit(
    base: Base, kind: str, rows: Callable[..., list[Row]]
) -> None:
    own = task(kind, rows, "own", 1, steps=10)
    undisturbed = whole(play(base, 2, [own]), own)
    store = MemoryStore()
    first = play(base, 2, [own], store=store, script=crash_at(6, task="own", saved=4))
    assert isinstance(first.error, Crashed)
    second = whole(play(base, 2, [own], store=store), own)
    assert (second.tasks["own"].checkpoint.resumed_step or 0) >= 4
    assert_bit_identical(second, undisturbed, "own")


def test_what_a_stage_holds_of_a_border_is_as_wide_as_its_neighbour_sends(base: Base) -> None:
    stages = [engine.stage for engine in engines_of(base, 4)]
    assert [one.leaving for one in stages[:-1]] == [one.entering for one in stages[1:]]
    assert stages[-1].leaving.width == stages[-1].architecture.hidden_size
    keys = [len(one.entering.shared) for one in stages]
    assert keys == [0, 1, 2, 1], "the third layer uses those of the first, the fourth those of the second"
    inputs = [one.entering.inputs for one in stages]
    assert inputs == [32 * layers for layers in (4, 3, 2, 1)]
