"""What the names and patterns of a task cost is counted before anything is matched."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlora_worker.protocol import FailureReason, LoRAConfig, ModelFacts, ModuleShape, Training
from mlora_worker.stream import entries
from mlora_worker.stream.entries import MOST_TEXT, MOST_WORK, Misfit, Paths, entries_of
from mlora_worker.stream.fit import misfit
from mlora_worker.stream.patterns import LARGEST, Automaton, Pattern
from mlora_worker.stream.targets import modules_of, ranks_of, targets_of
from tests.fixtures.stories import stories

INSIDES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
INSIDES = (*INSIDES, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def facts_of(layers: int) -> ModelFacts:
    return ModelFacts(
        hidden_size=64,
        intermediate_size=64,
        layers=layers,
        attention_heads=4,
        vocab_size=97,
        max_positions=4096,
        dtype_bytes=2,
        modules=tuple(
            ModuleShape(
                stage=0,
                name=inside.rpartition(".")[2],
                in_features=64,
                out_features=64,
                count=layers,
                path=f"model.layers.*.{inside}",
                first_layer=0,
            )
            for inside in INSIDES
        ),
    )


SMALL, LARGE = facts_of(2), facts_of(126)

# As the worst are: each of these remembers where it was some characters ago.
HEAVY = tuple(f".*[aeo{number}].{{{number % 20}}}.*" for number in range(64))
NESTED = tuple(f"{'(.*)*' * 9}.{{0,{number}}}" for number in range(64))
FIELDS = ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern")


def lora(field: str, patterns: Sequence[str]) -> LoRAConfig:
    if field.endswith("pattern"):
        return LoRAConfig(target_modules=("all-linear",), **{field: dict.fromkeys(patterns, 8)})
    others = {} if field == "target_modules" else {"target_modules": ("all-linear",)}
    return LoRAConfig(**others, **{field: tuple(patterns)})


class Counted(Automaton):
    """Counts the most steps that RE2 may take."""

    steps = 0

    def __init__(self, patterns: Sequence[Pattern], *, anywhere: bool = False) -> None:
        super().__init__(patterns, anywhere=anywhere)
        self._size = sum(pattern.size for pattern in patterns)

    def matches(self, path: str) -> Iterable[int]:
        Counted.steps += self._size * len(path)
        return super().matches(path)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(entries, "Automaton", Counted)
    monkeypatch.setattr(Counted, "steps", 0)
    return Counted


@pytest.mark.parametrize("facts", [SMALL, LARGE], ids=["2 layers", "126 layers"])
@pytest.mark.parametrize("patterns", [HEAVY, NESTED], ids=["heavy", "nested"])
@pytest.mark.parametrize("count", [1, 4, 16, 64])
@pytest.mark.parametrize("field", FIELDS)
def test_no_task_takes_more_steps_than_its_budget(
    counted: type[Counted], field: str, count: int, patterns: Sequence[str], facts: ModelFacts
) -> None:
    """Whatever the answer is: adapted modules, or why not."""
    misfit(facts, lora(field, patterns[:count]), Training())
    assert counted.steps <= MOST_WORK


def test_the_budget_is_of_all_fields_together(counted: type[Counted]) -> None:
    quarter = HEAVY[:4]
    assert targets_of(LARGE, lora("target_modules", quarter))
    figures = dict.fromkeys(quarter, 8)
    every = LoRAConfig(
        target_modules=quarter, exclude_modules=HEAVY[4:8], rank_pattern=figures, alpha_pattern=figures
    )
    failure = misfit(LARGE, every, Training())
    assert failure is not None
    assert re.search(
        r"lora: its patterns take \d+ instructions, and this model, .* 882 .*, allows \d+", failure.message
    )
    counted.steps = 0
    assert misfit(LARGE, every, Training()) == failure
    assert counted.steps == 0, "nothing is matched before that is said"


@pytest.mark.parametrize(
    ("patterns", "told"),
    [
        (tuple(f".{{{30 + number}}}" * 2 for number in range(60)), f"more than the {LARGEST} instructions"),
        (
            tuple(f"[{'a' * 200}{number}]" for number in range(60)),
            f"but a task must have at most {MOST_TEXT}",
        ),
    ],
)
def test_too_many_patterns_are_refused_whatever_the_model(patterns: Sequence[str], told: str) -> None:
    with pytest.raises(Misfit, match=told) as caught:
        entries_of(lora("target_modules", patterns))
    assert caught.value.reason is FailureReason.INVALID_SPEC


def test_names_are_not_limited_by_the_budget(counted: type[Counted]) -> None:
    names = tuple(f"layers.{layer}.self_attn.q_proj" for layer in range(64))
    config = LoRAConfig(target_modules=("all-linear",), rank_pattern=dict.fromkeys(names, 8))
    assert sum(rank == 8 for rank in ranks_of(LARGE, config).values()) == 64
    assert counted.steps == 0


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": tuple(f"{number:03d}" * 80 for number in range(64))},
        {"target_modules": tuple(f"[{number:02d}]" * 16 for number in range(60))},
        {"target_modules": ("q_proj",), "rank_pattern": {"x" * 256: 1}},
        {"target_modules": ("q_proj", "(" * 250)},
        {"target_modules": ("q_proj",), "layers_to_transform": tuple(range(3, 1024))},
    ],
)
def test_whatever_is_wrong_can_be_told(config: dict[str, Any]) -> None:
    """A failure has room for 2048 characters; one that had not would end the pass for everybody."""
    failure = misfit(SMALL, LoRAConfig(**config), Training())
    assert failure is not None
    assert len(failure.message) < 1500, "and the end of it is not cut off"


def test_many_unknown_names_are_counted() -> None:
    failure = misfit(
        SMALL, LoRAConfig(target_modules=tuple(f"q_proj{number}" for number in range(12))), Training()
    )
    assert failure is not None
    assert "q_proj7 and 4 more is not a linear module" in failure.message
    assert "did you mean q_proj" in failure.message


ENDS = Paths(tuple(module.path for module in modules_of(SMALL)))
CUT = st.sampled_from(sorted(ENDS.by_end))
KEYS = st.tuples(CUT, st.integers(0, 40), st.sampled_from("._-x")).map(
    lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] + 1 :]
)


@settings(max_examples=stories(200), deadline=None)
@given(st.lists(st.one_of(CUT, KEYS), min_size=1, max_size=6, unique=True))
def test_names_match_as_in_peft(names: list[str]) -> None:
    """As targets to the letter; as keys of a pattern, where a dot stands for any character."""
    config = LoRAConfig(target_modules=tuple(names), rank_pattern=dict.fromkeys(names, 2))
    found = entries_of(config)
    targets, keys = found.targets.matched(ENDS), found.ranks.matched(ENDS)
    for name in names:
        for position, path in enumerate(ENDS.paths):
            assert bool(targets[name] >> position & 1) == (path == name or path.endswith(f".{name}"))
            assert bool(keys[name] >> position & 1) == (re.match(rf"(.*\.)?({name})$", path) is not None)


def test_configs_that_differ_in_patterns_or_layers_alone_have_hashes_of_their_own() -> None:
    """Answers are remembered by config: thousands of one hash would be compared with each other, one by one."""
    ranks = {hash(LoRAConfig(rank_pattern={"q_proj": rank})) for rank in range(1, 500)}
    alphas = {hash(LoRAConfig(alpha_pattern={"q_proj": alpha})) for alpha in range(1, 500)}
    layers = {hash(LoRAConfig(layers_to_transform=(layer,))) for layer in range(499)}
    assert (len(ranks), len(alphas), len(layers)) == (499, 499, 499)
