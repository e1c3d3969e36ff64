"""The kinds of providers, presets for known services, and the server of a provider's row and the environment."""

from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from django.conf import settings

from config.kernel.encryption import DecryptionFailed
from runs.models import Provider
from runs.tools.base import is_address, parse_headers, secrets_in


@dataclass(frozen=True, slots=True)
class Kind:
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


@dataclass(frozen=True, slots=True)
class Preset:
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
NO_KEY = "Its key is missing."


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
        """Raises ValueError for headers that are not valid."""
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

    def problem(self) -> str | None:
        """Why no request can be made, for staff."""
        kind = KINDS.get(self.kind)
        if kind is None:
            return f"There is no kind of provider named {self.kind}."
        if kind.is_offline:
            return None
        if not is_address(self.base_url):
            return "Its address is missing or not an http(s) address."
        if not all("!" <= character <= "~" for character in self.api_key):
            return "Its key holds a character that is not valid in a key, such as a blank."
        return None if self.has_key else NO_KEY


def problem_of(provider: Provider) -> str | None:
    """Why the stored provider cannot be used, for staff."""
    try:
        problem = Server.from_row(Provider.objects.get(pk=provider.pk)).problem()
    except DecryptionFailed:
        return "No key of ENCRYPTION_KEYS decrypts its secrets."
    except ValueError as error:
        return str(error)
    variable = key_variable(provider.name, provider.base_url)
    return f"Its key is missing: {variable}." if problem == NO_KEY and variable else problem
