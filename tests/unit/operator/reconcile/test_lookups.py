"""What is looked up again and again: when, and what holds meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mlora_operator.reconcile.lookups import MAX_AGE, Lookups
from mlora_operator.reconcile.ports import Trust
from mlora_operator.reconcile.snapshot import Key

TOY = Key("team-a", "toy")


class Tokens:
    """What is asked of a cluster here; the test sets it."""

    def __init__(self) -> None:
        self.token: str | None = None
        self.trust: Trust | None = None
        self.now = 0.0

    async def read_token(self, _: Any) -> str | None:
        return self.token

    async def read_trust(self, _: Any) -> Trust | None:
        return self.trust

    def __getattr__(self, name: str) -> Any:
        return None  # reads of other kinds, which nobody makes


async def test_the_last_token_holds_until_another_one_is_there() -> None:
    """The Secret was deleted: the coordinator still has the token of before."""
    cluster = Tokens()
    lookups = Lookups(cluster, lambda: cluster.now)  # type: ignore[arg-type]
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
    lookups = Lookups(cluster, lambda: cluster.now)  # type: ignore[arg-type]
    pipelines: Any = [SimpleNamespace(key=TOY)]

    async def look(trust: Trust | None) -> Any:
        cluster.trust = trust
        cluster.now += MAX_AGE
        await lookups.tokens(pipelines)
        return dict(await lookups.trusts(pipelines))

    first, second = Trust("host", "first", "Secret a"), Trust("host", "second", "Secret a")
    assert await look(None) == {}
    assert [await look(one) for one in (first, None, second)] == [{TOY: first}, {TOY: first}, {TOY: second}]
