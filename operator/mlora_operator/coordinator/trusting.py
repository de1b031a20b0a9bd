"""TLS with whoever has the one certificate that the operator made for a pipeline; no authority counts."""

from __future__ import annotations

import ssl
from functools import lru_cache

from mlora_operator.coordinator.errors import Untrusted
from mlora_operator.reconcile.ports import CoordinatorTrust

_WAY_OUT = "delete the Secret, and the operator creates a new one"


@lru_cache(maxsize=1024)  # milliseconds each time
def context(trust: CoordinatorTrust | None, url: str) -> ssl.SSLContext:
    """For TLS with whoever has this very certificate; no authority counts. Raises Untrusted."""
    if trust is None:
        raise Untrusted(f"the certificate of {url} is not known yet")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # asks for a certificate, and for its name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it need not be signed by itself
    first, end, _ = trust.certificate.partition("-----END CERTIFICATE-----")  # not who signed it
    try:
        context.load_verify_locations(cadata=first + end)
    except (ssl.SSLError, ValueError, TypeError):  # TypeError: not ASCII
        raise Untrusted(f"{trust.origin} has no certificate in tls.crt; {_WAY_OUT}") from None
    return context


def distrust(url: str, trust: CoordinatorTrust | None, error: Exception) -> str:
    words = getattr(error, "verify_message", "") or str(error)
    origin = trust.origin if trust is not None else "nothing"
    return (
        f"{url} does not present the certificate in {origin} ({words}), so nothing is sent to it; {_WAY_OUT}"
    )
