"""Two operators over the same objects: one acts, the other takes over, and a frozen one does nothing when it comes back."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.protocol import TaskPhase

pytestmark = pytest.mark.integration

SECONDS = {"leaseSeconds": 5, "deadlineSeconds": 3}


class Replicas:
    """Two operators, ``one`` and ``two``, that share the house's settings and a lease."""

    def __init__(self, bench: Any, operators: dict[str, Any]) -> None:
        self.bench = bench
        self.operators = operators

    def start(self, name: str) -> None:
        os.environ["MLORA_POD_NAME"] = name  # as the chart does
        try:
            self.operators[name].start()
        finally:
            del os.environ["MLORA_POD_NAME"]

    def holder(self) -> str:
        leases = self.bench.kubectl.json("get", "leases")["items"]
        return str(leases[0]["spec"]["holderIdentity"]) if leases else ""

    def leader(self) -> str:
        return str(self.bench.until(self.holder, "one of them leads"))

    def other(self, name: str) -> str:
        (other,) = set(self.operators) - {name}
        return other

    def signal(self, name: str, number: signal.Signals) -> None:
        self.operators[name]._process.send_signal(number)

    def acts(self, name: str) -> int:
        """How often this one told of a transition of a task or pipeline."""
        lines = self.operators[name].log.read_text().splitlines()
        return sum("LoRATask " in line or "LoRAPipeline " in line for line in lines)


@pytest.fixture(scope="module")
def operators(house: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    house.operator.stop()
    settings = json.loads(Path(house.operator._settings).read_text()) | {"leaderElection": SECONDS}
    make = type(house.operator)
    made = {
        name: make(house.kubectl.kubeconfig, settings, tmp_path_factory.mktemp(name))
        for name in ("one", "two")
    }
    yield made
    for operator in made.values():
        operator.stop()


@pytest.fixture
def replicas(bench: Any, operators: dict[str, Any]) -> Replicas:
    """Both run."""
    made = Replicas(bench, operators)
    for name, operator in operators.items():
        if operator._process is None:
            made.start(name)
    return made


def told(bench: Any) -> Counter[tuple[str, str, str]]:
    """How often each event was told: an operator that acts a second time tells it a second time."""
    events = bench.kubectl.json("get", "events", "--field-selector=involvedObject.kind=LoRATask")["items"]
    return Counter((one["involvedObject"]["name"], one["reason"], one["message"]) for one in events)


def succeed(bench: Any, *names: str) -> None:
    bench.kubectl(
        "wait", "--for=condition=Succeeded", "--timeout=40s", *(f"loratask/{name}" for name in names)
    )


def assert_each_once(bench: Any, *names: str) -> None:
    assert Counter(bench.coordinator.uploads) == Counter(names)
    generations = [plan.generation for plan in bench.coordinator.plans]
    assert generations == sorted(set(generations)), "two sent plans of the same number"
    assert set(told(bench).values()) == {1}


def test_one_of_two_acts_and_when_it_ends_the_other_goes_on_in_a_moment(replicas: Replicas) -> None:
    bench = replicas.bench
    names = [f"t{number}" for number in range(4)]
    for name in names:
        bench.apply(name)
    leader = replicas.leader()
    follower = replicas.other(leader)
    succeed(bench, *names)
    assert_each_once(bench, *names)
    assert replicas.acts(leader) > 0
    assert replicas.acts(follower) == 0
    assert replicas.operators[follower].health() == 200

    replicas.signal(leader, signal.SIGTERM)
    asked = time.monotonic()
    bench.until(lambda: replicas.holder() == follower, "the other leads", SECONDS["leaseSeconds"])
    print(f"handed over after {time.monotonic() - asked:.1f} s")
    bench.apply("later")
    succeed(bench, "later")
    assert_each_once(bench, *names, "later")
    replicas.operators[leader].stop()


def test_a_frozen_leader_finds_out_before_it_writes(replicas: Replicas) -> None:
    bench = replicas.bench
    bench.coordinator.hold = TaskPhase.TRAINING
    bench.apply("before")
    bench.until(lambda: bench.status("loratask", "before").get("state") == "Training", "it trains")
    leader = replicas.leader()
    follower = replicas.other(leader)
    said = replicas.acts(leader)

    replicas.signal(leader, signal.SIGSTOP)
    bench.until(lambda: replicas.holder() == follower, "the other leads", 20)
    bench.coordinator.hold = None
    bench.apply("meanwhile")
    replicas.signal(leader, signal.SIGCONT)
    succeed(bench, "before", "meanwhile")
    assert_each_once(bench, "before", "meanwhile")
    bench.until(lambda: "is no longer the leader" in replicas.operators[leader].log.read_text(), "it noticed")
    assert replicas.acts(leader) == said
    assert replicas.holder() == follower
    assert replicas.operators[leader].health() == 200


def test_a_killed_leader_is_followed_when_its_lease_ends(replicas: Replicas) -> None:
    bench = replicas.bench
    bench.apply("before")
    succeed(bench, "before")
    leader = replicas.leader()
    replicas.signal(leader, signal.SIGKILL)
    replicas.operators[leader]._process.wait(10)
    replicas.operators[leader]._process = None
    bench.apply("after")
    bench.until(lambda: replicas.holder() == replicas.other(leader), "the other leads", 20)
    succeed(bench, "after")
    assert_each_once(bench, "before", "after")
