"""What users can do with their webhook endpoint, and staff with that of the user ``INSTALLATION``."""

import secrets
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import QuerySet

from config.database import batches
from config.kernel import clock
from config.kernel.errors import Conflict, NotFound, ValidationFailed
from config.outbound import client
from webhooks import outbox, transitions
from webhooks.models import Attempt, Delivery, Endpoint

INSTALLATION: Any = None
URL_MAX_CHARS = 2048
PURGE_BATCH = 1000


def check_url(url: str) -> None:
    """Raise ValidationFailed unless deliveries may go to ``url``. Resolves the host, so no transaction may be open."""
    private = settings.OUTBOUND_ALLOW_PRIVATE
    try:
        if "#" in url:
            raise ValueError("The URL must not contain a fragment.")
        client.check_url(url, private, https_only=not private)
    except (client.AddressRefused, ValueError) as error:
        raise ValidationFailed({"url": [str(error)]}) from None


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
    endpoint, now = endpoints_of(user).select_for_update(no_key=True).first(), clock.now()
    chosen = secret or secrets.token_hex(32)
    if endpoint is None:
        new = Endpoint(
            user=user, url=url, secret=chosen, extended_events=bool(extended), created_at=now, updated_at=now
        )
        try:
            with transaction.atomic():
                new.save(force_insert=True)
                return new, True
        except IntegrityError:  # a concurrent call has created an endpoint, which may be deleted by now
            return register(user, url, rotate=rotate, extended=extended, secret=secret)
    endpoint.url, endpoint.updated_at = url, now
    changed = ["url", "updated_at"]
    if extended is not None:
        endpoint.extended_events = extended
        changed.append("extended_events")
    if rotate:
        endpoint.secondary_secret, endpoint.secret = endpoint.secret or None, chosen
        endpoint.secondary_expires_at = now + timedelta(seconds=settings.WEBHOOK_GRACE_SECONDS)
        changed += ["secret", "secondary_secret", "secondary_expires_at"]
    endpoint.save(update_fields=changed)
    return endpoint, rotate


@transaction.atomic
def change(user: Any, **changes: bool) -> Endpoint:
    """Set ``enabled`` and ``extended_events``. Disabling drops the pending deliveries: none of them is sent, even if
    the endpoint is enabled again before they are marked dead.
    """
    endpoint = endpoint_of(user, lock=True)
    changed = [name for name, value in changes.items() if getattr(endpoint, name) != value]
    if changed:
        for name in changed:
            setattr(endpoint, name, changes[name])
        endpoint.updated_at = clock.now()
        endpoint.save(update_fields=[*changed, "updated_at"])
    if changes.get("enabled") is False:
        transitions.drop([endpoint.pk])
    return endpoint


@transaction.atomic
def delete_endpoint(user: Any) -> None:
    """The row stays, without secrets, because deliveries refer to it. Drops the pending deliveries."""
    endpoint, now = endpoint_of(user, lock=True), clock.now()
    without_secrets = {"secret": "", "secondary_secret": None, "secondary_expires_at": None}
    Endpoint.objects.filter(pk=endpoint.pk).update(deleted_at=now, updated_at=now, **without_secrets)
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
