"""The few requests to the API server that bringing a cluster up takes; kubectl is not needed for it."""

import base64
import json
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


class ApiServer:
    """The API server that a kubeconfig written by ``credentials.py`` points to."""

    def __init__(self, kubeconfig: Path) -> None:
        content = json.loads(kubeconfig.read_text())
        cluster = content["clusters"][0]["cluster"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._server = cluster["server"]
        self._token = content["users"][0]["user"]["token"]
        self._trust = ssl.create_default_context(cadata=authority)

    def ready(self) -> bool:
        """Whether it answers and finds itself ready."""
        try:
            return self._request("GET", "/readyz").strip() == b"ok"
        except (OSError, urllib.error.URLError):
            return False

    def get(self, path: str) -> dict[str, Any] | None:
        """The object at ``path``, or None when there is none."""
        try:
            found: dict[str, Any] = json.loads(self._request("GET", path))
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise
        return found

    def apply(self, path: str, wanted: dict[str, Any]) -> None:
        """Make the object at ``path`` as ``wanted`` (server-side apply: a second time changes nothing)."""
        query = "?fieldManager=mlora-test-cluster&force=true"
        self._request("PATCH", path + query, json.dumps(wanted).encode())

    def _request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(self._server + path, data=body, method=method)
        request.add_header("Authorization", f"Bearer {self._token}")
        request.add_header("Content-Type", "application/apply-patch+yaml")
        with urllib.request.urlopen(request, timeout=10, context=self._trust) as reply:
            content: bytes = reply.read()
            return content


def node_ready(server: ApiServer, name: str) -> bool:
    """Whether the node ``name`` is there and ready to run pods."""
    try:
        node = server.get(f"/api/v1/nodes/{name}")
    except (OSError, urllib.error.URLError):
        return False
    conditions = [] if node is None else node["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def serve_storage(server: ApiServer, address: str, port: int) -> None:
    """Give the object store at ``address`` the name ``s3.storage`` (port 8333) inside the cluster."""
    named = {"name": "s3", "namespace": "storage"}
    server.apply(
        "/api/v1/namespaces/storage",
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "storage"}},
    )
    # Without a selector Kubernetes leaves the endpoints to whoever knows them.
    service = {"ports": [{"name": "s3", "port": 8333, "targetPort": port}]}
    server.apply(
        "/api/v1/namespaces/storage/services/s3",
        {"apiVersion": "v1", "kind": "Service", "metadata": named, "spec": service},
    )
    server.apply(
        "/apis/discovery.k8s.io/v1/namespaces/storage/endpointslices/s3",
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**named, "labels": {"kubernetes.io/service-name": "s3"}},
            "addressType": "IPv4",
            "ports": [{"name": "s3", "port": port, "protocol": "TCP"}],
            "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
        },
    )
