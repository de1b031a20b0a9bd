"""Which faults come, in which order, and at which moments. Pure: a seed names a whole story."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Literal

from bench.chaos_parts.weather import Kind, Moment

FaultKind = Literal[
    "kill_rank", "kill_coordinator", "freeze_rank", "freeze_coordinator", "drain_rank", "drain_coordinator",
    "delete_rank", "delete_coordinator", "kill_operator", "restart_operator", "two_operators",
    "s3_500", "s3_403", "s3_slow", "s3_reset", "kill_while_s3_is_away",
]  # fmt: skip

SHARES: Mapping[FaultKind, int] = {
    "kill_rank": 8,
    "kill_coordinator": 14,
    "freeze_rank": 3,
    "freeze_coordinator": 1,
    "drain_rank": 4,
    "drain_coordinator": 3,
    "kill_operator": 6,
    "two_operators": 2,
    "s3_500": 3,
    "s3_403": 3,
    "s3_slow": 2,
    "s3_reset": 4,
    "kill_while_s3_is_away": 3,
}
"""Of every 56 faults. A frozen coordinator costs the half minute of silence that the operator allows, so it is rare."""
NODE_SHARES: Mapping[FaultKind, int] = {
    "kill_rank": 1,
    "kill_coordinator": 1,
    "freeze_rank": 1,
    "drain_rank": 1,
    "delete_rank": 1,
    "delete_coordinator": 1,
    "kill_operator": 1,
    "restart_operator": 1,
    "two_operators": 1,
    "s3_500": 1,
    "s3_403": 1,
    "s3_slow": 1,
    "s3_reset": 1,
    "kill_while_s3_is_away": 1,
}
"""Of every 14 faults on a real node, where pods can be deleted by force, and the operator is a Deployment."""
QUICK: tuple[FaultKind, ...] = (
    "kill_coordinator", "kill_rank", "s3_reset", "kill_operator", "drain_rank", "kill_while_s3_is_away",
)  # fmt: skip

_ADAPTER, _STEP = r"^adapters/chaos/[^/]+/", r"^adapters/chaos/[^/]+/checkpoints/step-\d+/"
MOMENTS = (
    Moment("upload begins", "PUT", _ADAPTER + r"adapter_model\.safetensors$"),
    Moment("upload half done", "PUT", _ADAPTER + r"README\.md$"),
    Moment("manifest not yet written", "PUT", _ADAPTER + r"manifest\.json$"),
    Moment("manifest written, nobody knows", "PUT", _ADAPTER + r"manifest\.json$", done=True),
    Moment("checkpoint begins", "PUT", _STEP + r"state\.safetensors$"),
    Moment("checkpoint half done", "PUT", _STEP + r"progress\.json$"),
    Moment("checkpoint written, nobody knows", "PUT", _STEP + r"manifest\.json$", done=True),
    Moment("old checkpoints are removed", "DELETE", _STEP + r"progress\.json$"),
)
RESTORING = (
    Moment("model is read", "GET", r"^models/"),
    Moment("rows are fetched", "GET", r"^datasets/"),
    Moment("checkpoint is read", "GET", _STEP + r"state\.safetensors$"),
)
_AT_A_REQUEST = ("s3_500", "s3_403", "s3_reset", "kill_while_s3_is_away")
_KILLS = ("kill_rank", "kill_coordinator", "kill_operator")
# What the ranks start anew after at once. A frozen rank is none of these: in its place the kubelet's probe would act.
_RESTARTS = (
    "kill_rank", "kill_coordinator", "kill_while_s3_is_away", "drain_rank", "drain_coordinator",
    "delete_rank", "delete_coordinator",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """``moment``: the request at which it comes; None: ``delay`` seconds after the world is well. ``hasty``: it does not
    wait until the fault before it is overcome. ``seconds``: how long it lasts. ``share``: of requests, in bad weather."""

    number: int
    kind: FaultKind
    moment: Moment | None = None
    delay: float = 0.0
    hasty: bool = False
    seconds: float = 0.0
    share: float = 1.0

    @property
    def weather(self) -> Kind | None:
        """What the store does meanwhile."""
        match self.kind:
            case "s3_500" | "kill_while_s3_is_away":
                return "500"
            case "s3_403":
                return "403"
            case "s3_slow":
                return "slow"
            case "s3_reset":
                return "reset"
        return None

    def __str__(self) -> str:
        when = f"when {self.moment.name}" if self.moment else f"after {self.delay:.1f} s"
        return f"{self.kind} {when}{' (hasty)' if self.hasty else ''}"


def tell(
    count: int, seed: int, quick: bool = False, shares: Mapping[FaultKind, int] = SHARES
) -> tuple[Fault, ...]:
    """``count`` faults, each kind as often as ``shares`` says, in an order of their own."""
    random = Random(seed)
    kinds = list(QUICK[:count]) if quick else _kinds(count, shares)
    if not quick:
        random.shuffle(kinds)
    before = [None, *kinds[:-1]]
    return tuple(
        _fault(number, kind, random, restarted=former in _RESTARTS)
        for number, (former, kind) in enumerate(zip(before, kinds, strict=True), 1)
    )


def _kinds(count: int, shares: Mapping[FaultKind, int]) -> list[FaultKind]:
    """Largest remainders first; of enough faults (20 of the usual shares) each kind comes at least once."""
    whole = sum(shares.values())
    exact = {kind: share * count / whole for kind, share in shares.items()}
    taken = {kind: max(1, int(part)) for kind, part in exact.items()}
    while sum(taken.values()) != count:
        missing = sum(taken.values()) < count
        furthest = max if missing else min
        candidates = [kind for kind in taken if missing or taken[kind] > 0]
        kind = furthest(candidates, key=lambda kind: exact[kind] - taken[kind])
        taken[kind] += 1 if missing else -1
    return [kind for kind, times in taken.items() for _ in range(times)]


def _fault(number: int, kind: FaultKind, random: Random, *, restarted: bool) -> Fault:
    """``restarted``: the fault before makes the ranks start anew."""
    moment, hasty = None, False
    delay = random.uniform(0.0, 2.0)
    if kind in _KILLS:
        chance = random.random()
        if restarted and chance < 0.4:
            moment, hasty = random.choice(RESTORING), True
        elif chance < 0.7:
            moment = random.choice(MOMENTS)
    elif kind in _AT_A_REQUEST and random.random() < 0.6:
        moment = random.choice(MOMENTS)
    return Fault(
        number=number,
        kind=kind,
        moment=moment,
        delay=delay,
        hasty=hasty,
        seconds=random.uniform(0.5, 4.0),
        share=random.choice((1.0, 0.5)) if kind in ("s3_500", "s3_reset") else 1.0,
    )
