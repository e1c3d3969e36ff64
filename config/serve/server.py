"""The web server of one process: accepts connections, closes those whose time is over, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

from config.serve.connection import Connection
from config.serve.state import State

STOP_POLL_SECONDS = 0.05


class Server:
    """Used on the event loop only."""

    def __init__(self, state: State, sockets: list[socket.socket], connections_max: int) -> None:
        self.state, self.sockets, self.connections_max = state, sockets, connections_max
        self.accepting: set[socket.socket] = set()
        self.opened: set[asyncio.Task[object]] = set()

    async def tick(self) -> None:
        """Close the connections whose time is over. Call it every second."""
        now = time.monotonic()
        for connection in list(self.state.connections):
            connection.expire(now)
        self._accept_while_there_is_room()

    async def stop(self) -> None:
        """Accept nothing more and wait until the requests that have arrived are answered."""
        self.state.stopping = True
        self._accept_while_there_is_room()
        for listener in self.sockets:
            listener.close()  # otherwise the system would let clients wait for this process
        for connection in list(self.state.connections):
            connection.stop()
        while self.state.connections:
            await self.tick()
            await asyncio.sleep(STOP_POLL_SECONDS)

    def _accept_while_there_is_room(self) -> None:
        room = not self.state.stopping and len(self.state.connections) < self.connections_max
        wanted = set(self.sockets) if room else set()
        loop = asyncio.get_running_loop()
        for listener in wanted - self.accepting:
            listener.setblocking(False)
            loop.add_reader(listener, self._accept, listener)
        for listener in self.accepting - wanted:
            loop.remove_reader(listener)
        self.accepting = wanted

    def _accept(self, listener: socket.socket) -> None:
        """One connection at a time: the other processes shall have a share of those that wait."""
        try:
            accepted, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError:
            # The next tick begins again.
            asyncio.get_running_loop().remove_reader(listener)
            self.accepting.discard(listener)
            return
        accepted.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._open(accepted))
        self.opened.add(task)
        task.add_done_callback(self.opened.discard)

    async def _open(self, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(lambda: Connection(self.state), accepted)
        self._accept_while_there_is_room()
