"""What a user can do with the webhook endpoint: register, rotate, enable, disable, delete."""

from __future__ import annotations

import secrets
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import Prefetch, QuerySet

from config.kernel import clock
from config.kernel.errors import NotFound, ValidationFailed
from config.outbound import client
from webhooks import transitions
from webhooks.models import LOST_SECRETS, Attempt, Delivery, Endpoint, opened

URL_MAX_CHARS = 2048
SECRET_BYTES = 32


def check_url(url: str) -> None:
    """Raise ValidationFailed unless deliveries may go to ``url``.

    Resolves the host on the network, for a bounded time. No transaction may be open.
    """
    private = settings.OUTBOUND_ALLOW_PRIVATE
    try:
        if "#" in url:
            raise ValueError("The URL must not hold a fragment.")
        client.check_url(url, private, https_only=not private, timeout=settings.OUTBOUND_CONNECT_TIMEOUT_SECONDS)
    except (client.AddressRefused, ValueError) as error:
        raise ValidationFailed({"url": [str(error)]}) from None


def endpoints_of(user: Any) -> QuerySet[Endpoint]:
    return Endpoint.objects.filter(user=user, deleted_at=None)


def endpoint_of(user: Any) -> Endpoint:
    endpoint = opened(endpoints_of(user))
    if endpoint is None:
        raise NotFound
    return endpoint


def deliveries_of(user: Any, status: str | None = None) -> QuerySet[Delivery]:
    """The user's deliveries, those of deleted endpoints included."""
    attempts = Prefetch("attempts", Attempt.objects.order_by("number"))
    found = Delivery.objects.filter(user=user).defer("body").prefetch_related(attempts)
    return found.filter(status=status) if status else found


def register(user: Any, url: str, *, rotate: bool) -> tuple[Endpoint, bool]:
    """Create the user's endpoint, or change it in place. Returns it, and whether its secret is new and must be shown.

    ``url`` has passed ``check_url``. Of simultaneous first calls one creates the endpoint and the others find it. A
    secret that no key decrypts gets no grace window when it is rotated.
    """
    with transaction.atomic():
        endpoint = opened(endpoints_of(user).select_for_update())
        if endpoint is None:
            try:
                with transaction.atomic():
                    return Endpoint.objects.create(user=user, url=url, secret=new_secret(), **_stamps()), True
            except IntegrityError:
                endpoint = endpoints_of(user).select_for_update().get()
        endpoint.url, endpoint.updated_at = url, clock.now()
        changed = ["url", "updated_at"]
        if rotate:
            endpoint.secondary_secret = endpoint.secret or None
            endpoint.secondary_expires_at = clock.now() + timedelta(seconds=settings.WEBHOOK_GRACE_SECONDS)
            endpoint.secret = new_secret()
            changed += [*LOST_SECRETS, "secondary_expires_at"]
        endpoint.save(update_fields=changed)
        return endpoint, rotate


def set_enabled(user: Any, enabled: bool) -> Endpoint:
    """Disabling drops the pending deliveries; no events are recorded while the endpoint is disabled."""
    with transaction.atomic():
        endpoint = opened(endpoints_of(user).select_for_update())
        if endpoint is None:
            raise NotFound
        if endpoint.enabled != enabled:
            endpoint.enabled = enabled
            endpoint.updated_at = clock.now()
            endpoint.save(update_fields=["enabled", "updated_at"])
        if not enabled:
            transitions.mark_dead([endpoint.pk])
        return endpoint


def delete_endpoint(user: Any) -> None:
    """Keeps the row, without secrets, because deliveries refer to it. Drops the pending deliveries."""
    with transaction.atomic():
        endpoint = opened(endpoints_of(user).select_for_update())
        if endpoint is None:
            raise NotFound
        endpoint.deleted_at = endpoint.updated_at = clock.now()
        endpoint.secret, endpoint.secondary_secret, endpoint.secondary_expires_at = "", None, None
        endpoint.save(update_fields=["deleted_at", "updated_at", "secret", "secondary_secret", "secondary_expires_at"])
        transitions.mark_dead([endpoint.pk])


def disable(endpoints: QuerySet[Endpoint]) -> int:
    """Disable these endpoints for staff. Returns how many were enabled."""
    count = 0
    for endpoint in endpoints.filter(deleted_at=None, enabled=True).select_related("user"):
        set_enabled(endpoint.user, False)
        count += 1
    return count


def new_secret() -> str:
    return secrets.token_hex(SECRET_BYTES)


def _stamps() -> dict[str, Any]:
    now = clock.now()
    return {"created_at": now, "updated_at": now}
