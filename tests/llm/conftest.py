"""Fixtures with a model server, settings that point to it, and turns with each provider."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from runs.llm.registry import aclose_all, client_for
from tests.llm.helpers import Heard, hear, request_of
from tests.llm.model_server import ModelServer

KEY = "sk-test-Very5ecretKey0123456789"


@pytest.fixture(autouse=True)
def _direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect to loopback without the proxy that the environment may define."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(params=["openai", "anthropic"])
def provider(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def serve(settings, provider: str) -> Callable[[Callable[[ModelServer], Awaitable[Any]]], Any]:
    """Run a coroutine function with a model server. The settings point to this server."""

    def run(main: Callable[[ModelServer], Awaitable[Any]]) -> Any:
        async def inner() -> Any:
            async with ModelServer() as server:
                settings.OPENAI_BASE_URL, settings.ANTHROPIC_BASE_URL = f"{server.url}/v1", server.url
                settings.OPENAI_API_KEY = settings.ANTHROPIC_API_KEY = KEY
                try:
                    return await main(server)
                finally:
                    await aclose_all()

        return asyncio.run(inner())

    return run


@pytest.fixture
def turn(serve, provider: str) -> Callable[..., Heard]:
    """Execute one complete turn with the model that ``wish`` describes."""

    def run(wish: str, *messages: Any, raw: list[bytes] | None = None, **fields: Any) -> Heard:
        async def main(server: ModelServer) -> Heard:
            server.raw = raw
            return await hear(client_for(provider), request_of(*(messages or ("Hi",)), model=wish, **fields))

        return serve(main)

    return run


@pytest.fixture
def sent(serve, provider: str) -> Callable[..., dict[str, Any]]:
    """Return the body of the request that the server received."""

    def run(*messages: Any, **fields: Any) -> dict[str, Any]:
        async def main(server: ModelServer) -> dict[str, Any]:
            await hear(client_for(provider), request_of(*messages, **fields))
            return server.requests[0].body

        return serve(main)

    return run
