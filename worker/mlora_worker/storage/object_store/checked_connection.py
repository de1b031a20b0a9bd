"""Connections to addresses that were judged: the host's name is resolved once, and that very address is connected to.

To judge a name and to connect by it would ask the resolver twice, and it may give two answers. Tasks' stores are reached
so; a pipeline's own store is the platform's affair.
"""

from __future__ import annotations

import socket
from typing import Any

from botocore.exceptions import HTTPClientError
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError

from mlora_worker import addresses
from mlora_worker.protocol import FailureReason
from mlora_worker.storage.egress_policy import Destinations
from mlora_worker.storage.errors import StorageError, StoreUnreachable


class _Checked:
    """Before a connection class of urllib3. Raises StorageError (InvalidSpec) for a host that is refused."""

    destinations: Destinations

    def _new_conn(self: Any) -> socket.socket:
        named = self._dns_host
        try:
            found = self.destinations.addresses_of(named.strip("[]"), self.port, f"the store at {named}")
        except StoreUnreachable as error:
            raise NameResolutionError(named, self, socket.gaierror(str(error))) from None
        failed: Exception | None = None
        for address in found:
            self._dns_host = address
            try:
                return super()._new_conn()  # type: ignore[misc, no-any-return]
            except (NewConnectionError, ConnectTimeoutError) as error:
                failed = error
            finally:
                self._dns_host = named  # a certificate is for the name
        assert failed is not None
        raise failed


def check_connections(client: Any, destinations: Destinations) -> None:
    """Have every connection of an S3 client of the SDK, whatever host, region or redirect it is for, judged by
    ``destinations``.

    Where the environment names a proxy, that connects: the host is judged as far as its name can be resolved here.
    """
    session = client._endpoint.http_session

    def checked(pool: Any) -> Any:
        kind = pool.ConnectionCls
        connection = type(f"Checked{kind.__name__}", (_Checked, kind), {"destinations": destinations})
        return type(f"Checked{pool.__name__}", (pool,), {"ConnectionCls": connection})

    pools = session._manager.pool_classes_by_scheme  # not those of proxies, which the platform names
    session._manager.pool_classes_by_scheme = {scheme: checked(pool) for scheme, pool in pools.items()}
    send, proxy_of = session.send, session._proxy_config.proxy_url_for

    def send_checked(request: Any) -> Any:
        if proxy_of(request.url):
            _judge(request.url, destinations)
        try:
            return send(request)
        except HTTPClientError as error:
            cause = error.kwargs.get("error")
            if isinstance(cause, StorageError):  # no other attempt goes better
                raise cause from None
            raise

    session.send = send_checked


def _judge(url: str, destinations: Destinations) -> None:
    try:
        site = addresses.origin(url)
    except addresses.NotAnAddress as error:
        raise StorageError(FailureReason.INVALID_SPEC, f"the store's {error}") from None
    try:
        destinations.addresses_of(site.host, site.port, f"the store at {site.host}")
    except StoreUnreachable:  # the proxy may know the name
        return
