"""Plays a story in a world: strikes at the moment that it names, waits until all goes on, notes what it cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from bench.chaos_parts.judge import Cost, Place, places, resumed
from bench.chaos_parts.story import Fault
from bench.chaos_parts.world import Feeder, World, all_started


@dataclass(frozen=True, slots=True)
class Pending:
    """A task that a fault has interrupted, and that was not seen to go on yet."""

    place: Place
    fault: Fault
    run: str


@dataclass(frozen=True, slots=True)
class Played:
    fault: Fault
    seconds: float  # until all went on, the fault's own duration with it; of a hasty chain, the last one has it all
    at_moment: bool


class Player:
    def __init__(self, world: World, feeder: Feeder, random: Random) -> None:
        self._world, self._feeder, self._random = world, feeder, random
        self._pending: dict[str, Pending] = {}
        self._run = ""  # of the coordinator, when the last fault came
        self._microbatches = 0
        self.runs: set[str] = set()  # of all coordinators that were heard
        self.costs: list[Cost] = []
        self.played: list[Played] = []

    def play(self, fault: Fault, hasty_next: bool) -> None:
        """Raises Stuck when the world does not go on afterwards."""
        began = time.monotonic()
        in_time = True
        if fault.weather is not None:
            self._feeder.pause(True)
            self._world.until(lambda: all_started(self._world), "tasks start")
        if fault.moment is not None:
            in_time = self._at_moment(fault)
        else:
            time.sleep(fault.delay)
            self._strike(fault)
        self._world.mend(fault)
        if fault.weather is not None:
            time.sleep(fault.seconds)
            self._world.weather.turn(None)
        if not hasty_next:
            self._recover(fault)
        self._feeder.pause(False)
        self.played.append(Played(fault, time.monotonic() - began, in_time))

    # --- the blow -----------------------------------------------------------------------------------------------

    def _at_moment(self, fault: Fault) -> bool:
        """Whether the moment came in time. Strikes in any case: else the time is over, and the fault comes all the same."""
        assert fault.moment is not None
        struck, lock = threading.Event(), threading.Lock()

        def strike() -> None:
            with lock:
                if not struck.is_set():
                    self._strike(fault)
                    struck.set()

        self._world.weather.when(fault.moment, strike)
        came = struck.wait(self._world.moment_within)
        self._world.weather.forget_waits()
        strike()
        return came

    def _strike(self, fault: Fault) -> None:
        if fault.weather is not None:
            self._look()
            self._world.weather.turn(fault.weather, fault.share)
        self._world.strike(fault, self._victim(fault), lambda: self._look(fault))

    def _victim(self, fault: Fault) -> int:
        """The rank that is meant; any one where none is."""
        if fault.kind.endswith("_coordinator"):
            return 0
        return self._random.randrange(0 if fault.kind == "kill_while_s3_is_away" else 1, self._world.stages)

    def _look(self, fault: Fault | None = None) -> None:
        """Note who goes on; with ``fault``, also where all stand now, as it will interrupt them."""
        report = self._world.report()
        if report is None:
            return
        self._hear(report)
        self._run, self._microbatches = report["runId"], report["wire"]["microbatches"]
        if fault is not None:
            for uid, place in places(report).items():
                self._pending[uid] = Pending(place, fault, self._run)

    # --- and after it -------------------------------------------------------------------------------------------

    def _recover(self, fault: Fault) -> None:
        self._world.until(lambda: self._goes_on(), f"the world goes on after fault {fault.number}, {fault}")

    def _goes_on(self) -> bool:
        """Whoever was interrupted trains again, or has ended; nobody is blocked, and microbatches come back."""
        report = self._world.report()
        if report is None:
            return False
        self._hear(report)
        left = {raw["metadata"]["uid"] for raw in self._world.unfinished().values()}
        for uid in (
            self._pending.keys() - left
        ):  # it has ended: found published, or trained faster than we look
            del self._pending[uid]
        if self._pending or any(task.get("blocked") for task in report["tasks"]):
            return False
        moved = report["runId"] != self._run or report["wire"]["microbatches"] > self._microbatches
        return not left or (moved and report["wire"]["microbatches"] > 0)

    def _hear(self, report: Mapping[str, Any]) -> None:
        self.runs.add(report["runId"])
        for uid, at in resumed(report).items():
            pending = self._pending.get(uid)
            if pending is None or report["runId"] == pending.run:
                continue
            del self._pending[uid]
            if at is not None:
                self.costs.append(Cost(pending.fault.number, pending.fault.kind, uid, pending.place, at))
