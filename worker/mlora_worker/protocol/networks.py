"""Addresses that only a worker can reach: the operator judges what is written, a worker what it is led to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
)

# Metadata services that are not link-local: AWS over IPv6, Alibaba, Oracle, Azure, Google over IPv6.
METADATA_SERVICES = {
    ip_address(address)
    for address in ("fd00:ec2::254", "100.100.100.200", "192.0.0.192", "168.63.129.16", "fd20:ce::254")
}
_NAT64 = IPv6Network("64:ff9b::/96")  # IPv6 addresses that stand for IPv4 ones


def is_refused(address: IPv4Address | IPv6Address, allowed: Iterable[IPv4Network | IPv6Network]) -> bool:
    """Whether a task's data may not lie there: loopback, link-local, a metadata service, or an IPv6 spelling of one. Not
    in ``allowed`` networks (``WorkerConfig.allowed_networks``).
    """
    networks = tuple(allowed)
    if any(address in network for network in networks if network.version == address.version):
        return False
    inner = embedded_ipv4(address)
    if inner is not None:
        return is_refused(inner, networks)
    return (
        address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_unspecified
        or address.is_reserved
        or address in METADATA_SERVICES
    )


def embedded_ipv4(address: IPv4Address | IPv6Address) -> IPv4Address | None:
    """The IPv4 address that an IPv6 one stands for."""
    if isinstance(address, IPv4Address):
        return None
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour
