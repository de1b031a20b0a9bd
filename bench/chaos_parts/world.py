"""What a world of ``python -m bench chaos`` is for those that play in it and judge it, and the user who lives there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from bench.chaos_parts import work
from bench.chaos_parts.processes import Processes
from bench.chaos_parts.reader import Reader
from bench.chaos_parts.story import Fault
from bench.chaos_parts.weather import Weather
from tests.fixtures.faulty_world import end_of
from tests.fixtures.storage import Storage

NAMESPACE = "chaos"
REMEMBERED = r"^adapters/chaos/[^/]+/(manifest\.json|adapter_model\.safetensors)$"


class Stuck(RuntimeError):
    """Something that has to come did not come in time."""


@dataclass
class Tasks:
    """All tasks that were ever applied, by name, and what became of them."""

    uids: dict[str, str] = field(default_factory=dict)
    ends: dict[str, str] = field(default_factory=dict)  # of those that have ended
    why: dict[str, str] = field(default_factory=dict)  # what was said of those that failed

    def unfinished(
        self, found: Sequence[dict[str, Any]], delete: Callable[[str], None]
    ) -> dict[str, dict[str, Any]]:
        """By name. Those that have ended are noted, and deleted as a user would."""
        left = {}
        for raw in found:
            name, end = raw["metadata"]["name"], end_of(raw.get("status", {}))
            if end is None:
                left[name] = raw
                continue
            self.ends[name] = end
            if end != "Succeeded":
                held = {one["type"]: one for one in raw["status"]["conditions"]}
                self.why[name] = f"{held[end]['reason']}: {held[end]['message']}"
            delete(name)
        return left


class World(Protocol):
    """The weather is fine and one operator acts, but for what ``strike`` has done."""

    folder: Path
    stages: int
    moment_within: float  # seconds in which a request comes that a fault waits for, if it comes at all
    processes: Processes  # the nursery, for what is no part of the world
    store: Storage  # without the weather
    weather: Weather
    reader: Reader
    tasks: Tasks

    def apply(self, kind: int, name: str, steps: int, every: int) -> None: ...

    def unfinished(self) -> dict[str, dict[str, Any]]:
        """Tasks that have not ended, by name, as the API server has them. Others are deleted."""
        ...

    def report(self) -> Mapping[str, Any] | None:
        """The coordinator's report now, or None when it does not answer in time."""
        ...

    def strike(self, fault: Fault, rank: int, look: Callable[[], None]) -> None:
        """Do what ``fault`` is, but for its weather, to ``rank`` if it is one's fault. ``look`` is called in the moment
        before ranks are met, and not when none is."""
        ...

    def mend(self, fault: Fault) -> None:
        """What does not come back by itself after ``fault``."""
        ...

    def until(self, done: Callable[[], bool], what: str, seconds: float | None = None) -> None:
        """Raises Stuck, with what is known, when ``done`` is not true within ``seconds``; by default within the time
        that this world takes at most to overcome a fault."""
        ...

    @property
    def broken(self) -> Sequence[str]:
        """What must never happen to an object, and did."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """More for the benchmark's last line."""
        ...


def wait_until(
    done: Callable[[], bool], what: str, seconds: float, every: float, state: Callable[[], str]
) -> None:
    """Raises Stuck with ``state()`` when ``done``, asked ``every`` so many seconds, is not true within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise Stuck(f"{what}: not within {seconds:.0f} s\n{state()}")
        time.sleep(every)


def all_started(world: World) -> bool:
    """No task is still to be prepared for the first time: what the store refuses then is the task's end, by design."""
    return all(raw.get("status", {}).get("step") for raw in world.unfinished().values())


class Feeder:
    """A user who always has ``active`` tasks unfinished, until told to end; and none more in bad weather."""

    def __init__(self, world: World, active: int, steps: int, every: int) -> None:
        self._world, self._active, self._steps, self._every = world, active, steps, every
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._paused = False
        self._thread = threading.Thread(target=self._run, name="feeder", daemon=True)
        self._thread.start()

    def pause(self, paused: bool) -> None:
        with self._lock:
            self._paused = paused

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._stop.wait(0.2):
            missing = self._active - len(self._world.unfinished())
            with self._lock:
                for _ in range(0 if self._paused else missing):
                    self._world.apply(number % len(work.KINDS), f"task-{number}", self._steps, self._every)
                    number += 1
