"""The registry of the model providers, and each event loop's clients of them.

An adapter is imported at its first use, so that a web process never loads a provider's SDK.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from django.conf import settings
from django.utils.module_loading import import_string

from runs.llm.base import ModelClient, ModelError


@dataclass(frozen=True, slots=True)
class Provider:
    """A value of ``AgentModel.provider``.

    ``adapter`` is the dotted name of a ``ModelClient`` class, which is called with the provider. ``key_setting`` and
    ``url_setting`` name settings. With ``own_url``, only that address needs a key: a server at another address that
    speaks the same protocol may need none.
    """

    name: str
    label: str
    adapter: str
    key_setting: str = ""
    url_setting: str = ""
    own_url: str = ""

    @property
    def key(self) -> str:
        return str(getattr(settings, self.key_setting))

    @property
    def url(self) -> str:
        return str(getattr(settings, self.url_setting)).rstrip("/")

    def missing_setting(self) -> str | None:
        """The setting without which the provider cannot be used."""
        if not self.key_setting or self.key or (self.own_url and self.url != self.own_url):
            return None
        return self.key_setting


_declared = (
    Provider("demo", "Demo", "runs.llm.demo.DemoModel"),
    Provider(
        "openai",
        "OpenAI-compatible",
        "runs.llm.openai_chat.OpenAIModel",
        "OPENAI_API_KEY",
        "OPENAI_BASE_URL",
        own_url="https://api.openai.com/v1",
    ),
    Provider("anthropic", "Anthropic", "runs.llm.anthropic.AnthropicModel", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"),
)
PROVIDERS = {provider.name: provider for provider in _declared}

# By event loop: connections belong to the loop that opened them, and a client that two loops share would fail.
_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, ModelClient]] = WeakKeyDictionary()
os.register_at_fork(after_in_child=_clients.clear)


def client_for(name: str) -> ModelClient:
    """The running loop's client of a provider, created at its first use.

    Raises ModelError for a provider that is unknown or lacks a setting.
    """
    clients = _clients.setdefault(asyncio.get_running_loop(), {})
    client = clients.get(name)
    if client is None:
        provider = PROVIDERS.get(name)
        if provider is None:
            raise ModelError(f"There is no model provider named {name!r}; known are {', '.join(PROVIDERS)}.")
        if missing := provider.missing_setting():
            raise ModelError(f"The model provider {name} is not set up: {missing} is missing.")
        client = clients[name] = import_string(provider.adapter)(provider)
    return client


def preload() -> None:
    """Import the adapters of the providers that are set up. Call it before the event loop runs: it takes seconds."""
    for provider in PROVIDERS.values():
        if provider.missing_setting() is None:
            import_string(provider.adapter)


async def aclose_all() -> None:
    """Close the running loop's clients. A later request creates new ones."""
    for client in _clients.pop(asyncio.get_running_loop(), {}).values():
        await client.aclose()
