"""What users can do with their webhook endpoint, and staff with that of the user ``INSTALLATION``."""

import secrets
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from config.database import batches
from config.kernel import clock
from config.kernel.errors import Conflict, NotFound
from config.outbound import client
from webhooks import outbox, transitions
from webhooks.models import Attempt, Delivery, Endpoint

INSTALLATION: Any = None
URL_MAX_CHARS = 2048
PURGE_BATCH = 1000


def check_url(url: str) -> None:
    """Raise ValidationError unless deliveries may go to ``url``. Resolves the host, so no transaction may be open."""
    private = settings.OUTBOUND_ALLOW_PRIVATE
    try:
        if "#" in url:
            raise ValueError("The URL must not contain a fragment.")
        client.check_url(url, private, https_only=not private)
    except (client.AddressRefused, ValueError) as error:
        raise ValidationError({"url": [str(error)]}) from None


def endpoints_of(user: Any) -> QuerySet[Endpoint]:
    return Endpoint.objects.filter(user=user, deleted_at=None)


def endpoint_of(user: Any, *, lock: bool = False) -> Endpoint:
    """Raises NotFound. With ``lock``, the endpoint is locked until the transaction ends."""
    endpoint = (endpoints_of(user).select_for_update(no_key=True) if lock else endpoints_of(user)).first()
    if endpoint is None:
        raise NotFound
    return endpoint


@transaction.atomic
def register(
    user: Any, url: str, *, rotate: bool, extended: bool | None = None, secret: str | None = None
) -> tuple[Endpoint, bool]:
    """Create the user's endpoint, or change it in place. ``url`` must have passed ``check_url``. Returns the endpoint,
    and whether its secret is new and must be shown. ``extended`` None leaves the choice unchanged. ``secret``: the new
    secret, if it is not to be random. A rotated secret that no key decrypts gets no grace window.
    """
    now, chosen = clock.now(), secret or secrets.token_hex(32)
    first = {"url": url, "secret": chosen, "extended_events": bool(extended), "created_at": now, "updated_at": now}
    locked = endpoints_of(user).select_for_update(no_key=True)
    try:
        endpoint, is_new = locked.get_or_create(user=user, deleted_at=None, defaults=first)
    except IntegrityError:  # a concurrent call has created an endpoint, which is deleted by now
        return register(user, url, rotate=rotate, extended=extended, secret=secret)
    if is_new:
        return endpoint, True
    changes: dict[str, Any] = {"url": url}
    if extended is not None:
        changes["extended_events"] = extended
    if rotate:
        until = now + timedelta(seconds=settings.WEBHOOK_GRACE_SECONDS)
        changes |= {"secondary_secret": endpoint.secret or None, "secondary_expires_at": until, "secret": chosen}
    return _write(endpoint, **changes), rotate


def _write(endpoint: Endpoint, **changes: Any) -> Endpoint:
    """Change a locked endpoint."""
    changes["updated_at"] = clock.now()
    for name, value in changes.items():
        setattr(endpoint, name, value)
    endpoint.save(update_fields=changes)
    return endpoint


@transaction.atomic
def change(user: Any, **changes: bool) -> Endpoint:
    """Set ``enabled`` and ``extended_events``. Disabling drops the pending deliveries: none of them is sent, even if
    the endpoint is enabled again before they are marked dead.
    """
    endpoint = endpoint_of(user, lock=True)
    if any(getattr(endpoint, name) != value for name, value in changes.items()):
        _write(endpoint, **changes)
    if changes.get("enabled") is False:
        transitions.drop([endpoint.pk])
    return endpoint


@transaction.atomic
def delete_endpoint(user: Any) -> None:
    """The row stays, without secrets, because deliveries refer to it. Drops the pending deliveries."""
    endpoint = endpoint_of(user, lock=True)
    _write(endpoint, deleted_at=clock.now(), secret="", secondary_secret=None, secondary_expires_at=None)
    transitions.drop([endpoint.pk])


@transaction.atomic
def send_test(user: Any) -> Delivery:
    """Record a test event for only the user's endpoint. Raises NotFound, Conflict."""
    endpoint = endpoint_of(user, lock=True)
    if not endpoint.enabled:
        raise Conflict("The endpoint is disabled: it gets no events.")
    return outbox.send_test(endpoint)


@transaction.atomic
def remove_deliveries(deliveries: QuerySet[Delivery]) -> int:
    """Delete a batch of ``deliveries``, except those that are being recorded. Returns how many were deleted."""
    taken = batches.take_batch(deliveries, PURGE_BATCH, to_delete=True)
    batches.delete_rows(Attempt, "delivery_id", taken)
    batches.delete_rows(Delivery, "id", taken)
    return len(taken)
