"""The catalogue's providers and models: presets, write-only secrets, and a test request."""

from typing import Any

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from unfold.decorators import action

from config.kernel import money
from config.kernel.encryption import DecryptionFailed
from config.staff.base import column
from config.staff.forms import CreditsField, ObjectField, SecretField, StaffForm
from runs.admin.tools import FORGETS, CatalogueAdmin, set_secrets
from runs.catalogue import definitions, rules
from runs.catalogue.definitions import ENVIRONMENT, KINDS, PRESETS, Server, address_of, key_variable, problem_of
from runs.llm.base import ModelError
from runs.llm.registry import models_of, probe
from runs.models import AgentModel, Provider
from runs.tools.base import is_address, parse_headers


class TestedAdmin(CatalogueAdmin):
    """Rows with a page *Test*."""

    actions_detail = ("test",)

    def ask(self, row: Any) -> dict[str, Any]:
        """Ask the server of the row. Returns what the page shows of its answer."""
        raise NotImplementedError

    @action(description="Test", icon="network_check", permissions=["change"])
    def test(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """GET shows the page with its button. POST asks the server, and shows what it answers."""
        row = self.row(request, object_id)
        shown: dict[str, Any] = {}
        if request.method == "POST":
            self.log_change(request, row, "Tested it.")
            try:
                shown["found"] = self.ask(row)
            except ModelError as error:
                shown["error"] = error
            except (DecryptionFailed, ValueError) as error:
                shown["problem"] = str(error)
        return self.page(request, f"admin/runs/{self.opts.model_name}/test.html", "Test", row, **shown)


class ProviderForm(StaffForm, forms.ModelForm):
    preset = forms.ChoiceField(
        required=False,
        choices=[("", "Another service"), *((name, preset.label) for name, preset in PRESETS.items())],
        help_text="Fills in the kind and the address, where they are left empty.",
    )
    kind = forms.ChoiceField(
        required=False, choices=[("", "The preset's kind"), *((name, kind.label) for name, kind in KINDS.items())]
    )
    new_api_key = SecretField(
        label="New API key", max_length=rules.API_KEY_MAX_CHARS, help_text="Empty keeps the stored key."
    )
    forget_api_key = forms.BooleanField(required=False, label="Delete the stored key")
    new_headers = SecretField(
        max_length=rules.HEADERS_MAX_CHARS,
        validators=[rules.fits(parse_headers)],
        help_text='More headers: a JSON object such as {"X-Project": "…"}; empty keeps the stored ones.',
    )
    forget_headers = forms.BooleanField(required=False, label="Delete the stored headers")

    class Meta:
        model = Provider
        fields = ["name", "kind", "base_url", "max_concurrent", "requests_per_minute", "enabled"]
        help_texts = {
            "base_url": "Without the path of the requests, for example http://127.0.0.1:11434/v1. "
            f"Empty for {' and '.join(ENVIRONMENT)}: the environment's. {FORGETS}",
            "max_concurrent": "Over all workers. Further runs wait for their turn. Empty: no limit.",
            "requests_per_minute": "Over all workers. Empty: no limit.",
        }

    def clean(self) -> dict[str, Any]:
        data = super().clean() or {}
        if preset := PRESETS.get(data.get("preset") or ""):
            data["kind"] = data.get("kind") or preset.kind
            data["base_url"] = data.get("base_url") or preset.base_url
        if not data.get("kind"):
            self.add_error("kind", "Choose a kind or a preset.")
        url = data.get("base_url") or ""
        if url and not is_address(url):
            self.add_error("base_url", rules.NO_ADDRESS)
        before = address_of(self.instance.name, self.instance.base_url)
        set_secrets(self, ("api_key", "headers"), before, address_of(data.get("name", ""), url))
        return data


KEY_TONES = {"set": "success", "missing": "danger", "not needed": "default"}


def key_of(provider: Provider) -> tuple[str, str]:
    """(a name of KEY_TONES, text). A stored secret is not read, only looked for: perhaps no key decrypts it."""
    variable = key_variable(provider.name, provider.base_url)
    if Provider.objects.filter(pk=provider.pk).exclude(api_key=None, headers=None).exists():
        return "set", "set"
    if variable and getattr(settings, variable):
        return "set", variable
    server = Server(provider.name, provider.kind, address_of(provider.name, provider.base_url))
    return ("missing", f"missing: {variable}".rstrip(": ")) if server.needs_key else ("not needed", "not needed")


@admin.register(Provider)
class ProviderAdmin(TestedAdmin):
    table = "providers"
    form = ProviderForm
    unread = ("api_key", "headers")
    list_display = ("name", "kind", "key", "base_url", "enabled")
    key = column("key", key_of, label=KEY_TONES)
    key_text = column("key", lambda provider: key_of(provider)[1])
    view_fields = (*ProviderForm.Meta.fields, "key_text")
    server = ("preset", "name", "kind", "base_url", "new_api_key", "forget_api_key", "new_headers", "forget_headers")
    fields = (*server, "max_concurrent", "requests_per_minute", "enabled")

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        if problem := problem_of(obj):
            messages.warning(request, f"{obj.name} cannot be used yet: {problem}")

    def response_post_save_add(self, request: HttpRequest, obj: Provider) -> HttpResponse:
        return HttpResponseRedirect(self.url("test", obj.pk))

    def ask(self, provider: Provider) -> dict[str, Any]:
        """The models that the server lists, and those that are added. The page links the others to their form."""
        names = models_of(Server.from_row(Provider.objects.get(pk=provider.pk)))
        return {"names": names, "known": set(provider.models.values_list("provider_model", flat=True))}


class AgentModelForm(StaffForm, forms.ModelForm):
    price_in = CreditsField(label="Price of 1,000 tokens in", help_text="Credits")
    price_out = CreditsField(label="Price of 1,000 tokens out", help_text="Credits")
    price_cached_in = CreditsField(
        required=False,
        label="Price of 1,000 tokens in, read from the provider's cache",
        help_text="Credits; empty: as other tokens in",
    )
    price_cache_write = CreditsField(
        required=False,
        label="Price of 1,000 tokens in, written to the provider's cache",
        help_text="Credits; empty: as other tokens in",
    )
    parameters = ObjectField(
        validators=[rules.fits(definitions.check_parameters)],
        help_text=f"JSON with any of {', '.join(definitions.PARAMETERS)}.",
    )
    dialect = ObjectField(
        validators=[rules.fits(definitions.check_dialect)],
        help_text="What the server wants otherwise than its profile says: JSON with any of "
        f"{', '.join(definitions.NAMES)}.",
    )
    fallbacks = forms.CharField(
        required=False,
        max_length=2000,
        help_text="Names of models that are asked, in this order, when this one fails; separated by commas.",
    )

    class Meta:
        model = AgentModel
        described = ["name", "display_name", "provider", "provider_model"]
        prices = ["price_in", "price_out", "price_cached_in", "price_cache_write"]
        used = ["context_tokens", "max_output_tokens", "parameters", "dialect", "fallbacks", "is_default", "enabled"]
        fields = [*described, *prices, "provider_cost_percent", *used]
        help_texts = {
            "is_default": "The model of runs that name none. It replaces the present default.",
            "provider_model": "The provider's own name of the model.",
            "context_tokens": "The size of the model's window.",
            "max_output_tokens": f"The most tokens of one answer; empty: {definitions.MODEL_MAX_OUTPUT_TOKENS:,}.",
        }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if "fallbacks" in self.fields:
            self.initial["fallbacks"] = ", ".join(self.instance.fallbacks)

    def clean_fallbacks(self) -> list[str]:
        names = [name.strip() for name in self.cleaned_data["fallbacks"].split(",") if name.strip()]
        known = set(AgentModel.objects.filter(name__in=names).values_list("name", flat=True))
        others = known - {self.data.get("name")}
        if problem := rules.problem_of_names(names, others, rules.FALLBACKS_MAX, "other model"):
            raise ValidationError(problem)
        return names


def price_column(name: str) -> Any:
    """A price in credits, for staff who may only look: their page shows the fields of a row as they are stored."""
    column = admin.display(description=f"{AgentModelForm.base_fields[name].label} (credits)")
    return column(lambda model: "–" if (price := getattr(model, name)) is None else money.to_text(price))


@admin.register(AgentModel)
class AgentModelAdmin(TestedAdmin):
    table = "models"
    form = AgentModelForm
    prices_shown = tuple(map(price_column, form.Meta.prices))
    view_fields = (*form.Meta.described, *prices_shown, "provider_cost_percent", *form.Meta.used)
    unread = ("provider__api_key", "provider__headers")
    list_display = ("name", "provider", "provider_model", "prices", "is_default", "enabled")
    list_select_related = ("provider",)
    prices = column(
        "credits per 1,000 tokens in / out",
        lambda model: f"{money.to_text(model.price_in)} / {money.to_text(model.price_out)}",
    )

    def save_model(self, request: HttpRequest, obj: Any, form: Any, change: bool) -> None:
        super().save_model(request, obj, form, change)
        if problem := problem_of(obj.provider):
            messages.warning(request, f"{obj.name} cannot be used yet, because of its provider: {problem}")

    def ask(self, model: AgentModel) -> dict[str, Any]:
        """One tiny request to the model, and what came."""
        row = AgentModel.objects.select_related("provider").get(pk=model.pk)
        return probe(definitions.ModelDefinition.from_row(row))
