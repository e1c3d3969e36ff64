"""Sends requests through the outbound client, and replaces the resolver of host names."""

import socket

from django.test import override_settings

from config.outbound import addresses, client
from config.outbound.loop import shared


def send(url: str, method: str = "POST", connect_timeout: float = 5, **changes):
    arguments = {"headers": {}, "body": b"{}", "total_timeout": 5, "max_bytes": 1000, "allow_private": True}
    client.prepare()
    with override_settings(OUTBOUND_CONNECT_TIMEOUT_SECONDS=connect_timeout):
        return shared.submit(client.asend(method, url, **{**arguments, **changes})).result()


def resolve(monkeypatch, *found: str):
    """Resolve every name to these addresses. Returns the list of the names that were looked up."""
    asked = []

    def getaddrinfo(host, port, *args, **kwargs):
        asked.append(host)
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found
        ]

    monkeypatch.setattr(addresses.socket, "getaddrinfo", getaddrinfo)
    return asked
