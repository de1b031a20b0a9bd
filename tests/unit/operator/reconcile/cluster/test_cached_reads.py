"""What is looked up again and again: when, and what holds meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlora_operator.reconcile.cluster.cached_reads import MAX_AGE, CachedReads
from mlora_operator.reconcile.ports import CoordinatorTrust
from mlora_operator.reconcile.state.snapshot import Key

TOY = Key("team-a", "toy")


class Tokens:
    """What is asked of a cluster here; the test sets it."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.trust: CoordinatorTrust | None = None
        self.now = 0.0

    async def read_token(self, _: Any) -> str | None:
        return self.token

    async def read_trust(self, _: Any) -> CoordinatorTrust | None:
        return self.trust

    def __getattr__(self, name: str) -> Any:
        return None  # reads of other kinds, which nobody makes


async def test_the_last_token_holds_until_another_one_is_there() -> None:
    """The Secret was deleted: the coordinator still has the token of before."""
    cluster = Tokens()
    lookups = CachedReads(cluster, lambda: cluster.now)  # type: ignore[arg-type]
    pipelines: Any = [SimpleNamespace(key=TOY)]

    async def look(token: str | None) -> Any:
        cluster.token = token
        cluster.now += MAX_AGE
        return dict(await lookups.tokens(pipelines))

    assert await look(None) == {}
    assert await look("first") == {TOY: "first"}
    assert await look(None) == {TOY: "first"}
    assert await look("second") == {TOY: "second"}
    assert dict(await lookups.tokens([])) == {}
    assert await look(None) == {}, "a pipeline that was gone has no former token"


async def test_the_last_certificate_is_trusted_until_another_one_is_there() -> None:
    cluster = Tokens()
    lookups = CachedReads(cluster, lambda: cluster.now)  # type: ignore[arg-type]
    pipelines: Any = [SimpleNamespace(key=TOY)]

    async def look(trust: CoordinatorTrust | None) -> Any:
        cluster.trust = trust
        cluster.now += MAX_AGE
        await lookups.tokens(pipelines)
        return dict(await lookups.trusts(pipelines))

    first, second = (
        CoordinatorTrust("host", "first", "Secret a"),
        CoordinatorTrust("host", "second", "Secret a"),
    )
    assert await look(None) == {}
    assert [await look(one) for one in (first, None, second)] == [{TOY: first}, {TOY: first}, {TOY: second}]


class Refusing:
    """A cluster in which one Secret cannot be read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.broken = True
        self.reads: list[float] = []

    async def read_secret(self, key: Key) -> dict[str, str] | None:
        if key.name != "broken":
            return {"a": "b"}
        self.reads.append(self.now)
        if self.broken:
            raise RuntimeError("403: not\nfor you")
        return {"a": "c"}

    def __getattr__(self, name: str) -> Any:
        return None


async def test_what_cannot_be_read_is_tried_later_and_later_and_its_cause_is_known(caplog: Any) -> None:
    cluster = Refusing()
    lookups = CachedReads(cluster, lambda: cluster.now)  # type: ignore[arg-type]
    broken, fine = Key("team-a", "broken"), Key("team-a", "fine")
    for second in range(600):
        cluster.now = float(second)
        assert dict(await lookups.secrets({broken, fine})) == {fine: {"a": "b"}}
    assert dict(lookups.unread()) == {("Secret", broken): "403: not\\nfor you"}
    waits = [later - sooner for sooner, later in zip(cluster.reads, cluster.reads[1:], strict=False)]
    assert waits[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert len(cluster.reads) <= 17, "a minute at most between two tries, and no less"
    assert len(caplog.messages) == len(cluster.reads)
    cluster.broken = False
    cluster.now += 60.0
    assert dict(await lookups.secrets({broken, fine}))[broken] == {"a": "c"}
    assert not lookups.unread()


async def test_a_value_that_was_read_holds_while_it_cannot_be_read_again() -> None:
    cluster = Refusing()
    cluster.broken = False
    lookups = CachedReads(cluster, lambda: cluster.now)  # type: ignore[arg-type]
    broken = Key("team-a", "broken")
    await lookups.secrets({broken})
    cluster.broken = True
    cluster.now = MAX_AGE
    assert dict(await lookups.secrets({broken})) == {broken: {"a": "c"}}
    assert not lookups.unread(), "something is known of it"
