"""Fixtures with a model server, settings that point to it, and turns with each provider."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from config.outbound.transport import close_sessions
from runs.catalogue.definitions import KINDS
from runs.llm.registry import client_for
from tests.llm.helpers import Heard, at, hear, model_of, request_of
from tests.llm.model_server import ModelServer


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect to loopback without the proxy that the environment may define."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=[name for name, kind in KINDS.items() if not kind.is_offline])
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def serve(provider: str) -> Callable[[Callable[[ModelServer], Awaitable[Any]]], Any]:
    """Run a coroutine function with a model server."""

    def run(main: Callable[[ModelServer], Awaitable[Any]]) -> Any:
        async def inner() -> Any:
            async with ModelServer() as server:
                try:
                    return await main(server)
                finally:
                    await close_sessions()

        return asyncio.run(inner())

    return run


@pytest.fixture
def turn(serve, provider: str) -> Callable[..., Heard]:
    """Execute one complete turn with the model that ``wish`` describes."""

    def run(
        wish: str,
        *messages: Any,
        raw: list[bytes] | None = None,
        catalogue: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Heard:
        async def main(server: ModelServer) -> Heard:
            server.raw = raw
            model = model_of(at(server.url, provider), wish, **(catalogue or {}))
            return await hear(client_for(model.server), request_of(*(messages or ("Hi",)), model=model, **fields))

        return serve(main)

    return run


@pytest.fixture
def sent(serve, provider: str) -> Callable[..., dict[str, Any]]:
    """Return the body of the request that the server received."""

    def run(*messages: Any, catalogue: Any = None, **fields: Any) -> dict[str, Any]:
        async def main(server: ModelServer) -> dict[str, Any]:
            model = model_of(at(server.url, provider), **(catalogue or {}))
            await hear(client_for(model.server), request_of(*messages, model=model, **fields))
            return server.requests[0].body

        return serve(main)

    return run
