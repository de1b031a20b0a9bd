"""Which addresses a task may name: nothing that only the worker, or only its machine, can reach. Pure.

Here an address is judged as it is written. What a host's name leads to is known only where it is resolved: the worker asks
again before it connects (``mlora_worker.storage.egress_policy``), by the same rule and with the same ``allowedNetworks``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import ip_address, ip_network

from mlora_operator.api.pipeline import LoRAPipelineSpec
from mlora_operator.api.task import LoRATaskSpec
from mlora_operator.reconcile.state.store_requests import hosts
from mlora_worker import addresses
from mlora_worker.protocol import is_refused

# Names that lead to the machine itself or to the credentials of its cloud, whatever the resolver says.
_NAMES = ("localhost", "metadata", "instance-data", "metadata.google.internal")


def forbidden(spec: LoRATaskSpec, allowed_networks: Sequence[str]) -> str | None:
    """What is wrong with an address of ``spec``, or None. ``allowed_networks`` in CIDR form."""
    for field, host in _hosts(spec):
        if _is_forbidden(host, tuple(allowed_networks)):
            return (
                f"{field}: {host} is loopback, link-local or a metadata service, which tasks must not use; "
                "use the store's own address, or ask the pipeline's owner to add its network to "
                "spec.worker.allowedNetworks"
            )
    return None


def forbidden_model(spec: LoRAPipelineSpec) -> str | None:
    """What is wrong with the address of a pipeline's model on the web, or of its hub; or None."""
    urls = [("spec.model.uri", spec.model.uri)] if addresses.is_web(spec.model.uri) else []
    if spec.worker.hub_endpoint is not None:
        urls.append(("spec.worker.hubEndpoint", spec.worker.hub_endpoint))
    for field, url in urls:
        host = addresses.web(url).host
        if _is_forbidden(host, spec.worker.allowed_networks):
            return (
                f"{field}: {host} is loopback, link-local or a metadata service, which workers do not read; "
                "use another address, or add its network to spec.worker.allowedNetworks"
            )
    return None


def _hosts(spec: LoRATaskSpec) -> Iterable[tuple[str, str]]:
    """With the field that leads there. A bucket may be a part of the host's name."""
    storage = spec.storage
    if storage.endpoint is not None:
        at = "spec.storage.endpoint"
        yield at, addresses.endpoint(storage.endpoint).host
        places = [spec.output.uri, *spec.dataset.addresses]
        places += [
            one.uri for one in (spec.evaluation, spec.init_from) if one is not None and one.uri is not None
        ]
        yield from ((at, host) for host in hosts(storage.endpoint, storage.addressing, places))
    field = "spec.dataset.uri" if spec.dataset.uri is not None else "spec.dataset.uris"
    rows = [(field, uri) for uri in spec.dataset.addresses]
    if spec.evaluation is not None and spec.evaluation.uri is not None:
        rows.append(("spec.evaluation.uri", spec.evaluation.uri))
    yield from ((where, addresses.web(uri).host) for where, uri in rows if addresses.is_web(uri))


@lru_cache(maxsize=10_000)
def _is_forbidden(host: str, allowed_networks: tuple[str, ...]) -> bool:
    try:
        address = ip_address(host)
    except ValueError:  # a name
        return not allowed_networks and (host in _NAMES or host.endswith(".localhost"))
    return is_refused(address, map(ip_network, allowed_networks))
