"""A model of the catalogue as the engine and the API see it: its row, its provider's server and its dialect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from config.kernel import money
from runs.catalogue.dialects import Dialect, dialect_of
from runs.catalogue.parameters import check_parameters
from runs.catalogue.providers import Server
from runs.models import AgentModel

# Output tokens per turn.
MODEL_MAX_OUTPUT_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class ModelDefinition:
    """Prices are micro-credits per 1,000 tokens."""

    name: str
    display_name: str
    server: Server
    provider_model: str
    price_in: int
    price_out: int
    price_cached_in: int
    price_cache_write: int
    context_tokens: int
    max_output_tokens: int
    parameters: Mapping[str, Any]
    dialect: Dialect
    is_default: bool

    @classmethod
    def from_row(cls, row: AgentModel) -> ModelDefinition:
        """Raises ValueError if a value of the row, or of its provider's, is not valid."""
        server = Server.from_row(row.provider)
        values = {column.name: getattr(row, column.name) for column in fields(cls) if column.name != "server"}
        for price in ("price_cached_in", "price_cache_write"):
            values[price] = row.price_in if values[price] is None else values[price]
        values["max_output_tokens"] = row.max_output_tokens or MODEL_MAX_OUTPUT_TOKENS
        values["parameters"] = check_parameters(row.parameters)
        values["dialect"] = dialect_of(server, row.provider_model, row.dialect)
        return cls(server=server, **values)

    @property
    def origin(self) -> str:
        """Who may get reasoning back: this provider's model only."""
        return f"{self.server.name}/{self.provider_model}"

    def cost(self, input_tokens: int, cached: int, cache_write: int, output_tokens: int) -> int:
        """The price of a turn. ``cached`` and ``cache_write`` are parts of ``input_tokens``."""
        plain = max(0, input_tokens - cached - cache_write)
        return (
            money.price(plain, self.price_in)
            + money.price(cached, self.price_cached_in)
            + money.price(cache_write, self.price_cache_write)
            + money.price(output_tokens, self.price_out)
        )
