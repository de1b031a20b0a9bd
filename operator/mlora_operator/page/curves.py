"""Losses of tasks over their steps, kept in the operator's memory: bounded, whatever comes. Pure but for its own memory."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field

POINTS = 512  # of a curve, at most; twelve bytes each
LARGEST = 3e38  # loss
CURVES = 512  # that are kept; those of tasks that trained longest ago go first
EVALUATIONS = 64  # of a curve: the newest
COLOURS = 12  # that tasks are told apart by

Evaluation = tuple[int, float]  # step, loss


@dataclass(frozen=True, slots=True)
class Drawn:
    """A curve as it is now. ``colour``: a number below ``COLOURS``, the same for as long as the curve is kept."""

    colour: int
    steps: tuple[int, ...]
    losses: tuple[float, ...]
    evaluations: tuple[Evaluation, ...]


@dataclass(slots=True)
class Curve:
    """Losses by step, from the first to the newest. Once ``POINTS`` are there, every other one goes, and new ones are kept
    as far apart: the whole way stays visible, and the newest point is always the last."""

    colour: int
    steps: array[int] = field(default_factory=lambda: array("Q"))
    losses: array[float] = field(default_factory=lambda: array("f"))
    evaluations: list[Evaluation] = field(default_factory=list)
    apart: int = 0  # steps between two points that are kept

    def add(self, step: int, loss: float) -> None:
        """The loss of ``step``. A task that went back to its checkpoint takes the steps after it anew."""
        if self.steps and step <= self.steps[-1]:
            self._go_back_to(step)
        if len(self.steps) >= 2 and self.steps[-1] - self.steps[-2] < self.apart:
            self.steps.pop()
            self.losses.pop()
        self.steps.append(step)
        self.losses.append(loss)
        if len(self.steps) > POINTS:
            self.steps = self.steps[:-1:2] + self.steps[-1:]
            self.losses = self.losses[:-1:2] + self.losses[-1:]
            self.apart = max(1, 2 * self.apart, (self.steps[-1] - self.steps[0]) // POINTS)

    def evaluated(self, step: int, loss: float) -> None:
        self.evaluations = [one for one in self.evaluations if one[0] < step][1 - EVALUATIONS :]
        self.evaluations.append((step, loss))

    def _go_back_to(self, step: int) -> None:
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.losses.pop()


class Curves:
    """Of all tasks, by uid. Not for several threads at once: see ``board``."""

    def __init__(self) -> None:
        self._curves: OrderedDict[str, Curve] = OrderedDict()  # who was heard of last stands last

    def note(self, uid: str, step: int, loss: float | None, evaluation: Evaluation | None = None) -> None:
        """What a report says of a task. Not finite losses never come (``protocol.Message``); one that no float32 holds is
        not drawn."""
        loss = loss if loss is not None and abs(loss) <= LARGEST else None
        evaluation = evaluation if evaluation is not None and abs(evaluation[1]) <= LARGEST else None
        curve = self._curves.get(uid)
        if curve is None:
            if step < 1 and evaluation is None:
                return
            curve = self._curves[uid] = Curve(self._free_colour())
            if len(self._curves) > CURVES:
                self._curves.popitem(last=False)
        self._curves.move_to_end(uid)
        if loss is not None and step >= 1 and not (curve.steps and curve.steps[-1] == step):
            curve.add(step, loss)
        if evaluation is not None and (not curve.evaluations or curve.evaluations[-1] != evaluation):
            curve.evaluated(*evaluation)

    def colours(self) -> dict[str, int]:
        """By uid."""
        return {uid: curve.colour for uid, curve in self._curves.items()}

    def drawn(self, uid: str) -> Drawn | None:
        curve = self._curves.get(uid)
        if curve is None:
            return None
        return Drawn(curve.colour, tuple(curve.steps), tuple(curve.losses), tuple(curve.evaluations))

    def _free_colour(self) -> int:
        """The one of which was heard longest ago, so that those in training are told apart."""
        heard = {curve.colour: position for position, curve in enumerate(self._curves.values())}
        return min(range(COLOURS), key=lambda colour: heard.get(colour, -1))


def thinned(drawn: Drawn, most: int) -> Drawn:
    """The same with ``most`` points at most, evenly, first and last among them."""
    count = len(drawn.steps)
    if count <= most:
        return drawn
    chosen = [round(index * (count - 1) / (most - 1)) for index in range(most)]
    return Drawn(
        drawn.colour,
        tuple(drawn.steps[index] for index in chosen),
        tuple(drawn.losses[index] for index in chosen),
        drawn.evaluations,
    )
