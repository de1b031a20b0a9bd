"""What the page keeps of each pass of the loop."""

from __future__ import annotations

from datetime import UTC, datetime

from mlora_operator.page.board import Board
from mlora_operator.reconcile.state.decision import Decision
from mlora_operator.reconcile.state.snapshot import Snapshot
from tests.fixtures.page_scene import SMALL, Scene

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def test_a_coordinator_has_no_say_in_the_losses_of_another_pipeline_s_tasks() -> None:
    scene = Scene(NOW, waiting=0)
    told = scene.contacts(1.0)[scene.small.key]
    board = Board()
    board.watch(Snapshot(tasks=scene.tasks, contacts={scene.large.key: told}), Decision())
    assert board.colours() == {}
    board.watch(Snapshot(tasks=scene.tasks, contacts={scene.small.key: told}), Decision())
    assert board.colours().keys() == {one.uid for one in SMALL}
