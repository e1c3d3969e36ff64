"""A model of the catalogue as the engine and the API see it, with its parameters and its dialect: where its server or
the model differs from the protocol, by built-in profiles and by what staff set.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from functools import partial
from typing import Any, Literal, Self, TypeAlias, get_args, get_type_hints

from config.api.serializers import camel
from config.kernel import money
from config.kernel.jsontext import to_text
from runs.catalogue.providers import Server
from runs.models import AgentModel

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
STOPS_MAX = 4
STOP_MAX_CHARS = 200
EXTRA_MAX_CHARS = 16 * 1024
# The fields of a request that the service sets itself.
RESERVED = {"model", "messages", "input", "instructions", "system", "tools", "tool_choice", "stream", "stream_options"}
RESERVED |= {"max_tokens", "max_completion_tokens", "max_output_tokens", "store", "include", "n"}
# A rule for a value: a function that says whether the value is valid, and words for people.
Check: TypeAlias = tuple[Callable[[Any], bool], str]


def check_names(value: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """``value``, if it is an object that has only names of ``checks``, with valid values. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError("A JSON object is required.")
    for name, given in value.items():
        if name not in checks:
            raise ValueError(f"There is no {name!r}; there are {', '.join(checks)}.")
        accepts, wanted = checks[name]
        if not accepts(given):
            raise ValueError(f"{name} must be {wanted}.")
    return value


def _number(low: float, high: float) -> Check:
    numbers = (int, float, Decimal)  # bool is excluded
    return lambda value: type(value) in numbers and low <= value <= high, f"a number from {low:g} to {high:g}"


def _choice(*choices: str) -> Check:
    return choices.__contains__, f"one of {', '.join(choices)}"


def _is_stop(value: Any) -> bool:
    fits = isinstance(value, list) and 1 <= len(value) <= STOPS_MAX
    return fits and all(isinstance(text, str) and 1 <= len(text) <= STOP_MAX_CHARS for text in value)


def _is_extra(value: Any) -> bool:
    return isinstance(value, dict) and len(to_text(value)) <= EXTRA_MAX_CHARS and not RESERVED & value.keys()


PARAMETERS: dict[str, Check] = {
    "temperature": _number(0, 2),
    "topP": _number(0, 1),
    "reasoningEffort": _choice(*EFFORTS),
    "stop": (_is_stop, f"a list of 1 to {STOPS_MAX} texts of 1 to {STOP_MAX_CHARS} characters"),
    "seed": (lambda value: type(value) is int and abs(value) < 2**63, "a whole number"),
    # Merged into the body of a request.
    "extra": (
        _is_extra,
        f"a JSON object of at most {EXTRA_MAX_CHARS} characters without what the service sets itself: "
        f"{', '.join(sorted(RESERVED))}",
    ),
}
# `stop` is not sent to openai_responses, `seed` to openai_responses and anthropic, which do not have them.
check_parameters = partial(check_names, checks=PARAMETERS)


@dataclass(frozen=True, slots=True)
class Dialect:
    """docs/models.md explains the fields. Their names in the admin and in the catalogue file are in camelCase."""

    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    stream_options: bool = True
    system_role: Literal["system", "developer", "user"] = "system"
    image_input: bool = True
    file_input: bool = True
    tool_images: bool = True
    parallel_tool_calls: bool | None = None
    prompt_cache_key: bool = False
    reasoning_field: str = "reasoning_content"
    reasoning_back: bool = False
    sampling: bool = True
    seed_field: Literal["seed", "random_seed"] = "seed"
    effort_with_tools: str = ""
    counts_tokens: bool = False
    adaptive_thinking: bool = False
    call_id_length: int = 0


