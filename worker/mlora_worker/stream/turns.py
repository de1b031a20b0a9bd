"""What a stage does next when both a forward and a backward may come. Pure; mailbox and simulator share it.

Backward first, else forward. That alone has a trap. Where there are only just microbatches enough to fill the pipeline,
the gradient of the next one is always about to arrive when a stage becomes free. If it is late by the time of a message,
the stage begins another forward, and the gradient waits for it; so it goes on every stage that it passes, and the round
trip becomes longer by a forward each. The simulator shows bubbles of 10 to 20 % at 4 and 8 stages where there should be
none.

So a stage that holds as many microbatches as there are stages from it to the end (as many as one that alternates strictly
ever holds) waits a moment for the gradient before it begins a forward: ``PATIENCE`` of what one forward or backward
takes here. Where microbatches are plenty that moment costs less than a percent or two; near the end of the pipeline, where
the trap is not, no stage waits.
"""

from __future__ import annotations

PATIENCE = 0.03  # part of the usual time of one forward or backward
_NEAREST = 3  # stages to the end, the own one counted, from which on a stage waits
_MEMORY = 8  # forwards and backwards over which the usual time is averaged


class Turns:
    """Of one stage. The unit of time is the caller's."""

    def __init__(self, stages_to_end: int, patience: float = PATIENCE) -> None:
        """``stages_to_end``: from this stage to the last one, both counted; the last one turns round at once."""
        self._depth = stages_to_end
        self._share = patience if stages_to_end >= _NEAREST else 0.0
        self._held = 0  # microbatches between their forward and their backward
        self._usual: float | None = None

    @property
    def wait(self) -> float:
        """How long to wait for a gradient before the next forward begins."""
        if self._held < self._depth or self._usual is None:
            return 0.0
        return self._share * self._usual

    def forward(self) -> None:
        """A forward begins."""
        self._held += 1

    def backward(self) -> None:
        """A backward begins."""
        self._held -= 1

    def took(self, time: float) -> None:
        """The last forward or backward took so long."""
        self._usual = time if self._usual is None else self._usual + (time - self._usual) / _MEMORY
