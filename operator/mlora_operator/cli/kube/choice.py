"""Which cluster a command asks, and about which namespace: what the user said on the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterChoice:
    """None: as the kubeconfig says, and the kubeconfig where kubectl looks for it."""

    namespace: str | None = None
    context: str | None = None
    kubeconfig: str | None = None
