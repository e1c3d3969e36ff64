"""The admin of API keys: staff can revoke a key and remove scopes. They cannot create one and so see its secret."""

from dataclasses import replace
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.db.models import Q
from django.http import HttpRequest

from apikeys import keys
from apikeys.models import CREDITS, SESSION_TOKENS, ApiKey, ServerKey
from config.staff.actions import ActionForm, Did, WithActions, staff_action
from config.staff.base import ReadOnly, user_column

SCOPES = admin.display(description="scopes")(lambda key: ", ".join(key.scopes))


class ScopesForm(ActionForm):
    scopes = forms.MultipleChoiceField(
        required=False,
        help_text="Scopes without a tick are removed permanently. A key without scopes can only describe itself.",
    )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        field: Any = self.fields["scopes"]
        field.choices = [(scope, scope) for scope in self.target.scopes]
        field.initial = self.target.scopes


def is_not_revoked(key: ApiKey | ServerKey) -> bool:
    return key.revoked_at is None


@staff_action("apikeys.revoke_apikey", about="some", icon="block", danger=True, offered=is_not_revoked)
def revoke(request: HttpRequest, key: ApiKey | ServerKey, data: dict[str, Any]) -> Did | None:
    """Requests with these keys are refused at once and permanently."""
    return Did(key, "Revoked.") if keys.revoke_key(key) else None


@staff_action(
    "apikeys.narrow_apikey",
    label="Narrow scopes",
    form=ScopesForm,
    icon="tune",
    offered=lambda key: is_not_revoked(key) and bool(key.scopes),
)
def narrow(request: HttpRequest, key: ApiKey, data: dict[str, Any]) -> Did | None:
    """A removed scope cannot be restored; the user can create another key."""
    removed = keys.narrow_key(key, data["scopes"])
    return Did(key, f"Removed {', '.join(removed)}.") if removed else None


class KeyAdmin(ReadOnly, WithActions):
    def find(self, word: str) -> Q:
        is_key = word.startswith((keys.MARK, keys.SERVER_MARK))
        return Q(prefix=word[: keys.PREFIX_LENGTH]) if is_key else super().find(word)


@admin.register(ApiKey)
class ApiKeyAdmin(KeyAdmin):
    empty_text = "Users create keys with the API."
    list_display = ("id", "prefix", "name", user_column(), "created_at", "last_used_at", "expires_at", "revoked_at")
    list_select_related = ("user",)
    search_help_text = "Key's id or first 8 characters, or user"
    # Never the digest.
    fields = ("id", "user", "name", "prefix", SCOPES, "created_at", "last_used_at", "expires_at", "revoked_at")
    staff_actions = (revoke, narrow)


class ServerKeyForm(ActionForm):
    name = forms.CharField(max_length=100, help_text="The backend that has the key.")
    scopes = forms.MultipleChoiceField(
        choices=[
            (SESSION_TOKENS, "Make session tokens for any user except staff"),
            (CREDITS, "Grant, revoke and read the credits of any user except staff"),
        ],
        initial=[SESSION_TOKENS],
        widget=forms.CheckboxSelectMultiple,
        label="May",
    )


@staff_action("apikeys.create_serverkey", label="Create a server key", form=ServerKeyForm, about="none", icon="vpn_key")
def create(request: HttpRequest, row: None, data: dict[str, Any]) -> Did:
    """Who has this key can do this for every user, except staff."""
    key, secret = keys.create_server_key(data["name"], data["scopes"])
    messages.warning(request, f"The server key, which is shown only now: {secret}")
    return Did(key, "Created.")


@admin.register(ServerKey)
class ServerKeyAdmin(KeyAdmin):
    list_display = ("id", "prefix", "name", SCOPES, "created_at", "last_used_at", "revoked_at")
    search_help_text = "Key's id or first 8 characters"
    # Never the digest.
    fields = ("id", "name", "prefix", SCOPES, "created_at", "last_used_at", "revoked_at")
    staff_actions = (
        create,
        replace(
            revoke,
            permission="apikeys.revoke_serverkey",
            question="These keys are refused, at once and permanently. Session tokens that they made before stay valid "
            "until they expire.",
        ),
    )
