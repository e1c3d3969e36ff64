"""What the connections of one process share: the threads that call Django, and limits for all of them together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from config import settings
from config.serve.requests import Request


@dataclass(slots=True)
class Share:
    """Of one client address: the bytes of its bodies, and those that still arrive, the oldest first, with their
    function that gives up.
    """

    size: int = 0
    arriving: dict[Request, Callable[[], None]] = field(default_factory=dict)


class Bodies:
    """The bodies that have begun to arrive and are not answered, by the address of the client."""

    def __init__(self) -> None:
        self.size = 0
        self.shares: dict[str, Share] = {}

    def begin(self, request: Request, give_up: Callable[[], None]) -> None:
        self.shares.setdefault(request.address, Share()).arriving[request] = give_up

    def keep(self, request: Request, count: int) -> None:
        """Count bytes that have arrived. Above the limit of an address, its oldest body is given up; above the limit of
        all, the oldest of the address that has most.
        """
        share = self.shares[request.address]
        share.size += count
        self.size += count
        while share.size > settings.WEB_ADDRESS_BODIES_MAX_BYTES and share.arriving:
            self.give_up(share)
        while self.size > settings.WEB_BODIES_MAX_BYTES:
            arriving = [each for each in self.shares.values() if each.arriving]
            if not arriving:
                break
            self.give_up(max(arriving, key=lambda each: each.size))

    def give_up(self, share: Share) -> None:
        share.arriving.pop(next(iter(share.arriving)))()

    def arrived(self, request: Request) -> None:
        if request.address in self.shares:
            self.shares[request.address].arriving.pop(request, None)

    def free(self, request: Request) -> None:
        """The request is answered or dropped."""
        share = self.shares.get(request.address)
        if share is not None:
            share.arriving.pop(request, None)
            share.size -= request.size
            self.size -= request.size
            if not (share.size or share.arriving):
                del self.shares[request.address]


class State:
    """Used on the event loop only. ``log_access`` gets the environment, the status, the bytes sent and the seconds."""

    def __init__(
        self,
        application: Any,
        threads: int,
        keepalive: float,
        log_access: Callable[[dict[str, Any], str, int, float], None] | None = None,
    ) -> None:
        self.application = application
        self.threads = ThreadPoolExecutor(threads, "web")
        self.keepalive = keepalive
        self.log_access = log_access
        self.stopping = False
        self.connections: set[Any] = set()
        self.bodies = Bodies()
