"""The headless Service that gives each worker a name. Pure."""

from __future__ import annotations

from typing import Any

from mlora_operator.manifests.names import selector
from mlora_operator.manifests.owner import Owner, metadata
from mlora_operator.manifests.worker import HTTP_PORT, LINK_PORT, RENDEZVOUS_PORT


def service(owner: Owner, *, tls: bool = False) -> dict[str, Any]:
    """Ranks look each other up before they are ready, hence ``publishNotReadyAddresses``. Meshes go by the ports' names."""
    ports = (("https" if tls else "http", HTTP_PORT), ("link", LINK_PORT), ("rendezvous", RENDEZVOUS_PORT))
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(owner, owner.child),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector(owner.name),
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"} for name, port in ports
            ],
        },
    }
