"""A connection that one thread reads while others write, in plain or in TLS.

OpenSSL does not allow that by itself: whatever touches a TLS connection must wait for its turn. So the socket never blocks,
each call into it holds a lock for a moment, and waiting is done without the lock.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import ssl
import threading

_AT_ONCE = 256 * 2**10  # bytes written with the lock held; the reader gets its turn in between


class Channel:
    """Takes over ``sock``, which may be a ``ssl.SSLSocket`` whose handshake is done. All errors are ``OSError``."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()
        self._seconds: float | None = None

    def settimeout(self, seconds: float | None) -> None:
        """The longest wait for the peer within a call; None: for ever."""
        self._seconds = seconds

    def sendall(self, data: bytes | memoryview) -> None:
        """Callers take turns among themselves: two messages at once would mix."""
        view = memoryview(data).cast("B")
        while view:
            try:
                with self._lock:
                    count = self._sock.send(view[:_AT_ONCE])
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._wait(select.POLLOUT)
            except ssl.SSLWantReadError:
                self._wait(select.POLLIN)
            else:
                view = view[count:]

    def recv_into(self, view: memoryview) -> int:
        """Blocks until something has come; 0: the peer has closed."""
        while True:
            try:
                with self._lock:
                    return self._sock.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._wait(select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(select.POLLOUT)

    def shutdown(self) -> None:
        """End both directions, which wakes whoever waits here and at the other end."""
        with contextlib.suppress(OSError):  # the peer was faster
            # Of the class below: that of TLS forgets the encryption, and what is sent then goes out in plain.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        with self._lock:
            self._sock.close()

    def _wait(self, event: int) -> None:
        number = self._sock.fileno()
        if number < 0:
            raise OSError(errno.EBADF, "the connection was closed here")
        poll = select.poll()
        poll.register(number, event)
        if not poll.poll(None if self._seconds is None else self._seconds * 1000):
            raise TimeoutError(errno.ETIMEDOUT, f"no data within {self._seconds:.0f} s")
