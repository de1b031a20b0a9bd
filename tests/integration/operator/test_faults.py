"""What the API server, the network and the clock do to the operator: it comes back by itself, and users see nothing of it.

Between the operator and the real API server stands a proxy that breaks things; users and the coordinator do not go through
it. In each story one task trains when the fault begins and another is applied while it lasts; both end within seconds after
it. A watch of its own sees every version of every status on the way.
"""

from __future__ import annotations

import base64
import json
import random
import subprocess
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlora_worker.protocol import TaskPhase
from tests.fixtures.api_proxy import Answer, ApiProxy, Request, Rule, pass_on

pytestmark = pytest.mark.integration

SKEWED = Path(__file__).parents[2] / "fixtures" / "skewed_operator.py"
LASTS = 3.0  # seconds of a fault
AWAY = 5.0
AFTER = 10.0  # seconds until everything has to be right again
SLOW = 1.5
# How a condition may go from the first version of a status to the last one. More, and somebody was told a thing that was
# taken back.
COURSES = {
    "Accepted": ("False", "True"),  # until its pipeline is made
    "Admitted": ("False", "True", "False"),
    "Running": ("False", "True", "False"),
    "Succeeded": ("True",),
    "Failed": ("False",),
    "Finished": ("True",),
    "Ready": ("False", "True"),
    "WorkersAvailable": ("False",),
    "Stalled": ("False",),
}
STATES = ("Pending", "Preparing", "Queued", "Training", "Saving", "Succeeded")


class Statuses:
    """All versions of the statuses of tasks and pipelines, as a watch shows them."""

    def __init__(self, bench: Any) -> None:
        self._seen: defaultdict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
        self._watches = [self._watch(bench.kubectl, kind) for kind in ("loratasks", "lorapipelines")]

    def _watch(self, kubectl: Any, kind: str) -> subprocess.Popen[str]:
        watch = subprocess.Popen(
            [
                str(kubectl.program), "--kubeconfig", str(kubectl.kubeconfig), "--namespace", kubectl.namespace,
                "get", kind, "--watch", "--output", "json",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(watch,), daemon=True).start()
        return watch

    def _read(self, watch: subprocess.Popen[str]) -> None:
        decoder, text = json.JSONDecoder(), ""
        assert watch.stdout is not None
        for line in watch.stdout:
            text += line
            if line.rstrip() == "}":  # the end of an object that stands alone
                found, _ = decoder.raw_decode(text.strip())
                text = ""
                for one in found.get("items", [found]):
                    self._seen[one["kind"], one["metadata"]["name"]].append(one.get("status", {}))

    def end(self) -> None:
        for watch in self._watches:
            watch.kill()
            watch.wait()

    def taken_back(self) -> list[str]:
        """What went back and forth, in words."""
        found = []
        for (kind, name), statuses in list(self._seen.items()):
            courses: defaultdict[str, list[str]] = defaultdict(list)
            for status in statuses:
                for one in status.get("conditions", ()):
                    courses[one["type"]].append(one["status"])
                if kind == "LoRATask" and "state" in status:
                    courses["state"].append(status["state"])
            for what, course in courses.items():
                told = [one for i, one in enumerate(course) if i == 0 or course[i - 1] != one]
                if not _follows(told, STATES if what == "state" else COURSES[what]):
                    found.append(f"{kind} {name}: {what}: {' '.join(told)}")
        return found

    def versions(self, name: str) -> int:
        return len(self._seen["LoRATask", name])


def _follows(told: list[str], course: tuple[str, ...]) -> bool:
    """``told`` is ``course`` with perhaps some of it left out."""
    rest = iter(course)
    return all(one in rest for one in told)


@pytest.fixture(scope="module")
def proxy(house: Any) -> Iterator[ApiProxy]:
    """Before the API server that the kubeconfig of the tests names."""
    content = house.kubectl.json("config", "view", "--raw", "--minify")
    (cluster,) = content["clusters"]
    authority = base64.b64decode(cluster["cluster"]["certificate-authority-data"]).decode()
    with ApiProxy(cluster["cluster"]["server"], authority) as opened:
        yield opened


@pytest.fixture(scope="module")
def make_operator(house: Any, proxy: ApiProxy, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """Makes an operator with the house's settings that goes through the proxy. The house's own rests."""
    house.operator.stop()
    content = house.kubectl.json("config", "view", "--raw", "--minify")
    content["clusters"][0]["cluster"] = {"server": proxy.url}
    settings = json.loads(Path(house.operator._settings).read_text())
    # Who has a group keeps it: what shall be seen here are faults, not idle pipelines.
    settings["models"][0]["idleTimeout"] = "1h"

    def made() -> Any:
        folder = tmp_path_factory.mktemp("behind-a-proxy")
        (folder / "kubeconfig").write_text(json.dumps(content))
        return type(house.operator)(folder / "kubeconfig", settings, folder)

    return made


@pytest.fixture(scope="module")
def operator(make_operator: Callable[[], Any]) -> Iterator[Any]:
    made = make_operator()
    yield made
    made.stop()


@pytest.fixture
def behind(bench: Any, proxy: ApiProxy, operator: Any) -> Iterator[Any]:
    """The bench, with the operator behind a proxy that does nothing yet."""
    proxy.rule = pass_on
    bench.operator = operator
    if operator._process is None:
        operator.start()
    yield bench
    proxy.rule = pass_on


def answers(status: int, part: float = 1.0, *, done: bool = False) -> Rule:
    """``status`` in the place of ``part`` of all answers but those of watches; ``done``: of writes that were done."""
    rng = random.Random(1)

    def rule(request: Request) -> Answer:
        hit = not request.is_watch and rng.random() < part and (request.is_write or not done)
        return Answer(status, done=done) if hit else Answer()

    return rule


def slowly(request: Request) -> Answer:
    return Answer(delay=0.0 if request.is_watch else SLOW)


def story(behind: Any, begin: Callable[[], None], end: Callable[[], None], lasts: float = LASTS) -> None:
    """One task trains when the fault begins, one is applied while it lasts."""
    statuses = Statuses(behind)
    try:
        behind.coordinator.hold = TaskPhase.TRAINING
        behind.apply("before")
        behind.until(lambda: behind.condition("before", "Running")[0] == "True", "the first task trains")
        begin()
        behind.apply("meanwhile")
        behind.coordinator.hold = None
        time.sleep(lasts)
        end()
        behind.kubectl(
            "wait",
            "--for=condition=Succeeded",
            f"--timeout={AFTER:.0f}s",
            "loratask/before",
            "loratask/meanwhile",
        )
        behind.until(lambda: statuses.versions("meanwhile") > 0, "the watch has seen it")
    finally:
        statuses.end()
    assert statuses.taken_back() == []
    assert Counter(behind.coordinator.uploads) == Counter(["before", "meanwhile"])
    ours = ("--selector", "app.kubernetes.io/managed-by=mlora-operator")
    children = behind.kubectl.json("get", "service,statefulset,secret,lorapipeline", *ours)["items"]
    assert Counter(one["kind"] for one in children)["StatefulSet"] == 1
    assert max(Counter(one["kind"] for one in children).values()) == 1
    told = behind.kubectl.json("get", "events", "--field-selector=involvedObject.kind=LoRATask")["items"]
    again = Counter((one["involvedObject"]["name"], one["reason"]) for one in told)
    assert set(again.values()) == {1}, "an event was told twice"
    assert behind.operator.health() == 200


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(answers(500), id="500"),
        pytest.param(answers(429), id="429"),
        pytest.param(answers(409), id="409"),
        pytest.param(answers(500, 0.5, done=True), id="done, but 500 is heard of every other"),
        pytest.param(slowly, id="slow"),
    ],
)
def test_an_api_server_that_fails_is_waited_for(behind: Any, proxy: ApiProxy, rule: Rule) -> None:
    def set_rule(wanted: Rule) -> None:
        proxy.rule = wanted

    story(behind, lambda: set_rule(rule), lambda: set_rule(pass_on))


