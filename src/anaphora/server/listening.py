"""Binds the sockets that the server listens on."""

from __future__ import annotations

import errno
import socket

from anaphora.errors import ConfigError


def bind(host: str, port: int) -> list[socket.socket]:
    """Returns one bound socket for each address of ``host``, all with the same port.

    An address that this machine does not have (IPv6 of a dual-stack name) is left out.

    Raises:
        ConfigError: an address is in use or invalid, or the machine has none of them.
    """
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            # Port 0 means any; the other addresses then get the port that the first one got.
            listener = _listener(
                family, kind, protocol, (address[0], bound[0].getsockname()[1] if bound else port, *address[2:])
            )
            if listener is not None:
                bound.append(listener)
    except (OSError, OverflowError) as error:
        for listener in bound:
            listener.close()
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error}") from None
    if not bound:
        raise ConfigError(f"cannot listen on --host {host}: it is not an address of this machine")
    return bound


def _listener(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> socket.socket | None:
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        return None
    return listener
