"""HTTP(S) to the coordinators: one client per pipeline, and one long poll that keeps its last report.

``client`` asks, ``links`` polls and remembers, ``reading`` bounds what comes from there, ``trusting`` is TLS with the one
certificate that counts, ``errors`` what may go wrong. May import: reconcile (its ports and nouns), the protocol.
"""

from mlora_operator.coordinator.client import CoordinatorClient
from mlora_operator.coordinator.errors import (
    CoordinatorError,
    Invalid,
    Starting,
    Unauthorized,
    Unreachable,
    Untrusted,
)
from mlora_operator.coordinator.links import Links
from mlora_operator.coordinator.reading import open_session

__all__ = [
    "CoordinatorClient",
    "CoordinatorError",
    "Invalid",
    "Links",
    "Starting",
    "Unauthorized",
    "Unreachable",
    "Untrusted",
    "open_session",
]