def test_an_api_server_that_is_away_is_waited_for(behind: Any, proxy: ApiProxy) -> None:
    story(behind, proxy.down, proxy.up, AWAY)


def test_watches_that_are_cut_again_and_again_are_taken_up_where_they_ended(
    behind: Any, proxy: ApiProxy
) -> None:
    over = threading.Event()
    cuts: list[int] = []

    def cut() -> None:
        while not over.wait(0.3):
            cuts.append(proxy.cut_watches())

    thread = threading.Thread(target=cut, daemon=True)
    story(behind, thread.start, over.set)
    thread.join(5)
    assert sum(cuts) > 6, "hardly a watch was cut"


def test_hundreds_of_failures_leave_nothing_in_memory(behind: Any, proxy: ApiProxy, operator: Any) -> None:
    behind.coordinator.hold = TaskPhase.TRAINING
    behind.apply("before")
    behind.until(lambda: behind.condition("before", "Running")[0] == "True", "the task trains")

    def trouble() -> int:
        """Kilobytes that are resident after some seconds of it."""
        begun = len(proxy.requests)
        proxy.rule = answers(500, 0.7)
        for number in range(20):
            proxy.cut_watches()
            behind.kubectl("annotate", "loratask", "before", f"number={number}", "--overwrite")
        proxy.rule = pass_on
        assert len(proxy.requests) - begun > 100
        status = Path(f"/proc/{operator._process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))

    first = trouble()
    assert trouble() - first < 10_000


@pytest.mark.parametrize("skew", [3600, -3600])
def test_a_clock_that_is_wrong_by_an_hour_changes_nothing(
    bench: Any, operator: Any, make_operator: Callable[[], Any], skew: int
) -> None:
    operator.stop()
    bench.operator = make_operator()
    bench.operator.program = (str(SKEWED), str(skew))
    bench.operator.start()
    try:
        story(bench, lambda: None, lambda: None, lasts=0.0)
    finally:
        bench.operator.stop()
