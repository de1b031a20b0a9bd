"""TLS of a rank's ports. The pipeline's certificate and key are files, which are looked at again at each handshake."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import ssl
from pathlib import Path

log = logging.getLogger(__name__)

CERTIFICATE, KEY = "tls.crt", "tls.key"
_END = "-----END CERTIFICATE-----"
_Stamp = tuple[object, ...]


class CannotServe(Exception):
    """There is no certificate and key to serve HTTPS with; the message says why. Plain HTTP is no way out."""


def server_context(folder: Path, host: str) -> ssl.SSLContext:
    """For a server that has the newest files of ``folder``. ``host``: the name that the operator asks for.

    Files that cannot be used later on leave the former ones in force. Raises ``CannotServe``.
    """
    return _Files(folder, host).context


def client_context(folder: Path) -> ssl.SSLContext:
    """For a client that trusts the certificate in ``folder``, and no other. Raises ``OSError``."""
    try:
        return _trusting((folder / CERTIFICATE).read_text())
    except ValueError as error:  # bytes that are no text
        raise OSError(f"{folder / CERTIFICATE} is not a certificate as PEM: {error}") from None


class _Files:
    def __init__(self, folder: Path, host: str) -> None:
        self._folder, self._host = folder, host
        self._seen = self._stamp()
        self.context = self._read()

    def _choose(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        """Called by each handshake, after the client's first message."""
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            try:
                self.context = self._read()
            except CannotServe as error:
                log.error("%s; the previous certificate stays in use", error)
        connection.context = self.context

    def _stamp(self) -> _Stamp:
        """What changes when a file does. The kubelet swaps the folder behind a link, with both files at once."""
        seen: list[object] = []
        for file in (self._folder / CERTIFICATE, self._folder / KEY):
            try:
                found = file.stat()
            except OSError as error:
                seen.append(error.errno)
            else:
                seen.append((found.st_ino, found.st_mtime_ns, found.st_size))
        return tuple(seen)

    def _read(self) -> ssl.SSLContext:
        certificate, key = self._folder / CERTIFICATE, self._folder / KEY
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            text = certificate.read_text()
            context.load_cert_chain(certificate, key, password=lambda: b"")  # never ask at a terminal
        except (OSError, ValueError) as error:
            raise CannotServe(
                f"HTTPS cannot be served with {certificate} and {key.name}: {_words(error)}"
            ) from None
        complaint = self._complaint(context, text)
        if complaint is not None:  # whether it is trusted is for the operator to say, by its own clock
            log.error("the operator will not trust the certificate in %s: %s", certificate, complaint)
        else:
            log.info("connections are encrypted with the certificate %s", _fingerprint(text))
        context.sni_callback = self._choose
        return context

    def _complaint(self, server: ssl.SSLContext, certificate: str) -> str | None:
        """What a client that trusts this certificate alone finds wrong with it: that it has ended, or is another name's."""
        client = _trusting(certificate)
        upwards, downwards = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking = client.wrap_bio(downwards, upwards, server_hostname=self._host)
        answering = server.wrap_bio(upwards, downwards, server_side=True)
        try:
            for side in (asking, answering, asking):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        except ssl.SSLError as error:
            return _words(error)
        return None


def _trusting(certificate: str) -> ssl.SSLContext:
    """Of a chain the first one alone: who signed it may sign others."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.minimum_version = ssl.TLSVersion.TLSv1_3
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(cadata=_first(certificate))
    return client


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError):
        return f"not a certificate and its key as PEM ({error.reason or error})"
    return str(getattr(error, "strerror", None) or error)


def _first(certificate: str) -> str:
    """Without those of who signed it."""
    first, end, _ = certificate.partition(_END)
    return first + end


def _fingerprint(certificate: str) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(_first(certificate).strip())).hexdigest()[:16]
