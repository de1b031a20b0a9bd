"""What a rank does between SIGTERM and its end.

The one thread that may be interrupted anywhere only starts others: whoever listens is told in a thread of its own, and a
timer ends the process when the time is over. A rank that has nothing to lose yet has no listener, and ends at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Termination:
    """``leave`` ends the process."""

    def __init__(self, seconds: float, leave: Callable[[], None]) -> None:
        self._seconds, self._leave = seconds, leave
        self._listener: Callable[[], None] | None = None
        self._asked = False

    def listen(self, listener: Callable[[], None]) -> None:
        """From now on ``listener`` brings this rank to its end, within the time that there is."""
        self._listener = listener

    def ask(self) -> None:
        """SIGTERM has come; the second one ends the process at once. May be called by a signal handler."""
        if self._asked or self._listener is None:
            self._leave()
            return
        self._asked = True
        timer = threading.Timer(self._seconds, self._leave)
        timer.daemon = True
        timer.start()
        threading.Thread(target=self._listener, name="termination", daemon=True).start()
