"""Which library multiplies: by time, robustly, and only where it is exact and there is room."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mlora_worker.frozen import choose as module
from mlora_worker.frozen.choose import Clock, choose
from mlora_worker.frozen.onednn import OneDnnWeight, available
from mlora_worker.frozen.plain import PlainWeight

CPU = torch.device("cpu")
SHAPES = {(64, 32): 2, (32, 64): 1}
needs_library = pytest.mark.skipif(not available(torch.float32), reason="this build of torch has no oneDNN")


def clock_of(plain: float, packed: float) -> Clock:
    """Of a machine where a pair of products takes so long with the one and the other."""

    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            for took in (plain, packed):
                yield now
                now += took
                yield now

    told = ticks()
    return lambda: next(told)


@needs_library
@pytest.mark.parametrize(
    ("plain", "packed", "taken"),
    [(2.4, 1.0, "oneDNN"), (1.0, 1.0, "torch"), (1.2, 1.0, "torch"), (1.0, 2.0, "torch")],
)
def test_where_rows_are_cut_the_other_is_taken_only_if_it_is_much_faster(
    plain: float, packed: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "joins_rows", lambda _: False)
    check(plain, packed, taken)


@needs_library
@pytest.mark.parametrize(
    ("plain", "packed", "taken"),
    [(2.4, 1.0, "oneDNN"), (1.0, 1.0, "oneDNN"), (0.9, 1.0, "oneDNN"), (1.0, 2.0, "torch")],
)
def test_where_rows_are_joined_it_is_taken_unless_it_is_much_slower(
    plain: float, packed: float, taken: str
) -> None:
    check(plain, packed, taken)


def check(plain: float, packed: float, taken: str) -> None:
    chosen = choose(SHAPES, torch.float32, CPU, room=True, clock=clock_of(plain, packed))
    assert chosen.name == taken
    assert chosen.freeze is (OneDnnWeight if taken == "oneDNN" else PlainWeight)
    assert f"{plain / packed:.2f} times" in chosen.why


@needs_library
def test_plain_products_stay_where_there_is_no_room_no_cpu_or_no_such_type() -> None:
    fast = clock_of(9.0, 1.0)
    assert choose(SHAPES, torch.float32, CPU, room=False, clock=fast).name == "torch"
    assert choose(SHAPES, torch.float32, torch.device("cuda"), room=True, clock=fast).name == "torch"
    assert choose(SHAPES, torch.float16, CPU, room=True, clock=fast).name == "torch"


@needs_library
def test_what_is_not_exact_enough_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._EXACT, torch.float32, 0.0)
    chosen = choose(SHAPES, torch.float32, CPU, room=True, clock=clock_of(9.0, 1.0))
    assert chosen.name == "torch"
    assert "differ" in chosen.why


@needs_library
def test_a_noisy_moment_does_not_change_the_choice() -> None:
    """Somebody else's burst hits one try of the faster library."""
    usual = clock_of(2.4, 1.0)
    calls = 0

    def noisy() -> float:
        nonlocal calls
        calls += 1
        return usual() + (50.0 if calls >= 12 else 0.0)

    assert choose(SHAPES, torch.float32, CPU, room=True, clock=noisy).name == "oneDNN"
