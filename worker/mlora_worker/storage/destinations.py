"""Which network addresses a task's data may be fetched from.

A task's owner chooses the address, and the request is made by a worker that stands deeper in the cluster than the owner
does. So what only the worker can reach is refused: its own loopback, the link-local addresses where clouds hand out a
machine's credentials, and those credentials' other addresses. A cluster's administrator may allow networks of these by
name (``WorkerConfig.allowed_networks``).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network

from mlora_worker.protocol import FailureReason
from mlora_worker.storage.errors import StorageError, StoreUnreachable

Address = IPv4Address | IPv6Address
Resolve = Callable[[str, int], Sequence[str]]  # host and port to addresses

# Metadata services that are not link-local: AWS over IPv6, Alibaba, Oracle, Azure, Google over IPv6.
_METADATA = {
    ip_address(address)
    for address in ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd20:ce::254")
}
_NAT64 = IPv6Network("64:ff9b::/96")  # IPv6 addresses that stand for IPv4 ones


class Destinations:
    def __init__(self, allowed_networks: Sequence[str] = (), resolve: Resolve | None = None) -> None:
        """``allowed_networks`` in CIDR form. Raises ValueError for one that is none."""
        self._allowed = [ip_network(network) for network in allowed_networks]
        self._resolve = resolve or _resolve

    def address_of(self, host: str, port: int, uri: str) -> str:
        """The address to connect to. To connect by name later would ask again, and might be told another address.

        Raises StorageError (InvalidSpec) when any of the host's addresses is refused; StoreUnreachable for an unknown
        host.
        """
        try:
            found = [ip_address(address.partition("%")[0]) for address in self._resolve(host, port)]
        except (OSError, UnicodeError, ValueError) as error:
            raise StoreUnreachable(f"cannot read {uri}: the host {host} is not known ({error})") from None
        for address in found:
            if self._refused(address):
                raise StorageError(
                    FailureReason.INVALID_SPEC,
                    f"{uri} is refused: {host} is {address}, an address that tasks may not read from; put the data into a "
                    "store, or ask the cluster's administrator to allow that network (spec.worker.allowedNetworks of the "
                    "LoRAPipeline)",
                )
        if not found:
            raise StoreUnreachable(f"cannot read {uri}: the host {host} has no address")
        return str(found[0])

    def _refused(self, address: Address) -> bool:
        if any(address in network for network in self._allowed if network.version == address.version):
            return False
        inner = _embedded(address)
        if inner is not None:
            return self._refused(inner)
        return (
            address.is_loopback
            or address.is_link_local
            or address.is_multicast
            or address.is_unspecified
            or address.is_reserved
            or address in _METADATA
        )


def _embedded(address: Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour


def _resolve(host: str, port: int) -> Sequence[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
