"""Which addresses a task may name: nothing that only the worker, or only its machine, can reach. Pure.

Here an address is judged as it is written. What a host's name leads to is known only where it is resolved: the worker asks
again before it connects (``mlora_worker.storage.destinations``), by the same rule and with the same ``allowedNetworks``.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.task import LoRATaskSpec
from mlora_worker.protocol import embedded_ipv4, is_refused

# Names that lead to the machine itself or to the credentials of its cloud, whatever the resolver says.
_NAMES = ("localhost", "metadata", "instance-data", "metadata.google.internal")


def forbidden(spec: LoRATaskSpec, allowed_networks: Sequence[str]) -> str | None:
    """What is wrong with an address of ``spec``, or None. ``allowed_networks`` in CIDR form."""
    for field, url in _urls(spec):
        host = _host(url)
        if host is not None and _is_forbidden(host, tuple(allowed_networks)):
            return (
                f"{field}: {host} is loopback, link-local or a metadata service, which tasks may not name; use the "
                "store's own address, or ask the pipeline's owner to list its network in spec.worker.allowedNetworks"
            )
    return None


def forbidden_model(spec: LoRAPipelineSpec) -> str | None:
    """What is wrong with the address of a pipeline's model on the web, or of its hub; or None."""
    urls = [("spec.model.uri", spec.model.uri)] if spec.model.uri.startswith(("http://", "https://")) else []
    if spec.worker.hub_endpoint is not None:
        urls.append(("spec.worker.hubEndpoint", spec.worker.hub_endpoint))
    for field, url in urls:
        host = _host(url)
        if host is not None and _is_forbidden(host, spec.worker.allowed_networks):
            return (
                f"{field}: {host} is loopback, link-local or a metadata service, which workers do not read from; use "
                "another address, or list its network in spec.worker.allowedNetworks"
            )
    return None


def _urls(spec: LoRATaskSpec) -> Iterable[tuple[str, str]]:
    if spec.storage.endpoint is not None:
        yield "spec.storage.endpoint", spec.storage.endpoint
    field = "spec.dataset.uri" if spec.dataset.uri is not None else "spec.dataset.uris"
    rows = [(field, uri) for uri in spec.dataset.addresses]
    if spec.evaluation is not None and spec.evaluation.uri is not None:
        rows.append(("spec.evaluation.uri", spec.evaluation.uri))
    yield from ((where, uri) for where, uri in rows if uri.startswith(("http://", "https://")))


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # brackets that hold no address
        return None


@lru_cache(maxsize=10_000)
def _is_forbidden(host: str, allowed_networks: tuple[str, ...]) -> bool:
    name = host.rstrip(".").lower()
    address = _address(name)
    if address is None:
        return not allowed_networks and (name in _NAMES or name.endswith(".localhost"))
    return is_refused(address, map(ip_network, allowed_networks))


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """The address that a host is, in any spelling that a resolver takes for one (``127.1``, ``0x7f000001``); None for a
    name."""
    try:
        address = ip_address(host.partition("%")[0])
    except ValueError:
        try:
            return IPv4Address(socket.inet_aton(host))
        except (OSError, ValueError):
            return None
    return embedded_ipv4(address) or address
