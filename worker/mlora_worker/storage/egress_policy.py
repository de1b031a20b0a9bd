"""Which network addresses a task's data may be fetched from, and its adapter written to.

A task's owner chooses the address, and the request is made by a worker that stands deeper in the cluster than the owner
does. So what only the worker can reach is refused: its own loopback, the link-local addresses where clouds hand out a
machine's credentials, and those credentials' other addresses. A cluster's administrator may allow networks of these by
name (``WorkerConfig.allowed_networks``).
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from ipaddress import ip_address, ip_network

from mlora_worker.protocol import FailureReason, is_refused
from mlora_worker.storage.errors import StorageError, StoreUnreachable

Resolve = Callable[[str, int], Sequence[str]]  # host and port to addresses


class Destinations:
    def __init__(self, allowed_networks: Sequence[str] = (), resolve: Resolve | None = None) -> None:
        """``allowed_networks`` in CIDR form. Raises ValueError for one that is none."""
        self._allowed = [ip_network(network) for network in allowed_networks]
        self._resolve = resolve or _resolve

    def address_of(self, host: str, port: int, uri: str) -> str:
        """The address to connect to. To connect by name later would ask again, and might be told another address.

        Raises what ``addresses_of`` raises.
        """
        return self.addresses_of(host, port, uri)[0]

    def addresses_of(self, host: str, port: int, uri: str) -> list[str]:
        """All of them, at least one, in the resolver's order. ``uri`` is how messages name what is asked for.

        Raises StorageError (InvalidSpec) when any of the host's addresses is refused; StoreUnreachable for an unknown
        host.
        """
        try:
            found = [ip_address(address.partition("%")[0]) for address in self._resolve(host, port)]
        except (OSError, UnicodeError, ValueError) as error:
            raise StoreUnreachable(
                f"cannot read {uri}: the host {host} cannot be resolved ({error})"
            ) from None
        for address in found:
            if is_refused(address, self._allowed):
                raise StorageError(
                    FailureReason.INVALID_SPEC,
                    f"{uri} is refused: {host} is {address}, an address that tasks must not reach: use another one, "
                    f"or ask the cluster's administrator to allow that network"
                    " (spec.worker.allowedNetworks of the "
                    "LoRAPipeline)",
                )
        if not found:
            raise StoreUnreachable(f"cannot read {uri}: the host {host} has no address")
        return [str(address) for address in found]


def _resolve(host: str, port: int) -> Sequence[str]:
    return [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
