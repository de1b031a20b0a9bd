"""Where other ranks call rank 0, and strangers do. One thread listens to all callers at once.

1. Whoever calls has ``PATIENCE`` seconds from the first packet on to prove that it is a rank; the time does not begin anew.
2. Nobody waits for anybody else: a caller that is silent, slow or talks nonsense costs one place among ``MOST``.
3. When all places are taken, the newest caller gets one of the address that holds most of them, its oldest: who has one
   address pushes out only its own calls, however many they are.
4. Whatever a caller sends or does ends that call at most.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from mlora_worker.pipeline.frames import keep_alive
from mlora_worker.pipeline.hello import Met, Words

log = logging.getLogger(__name__)

PATIENCE = 10.0  # seconds
MOST = 64  # callers that have proven nothing yet; TLS holds some 50 KiB for each
_NOTED_EVERY = 60.0  # seconds between lines about callers that are turned away
_AT_ONCE = 16  # calls that are taken before callers are heard again
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_OF_THE_CALL = (  # which ended before it was taken (accept(2))
    errno.ECONNABORTED,
    errno.EPROTO,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ETIMEDOUT,
)
_PAUSE = 0.1  # seconds, where the kernel has no descriptor for a call

Welcome = Callable[[socket.socket], Words]


class DoorClosed(OSError):
    """The door was closed from within."""


@dataclass(slots=True)
class _Caller:
    sock: socket.socket
    number: int  # descriptor, which the socket forgets when it is closed
    words: Words
    address: str
    until: float


class Door:
    """``listener`` listens already; ``welcome`` is ``hello.welcome`` with all but its first argument."""

    def __init__(
        self,
        listener: socket.socket,
        welcome: Welcome,
        *,
        clock: Callable[[], float] = time.monotonic,
        patience: float = PATIENCE,
        most: int = MOST,
    ) -> None:
        self._listener, self._welcome, self._clock = listener, welcome, clock
        self._patience, self._most = patience, most
        self._callers: dict[int, _Caller] = {}  # by descriptor, the oldest first
        self._closed = False
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._noted_until = -math.inf
        self.turned_away = 0
        self.complaint = ""  # of the last caller that was turned away

    @property
    def callers(self) -> int:
        """How many have proven nothing yet."""
        return len(self._callers)

    def next(self, until: float | None = None) -> Met:
        """The next rank that has proven itself. Raises ``TimeoutError`` at ``until``, by the clock, and ``DoorClosed``."""
        while True:
            now = self._clock()
            if until is not None and now >= until:
                raise TimeoutError
            for late in [one for one in self._callers.values() if one.until <= now]:
                self._turn_away(late, f"a caller did not authenticate within {self._patience:g} s")
            for key, _ in self._selector.select(self._rest(now, until)):
                if key.fileobj is self._listener:
                    self._take_calls()
                elif (caller := self._callers.get(key.fd)) and (met := self._hear(caller)):
                    return met
            if self._closed:
                self.leave()
                raise DoorClosed("the door was closed")

    def close(self) -> None:
        """From any thread: wakes whoever waits in ``next``."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _rest(self, now: float, until: float | None) -> float | None:
        """Seconds to sleep if nothing happens; the oldest caller is the first to lose its place."""
        ends = [until] if until is not None else []
        ends += [caller.until for caller in list(self._callers.values())[:1]]
        return max(0.0, min(ends) - now) if ends else None

    def _take_calls(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SHORTAGE:
                    if not self._make_room("no descriptor is left for further calls"):
                        time.sleep(_PAUSE)
                elif error.errno in _OF_THE_CALL:
                    continue
                elif not self._closed:
                    raise
                return
            if len(self._callers) >= self._most:
                self._make_room("too many unauthenticated callers")
            self._let_speak(sock, str(address[0]))

    def _let_speak(self, sock: socket.socket, address: str) -> None:
        number = sock.fileno()
        try:
            sock.setblocking(False)
            keep_alive(sock)
            self._selector.register(number, selectors.EVENT_READ)
        except OSError:  # it has gone already
            sock.close()
            return
        until = self._clock() + self._patience
        self._callers[number] = _Caller(sock, number, self._welcome(sock), address, until)

    def _hear(self, caller: _Caller) -> Met | None:
        """One step of what ``caller`` says; what came of it when it was the last one."""
        try:
            self._selector.modify(caller.number, next(caller.words))
        except StopIteration as done:
            self._forget(caller)
            return done.value  # type: ignore[no-any-return]
        except Exception as error:  # whatever it is: of this call alone
            self._turn_away(caller, str(error) or repr(error))
        return None

    def _make_room(self, why: str) -> bool:
        """Whether there was somebody to turn away."""
        if not self._callers:
            return False
        held = Counter(caller.address for caller in self._callers.values())
        most = max(held.values())
        self._turn_away(next(one for one in self._callers.values() if held[one.address] == most), why)
        return True

    def _turn_away(self, caller: _Caller, why: str) -> None:
        self._forget(caller)
        caller.words.close()
        caller.sock.close()
        self.turned_away += 1
        self.complaint = f"{why} (from {caller.address})"
        now = self._clock()
        if now >= self._noted_until:
            self._noted_until = now + _NOTED_EVERY
            log.warning(
                "%d connections to the link port were rejected, the last one because %s",
                self.turned_away,
                self.complaint,
            )

    def _forget(self, caller: _Caller) -> None:
        del self._callers[caller.number]
        self._selector.unregister(caller.number)

    def leave(self) -> None:
        """Closes all at once; from the thread of ``next``."""
        for caller in list(self._callers.values()):
            self._forget(caller)
            caller.words.close()
            caller.sock.close()
        self._selector.close()
        self._listener.close()
