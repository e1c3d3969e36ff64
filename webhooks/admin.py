"""Webhooks in the admin: read-only, except that an endpoint can be disabled. No page shows a secret."""

from operator import attrgetter
from typing import Any
from urllib.parse import urlsplit

from django import forms
from django.contrib import admin, messages
from django.http import HttpRequest
from unfold.admin import TabularInline
from unfold.widgets import UnfoldBooleanWidget

from config.staff import base
from config.staff.actions import ActionForm, Did, WithActions, staff_action
from webhooks import services
from webhooks.events import CreditsEvent, Event, TrialEvent
from webhooks.models import Attempt, Delivery, Endpoint

USER, OWNER, RUN = base.user_column(), base.user_column("user", "(installation)"), base.link_column("run_id", "run")
CHAT, ENDPOINT = base.link_column("chat_id", "chat"), base.link_column("endpoint_id", "endpoint")
DELIVERIES = base.list_column("deliveries", "Deliveries to this endpoint", "webhooks_delivery?q")


class InstallationForm(ActionForm):
    url = forms.CharField(label="URL", max_length=services.URL_MAX_CHARS)
    rotate = forms.BooleanField(
        label="New secret",
        required=False,
        widget=UnfoldBooleanWidget,
        help_text="For an endpoint that exists: its deliveries are signed with both secrets in the grace window.",
    )

    def clean(self) -> None:
        if "url" in self.cleaned_data:
            services.check_url(self.cleaned_data["url"])


def is_installation(endpoint: Endpoint) -> bool:
    return endpoint.user_id is None and endpoint.deleted_at is None


def is_enabled(endpoint: Endpoint) -> bool:
    return endpoint.enabled and endpoint.deleted_at is None


@staff_action("webhooks.disable_endpoint", about="some", icon="notifications_off", danger=True, offered=is_enabled)
def disable(request: HttpRequest, endpoint: Endpoint, data: dict[str, Any]) -> Did:
    """Pending deliveries of these endpoints are dropped. The endpoints get no further deliveries until their users
    enable them again.
    """
    services.change(endpoint.user, enabled=False)
    return Did(endpoint, "Disabled.")


@staff_action("webhooks.disable_endpoint", label="Send a test event", icon="send", offered=is_enabled)
def test(request: HttpRequest, endpoint: Endpoint, data: dict[str, Any]) -> Did:
    """The endpoint gets a signed event of the type webhook.test, which is listed among its deliveries."""
    services.send_test(endpoint.user)
    return Did(endpoint, "Sent a test event.")


SET_UP = "webhooks.set_installation_endpoint"


@staff_action(SET_UP, label="Set up the installation endpoint", form=InstallationForm, about="none", icon="hub")
def installation(request: HttpRequest, row: None, data: dict[str, Any]) -> Did:
    """This endpoint gets the events of all users, with their usernames."""
    endpoint, reveal = services.register(services.INSTALLATION, data["url"], rotate=data["rotate"], extended=True)
    if reveal:
        messages.warning(request, f"The secret, which is shown only now: {endpoint.secret}")
    return Did(endpoint, "Set up as the installation endpoint" + (", with a new secret." if reveal else "."))


@staff_action(
    SET_UP,
    label="Enable",
    icon="notifications",
    offered=lambda endpoint: is_installation(endpoint) and not endpoint.enabled,
)
def enable_installation(request: HttpRequest, endpoint: Endpoint, data: dict[str, Any]) -> Did:
    """This endpoint gets the events of all users again."""
    services.change(endpoint.user, enabled=True)
    return Did(endpoint, "Enabled.")


@staff_action(SET_UP, label="Delete", icon="delete", danger=True, offered=is_installation)
def delete_installation(request: HttpRequest, endpoint: Endpoint, data: dict[str, Any]) -> Did:
    """Pending deliveries of this endpoint are dropped. It gets no further deliveries."""
    services.delete_endpoint(endpoint.user)
    return Did(endpoint, "Deleted.")


@admin.register(Endpoint)
class EndpointAdmin(base.ReadOnly, WithActions):
    list_display = ("id", OWNER, "receiver", "condition", "extended_events", "created_at")
    list_select_related = ("user",)
    list_filter = ("enabled", "failing")
    search_help_text = "Endpoint's id or user"
    unread = ("secret", "secondary_secret")
    condition = base.column("state", attrgetter("state"), label=Endpoint.STATES)
    fields = (("id", OWNER), ("receiver", "condition"), ("extended_events", DELIVERIES), ("created_at", "updated_at"))
    staff_actions = (disable, test, installation, enable_installation, delete_installation)

    def receiver(self, endpoint: Endpoint) -> str:
        """Without path and query: for many receivers they are the credential."""
        parts = urlsplit(endpoint.url)
        return f"{parts.scheme}://{parts.hostname or ''}" + (f":{parts.port}" if parts.port else "")


class AttemptInline(base.ReadOnly, TabularInline):
    model = Attempt
    fields = ("number", "started_at", "duration_ms", "status_code", "error", "answer")


@admin.register(Delivery)
class DeliveryAdmin(base.ReadOnly, base.StaffAdmin):
    empty_text = "A delivery appears when something happens in a run of a user with an endpoint."
    list_display = ("id", "event_type", USER, RUN, "state", "attempt_count", "next_attempt_at", "created_at")
    list_filter = ("status", base.choice_filter("event_type", "event", [*Event, *CreditsEvent, *TrialEvent]))
    list_select_related = ("user",)
    search_help_text = "Delivery, event, run, endpoint or user"
    id_fields = {"evt": "event_id", "run": "run_id", "whe": "endpoint_id"}
    inlines = (AttemptInline,)
    about = (("id", "event_id"), ("event_type", "user"), (ENDPOINT, "request_id"), (RUN, CHAT), "body")
    fields = (*about, ("status", "attempt_count"), ("created_at", "next_attempt_at"), "finished_at")
    state = base.status_column(Delivery.Status)
