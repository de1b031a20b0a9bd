"""Where a rank listens, on clusters of either family of addresses."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import MutableMapping

_BACKLOG = 128  # calls that wait to be taken
_LOOPBACK = ("lo", "lo0")  # of Linux, of macOS
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)


def listen(host: str, port: int) -> socket.socket:
    """At ``host``, a name or an address of either family; at all addresses of both families when it is empty. Raises
    ``OSError``."""
    if host:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        except OSError as error:
            if error.errno not in _NO_IPV6:  # the kernel knows the family, but has it switched off
                raise
    return socket.create_server(("", port), backlog=_BACKLOG)


def stay_on_loopback(host: str, environment: MutableMapping[str, str]) -> None:
    """Where ``host`` is a loopback address, gloo listens on that interface, too: by itself it takes the address of the
    machine's name, which others may reach. An interface that the environment names stays.
    """
    try:
        if not ipaddress.ip_address(host).is_loopback:
            return
    except ValueError:  # a name
        return
    for _, name in socket.if_nameindex():
        if name in _LOOPBACK:
            environment.setdefault("GLOO_SOCKET_IFNAME", name)