NAMES = {camel(field.name): field.name for field in fields(Dialect)}
REASONING_MODEL = re.compile(r"(?:^|/)(?:gpt-[5-9](?![\d.]*-chat)|o[1-9])")
# These models refuse chat completions with tools unless reasoning is off.
NO_REASONING_WITH_TOOLS = re.compile(r"(?:^|/)gpt-(?:5\.[1-9]|[6-9])(?![\d.]*-chat)")
# claude-3-5-haiku-20241022, claude-opus-4-20250514, claude-opus-4-7, claude-sonnet-5, claude-mythos-preview
CLAUDE = re.compile(r"claude-(?:[a-z]+-)*?(?:(?P<major>\d)(?:[-.](?P<minor>\d)(?!\d))?(?!\d)|(?=mythos|fable))")
OLLAMA: dict[str, Any] = {"reasoning_field": "reasoning", "reasoning_back": False}
MISTRAL: dict[str, Any] = {"reasoning_field": "", "reasoning_back": False, "stream_options": False}
MISTRAL |= {"call_id_length": 9, "seed_field": "random_seed", "tool_images": False}
HOSTS: dict[str, dict[str, Any]] = {
    "api.deepseek.com": {"reasoning_back": True, "image_input": False},
    "api.mistral.ai": MISTRAL,
    "openrouter.ai": {"reasoning_field": "reasoning_details", "reasoning_back": True, "file_input": True},
    "generativelanguage.googleapis.com": {"reasoning_field": "extra_content", "reasoning_back": True},
    "api.groq.com": OLLAMA | {"max_tokens_field": "max_completion_tokens"},
}


def _profile(server: Server, model: str) -> dict[str, Any]:
    """The fields in which the server and the model differ from the protocol."""
    found: dict[str, Any] = {}
    reasons = REASONING_MODEL.search(model) is not None
    if server.kind == "anthropic":
        found = {"reasoning_back": True, "prompt_cache_key": True, "counts_tokens": server.host == "api.anthropic.com"}
        found |= {"adaptive_thinking": _claude_since(model, 4, 6), "sampling": not _claude_since(model, 4, 7)}
    elif server.kind == "openai_responses":
        found = {"reasoning_back": True, "sampling": not reasons, "counts_tokens": server.host == "api.openai.com"}
    elif server.kind == "openai":
        found = {"file_input": False}  # most servers of chat completions do not read PDF files
        if server.host == "api.openai.com" or server.is_azure:
            found = {"max_tokens_field": "max_completion_tokens", "reasoning_field": ""}
            found |= {"system_role": "developer", "sampling": False} if reasons else {}
            found |= {"effort_with_tools": "none"} if NO_REASONING_WITH_TOOLS.search(model) else {}
        if any(name in model.lower() for name in ("deepseek", "kimi")):
            found["reasoning_back"] = True  # their thinking models refuse a turn with calls whose reasoning is missing
    if server.host == "api.openai.com":
        found["prompt_cache_key"] = True
    if ":11434" in server.base_url:
        return found | OLLAMA
    return found | HOSTS.get(server.host, {})


def _claude_since(model: str, *version: int) -> bool:
    """Whether the model is a Claude of this version or newer. Old names have the version before the family."""
    found = CLAUDE.search(model)
    if found is None:
        return False
    return found["major"] is None or (int(found["major"]), int(found["minor"] or 0)) >= version


def dialect_of(server: Server, provider_model: str, own: Mapping[str, Any]) -> Dialect:
    """The model's profile, overridden by the values that staff set (``own``). Raises ValueError."""
    given = {NAMES[name]: value for name, value in check_dialect(own).items()}
    return Dialect(**_profile(server, provider_model) | given)


# The checks by the type of the field. The other types are choices.
TYPES: dict[Any, Check] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    bool | None: (lambda value: value is None or isinstance(value, bool), "true, false or null"),
    int: (lambda value: type(value) is int and 0 <= value <= 64, "a whole number from 0 to 64"),
    str: (lambda value: isinstance(value, str) and len(value) <= 64, "a text of at most 64 characters"),
}
check_dialect = partial(
    check_names,
    checks={camel(name): TYPES.get(kind) or _choice(*get_args(kind)) for name, kind in get_type_hints(Dialect).items()},
)

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
    def from_row(cls, row: AgentModel) -> Self:
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
        """Identifies who may get reasoning back: only this model of this provider, over the same protocol."""
        return f"{self.server.kind}:{self.server.name}/{self.provider_model}"

    def cost(self, input_tokens: int, cached: int, cache_write: int, output_tokens: int) -> int:
        """The price of a turn in micro-credits. ``cached`` and ``cache_write`` are parts of ``input_tokens``."""
        plain = max(0, input_tokens - cached - cache_write)
        return (
            money.price(plain, self.price_in)
            + money.price(cached, self.price_cached_in)
            + money.price(cache_write, self.price_cache_write)
            + money.price(output_tokens, self.price_out)
        )
