"""What the engine and the API see of the catalogue's providers and models. A ``Server`` comes from a provider's row and
the environment. A ``ModelDefinition`` has the model's server, parameters and dialect. The dialect says where the server
or the model differs from the protocol: built-in profiles know some differences, and staff set others.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from functools import partial
from typing import Any, Literal, NamedTuple, Self, TypeAlias, get_args, get_type_hints
from urllib.parse import urlsplit

from django.conf import settings

from config.api.serializers import camel
from config.kernel import money
from config.kernel.encryption import DecryptionFailed, require_decrypted
from config.kernel.jsontext import to_text
from runs.models import AgentModel, Provider
from runs.tools.base import is_address, parse_headers, secrets_in


class Kind(NamedTuple):
    """A protocol. ``adapter``: a ``runs.llm.base.ModelClient``. ``is_offline``: it has no address, and its count of
    tokens is this service's own estimate.
    """

    label: str
    adapter: str
    is_offline: bool = False
    models_path: str = "/models"  # where the server lists its models; empty if it has no list


KINDS = {
    "demo": Kind("Demo (offline)", "runs.llm.demo.DemoModel", is_offline=True, models_path=""),
    "openai": Kind("OpenAI chat completions", "runs.llm.openai_chat.OpenAIModel"),
    "openai_responses": Kind("OpenAI Responses", "runs.llm.openai_responses.ResponsesModel"),
    "anthropic": Kind("Anthropic Messages", "runs.llm.anthropic.AnthropicModel", models_path="/v1/models?limit=1000"),
}


class Preset(NamedTuple):
    """A known service, which staff choose instead of typing its address."""

    label: str
    kind: str
    base_url: str
    needs_key: bool = True


PRESETS = {
    "openai": Preset("OpenAI", "openai_responses", "https://api.openai.com/v1"),
    "anthropic": Preset("Anthropic", "anthropic", "https://api.anthropic.com"),
    "ollama": Preset("Ollama", "openai", "http://127.0.0.1:11434/v1", needs_key=False),
    "vllm": Preset("vLLM", "openai", "http://127.0.0.1:8000/v1", needs_key=False),
    "openrouter": Preset("OpenRouter", "openai", "https://openrouter.ai/api/v1"),
    "mistral": Preset("Mistral", "openai", "https://api.mistral.ai/v1"),
    "deepseek": Preset("DeepSeek", "openai", "https://api.deepseek.com/v1"),
    "groq": Preset("Groq", "openai", "https://api.groq.com/openai/v1"),
    "azure": Preset("Azure OpenAI", "openai", "https://RESOURCE.openai.azure.com/openai/v1"),
}
# The hosts that need a key. A server at another address may need none.
KEY_HOSTS = {urlsplit(preset.base_url).hostname for preset in PRESETS.values() if preset.needs_key}
AZURE_HOSTS = (".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com")

# The rows whose empty fields are filled from the environment: OPENAI_BASE_URL and OPENAI_API_KEY, and so on.
ENVIRONMENT = ("openai", "anthropic")


def key_variable(name: str, base_url: str) -> str:
    """The environment variable with the key of a provider's row; empty if the row cannot use one."""
    return f"{name.upper()}_API_KEY" if name in ENVIRONMENT and not base_url else ""


def address_of(name: str, base_url: str) -> str:
    """The address of a provider's row, or if that is empty, the one in the environment."""
    return base_url or (getattr(settings, f"{name.upper()}_BASE_URL") if name in ENVIRONMENT else "")


@dataclass(frozen=True, slots=True)
class Server:
    """A provider as a model client needs it. Equal servers share their connections."""

    name: str
    kind: str
    base_url: str = ""
    api_key: str = field(default="", repr=False)
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    max_concurrent: int | None = None
    requests_per_minute: int | None = None

    @classmethod
    def from_row(cls, row: Provider) -> Self:
        """Raises DecryptionFailed, and ValueError for headers that are not valid."""
        require_decrypted(row.api_key, row.headers)
        url = address_of(row.name, row.base_url).rstrip("/")
        # A key in the environment is used only with the address in the environment.
        variable = key_variable(row.name, row.base_url)
        key = row.api_key or (getattr(settings, variable) if variable else "")
        headers = tuple(parse_headers(row.headers).items())
        return cls(row.name, row.kind, url, key, headers, row.max_concurrent, row.requests_per_minute)

    @property
    def is_limited(self) -> bool:
        return bool(self.max_concurrent or self.requests_per_minute)

    @property
    def host(self) -> str:
        return urlsplit(self.base_url).hostname or ""

    @property
    def is_azure(self) -> bool:
        return self.host.endswith(AZURE_HOSTS)

    @property
    def needs_key(self) -> bool:
        return self.host in KEY_HOSTS or self.is_azure

    @property
    def has_key(self) -> bool:
        """Whether it has a key, or needs none."""
        return bool(self.api_key or self.headers) or not self.needs_key

    def secrets(self) -> tuple[str, ...]:
        return secrets_in(self.api_key, dict(self.headers).values())

    def problem(self, variable: str = "") -> str | None:
        """Why no request can be made, for staff. ``variable``: the one of the environment that may have the key."""
        kind = KINDS.get(self.kind)
        if kind is None:
            return f"There is no kind of provider named {self.kind}."
        if kind.is_offline:
            return None
        if not is_address(self.base_url):
            return "Its address is missing or not an http(s) address."
        if not all("!" <= character <= "~" for character in self.api_key):
            return "Its key holds a character that is not valid in a key, such as a blank."
        return None if self.has_key else f"Its key is missing: {variable}".rstrip(": ") + "."


def problem_of(provider: Provider) -> str | None:
    """Why the stored provider cannot be used, for staff."""
    try:
        server = Server.from_row(Provider.objects.get(pk=provider.pk))
    except DecryptionFailed:
        return "No key of ENCRYPTION_KEYS decrypts its secrets."
    except ValueError as error:
        return str(error)
    return server.problem(key_variable(provider.name, provider.base_url))


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


NAMES = {camel(column.name): column.name for column in fields(Dialect)}
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
        """Raises DecryptionFailed, and ValueError if a value of the row, or of its provider's, is not valid."""
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
