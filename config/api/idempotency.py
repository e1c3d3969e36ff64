"""``Idempotency-Key``: a repeated POST gets the first answer (docs/api.md, "Idempotency").

Two phases. First a row that claims the key is committed, so that a second request sees it at once. Then the view runs,
and its answer is stored in the same transaction: a crash leaves both or neither. A claim without an answer can be taken
over after IDEMPOTENCY_LOCK_SECONDS.
"""

import hashlib
import logging
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from django.db import DatabaseError, IntegrityError, transaction
from django.http import HttpResponse, HttpResponseBase
from rest_framework.request import Request

from config.api.models import IdempotencyRecord
from config.database import batches
from config.kernel import clock
from config.kernel.errors import Conflict, ValidationFailed
from config.kernel.jsontext import dumps

# How long a key is kept, and the time after which an unfinished request loses it.
IDEMPOTENCY_HOURS = 24
IDEMPOTENCY_LOCK_SECONDS = 60

logger = logging.getLogger(__name__)

KEY = re.compile(r"[\x20-\x7e]{1,255}")
# A round fails if another request removes or takes over the row meanwhile.
CLAIM_ROUNDS = 3
PRUNE_BATCH = 1000


class KeyReused(Conflict):
    code = "IDEMPOTENCY_KEY_REUSED"
    message = "This Idempotency-Key was used for another request."


class KeyInUse(Conflict):
    code = "IDEMPOTENCY_KEY_IN_USE"
    message = "The first request with this Idempotency-Key is not finished yet."


class IdempotencyMixin:
    """For viewsets. ``idempotent_actions`` accept the header. Answers of ``secret_actions`` are not stored."""

    surface: ClassVar[str]
    idempotent_actions: ClassVar[frozenset[str] | set[str]] = frozenset({"create"})
    secret_actions: ClassVar[frozenset[str] | set[str]] = frozenset()
    action: str

    def keys_of(self, request: Request) -> int:
        """The id of the user to whom the request's key belongs."""
        return request.user.pk or 0

    def prepare(self) -> None:
        """Work that takes time and comes before the handler, which runs in a transaction if there is a key."""

    def apply_idempotency(self, request: Request) -> None:
        """Wrap this request's handler in ``run_once`` if the request has a key."""
        key = request.headers.get("Idempotency-Key")
        if key is None or self.action not in self.idempotent_actions or request.method is None:
            return self.prepare()
        method = request.method.lower()
        setattr(self, method, partial(self.run_once, getattr(self, method), key))

    def run_once(
        self, handler: Callable[..., HttpResponseBase], key: str, request: Request, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        if not KEY.fullmatch(key):
            raise ValidationFailed({"Idempotency-Key": ["Use 1 to 255 printable ASCII characters."]})
        head = f"{request.method}\0{request._request.get_full_path()}\0".encode("utf-8", "surrogateescape")
        fingerprint = hashlib.sha256(head + request._request.body).hexdigest()
        record = claim(self.keys_of(request), self.surface, key, fingerprint)
        if record.response_status is not None:
            answer = self.replayed_answer(bytes(record.response_body or b""))
            replayed = {"Idempotent-Replayed": "true"}
            return HttpResponse(answer, "application/json", record.response_status, headers=replayed)
        with released_after_failure(record):
            self.prepare()
            with transaction.atomic():
                response = handler(request, *args, **kwargs)
                body = None if self.action in self.secret_actions else self.stored_answer(response)
                keep(record, response.status_code, body)
        return response

    def stored_answer(self, response: Any) -> bytes:
        """The bytes of the answer that are stored. A viewset leaves out what gives access, such as signed addresses."""
        return dumps(response.data) if hasattr(response, "data") else bytes(response.content)

    def replayed_answer(self, stored: bytes) -> bytes:
        """The answer to a repeated request, made from the bytes of ``stored_answer``."""
        return stored


def made_once(user: Any, surface: str, key: str, fingerprint: str, make: Callable[[], str]) -> str:
    """The id of the object that ``make`` creates, in one transaction with the key, or has created before."""
    record = claim(user.pk, surface, key, fingerprint)
    if record.response_status is not None:
        return bytes(record.response_body or b"").decode()
    with released_after_failure(record), transaction.atomic():
        made = make()
        keep(record, 201, made.encode())
    return made


def claim(user_id: int, surface: str, key: str, fingerprint: str) -> IdempotencyRecord:
    """A row that this request has claimed (no ``response_status``), or one to replay. Raises KeyReused, KeyInUse."""
    records = IdempotencyRecord.objects
    for _ in range(CLAIM_ROUNDS):
        now = clock.now()
        mine = {"fingerprint": fingerprint, "claim": secrets.token_hex(16), "claimed_at": now}
        try:
            record, is_new = records.get_or_create(user_id=user_id, surface=surface, key=key, defaults=mine)
        except IntegrityError:  # another request was faster, and its record is removed already
            continue
        if is_new:
            return record
        finished = record.response_status is not None
        lifetime = timedelta(hours=IDEMPOTENCY_HOURS) if finished else timedelta(seconds=IDEMPOTENCY_LOCK_SECONDS)
        if now - record.claimed_at > lifetime:
            # Expired but not yet pruned, or left by a crashed request. One of concurrent requests takes it over.
            records.filter(pk=record.pk, claim=record.claim, response_status=record.response_status).delete()
            continue
        if record.fingerprint != fingerprint:
            raise KeyReused
        if not finished:
            raise KeyInUse
        if record.response_body is None:
            raise KeyReused("This Idempotency-Key was used already; the answer held a secret, so it was not stored.")
        return record
    raise KeyInUse


def keep(record: IdempotencyRecord, status: int, body: bytes | None) -> None:
    """Store the answer, in the view's transaction. Raises KeyInUse if the claim is lost; both are then rolled back."""
    claimed = IdempotencyRecord.objects.filter(pk=record.pk, claim=record.claim, response_status=None)
    if not claimed.update(response_status=status, response_body=body):
        raise KeyInUse


@contextmanager
def released_after_failure(record: IdempotencyRecord) -> Iterator[None]:
    """Gives up the claim after an exception, so that the key can be used again. Without a database, it times out."""
    try:
        yield
    except BaseException:
        try:
            IdempotencyRecord.objects.filter(pk=record.pk, claim=record.claim, response_status=None).delete()
        except DatabaseError as error:
            logger.warning("an idempotency claim was not released (%s)", type(error).__name__)
        raise


def prune() -> int:
    """Remove records older than IDEMPOTENCY_HOURS. Returns how many."""
    cutoff = clock.now() - timedelta(hours=IDEMPOTENCY_HOURS)
    old = IdempotencyRecord.objects.filter(claimed_at__lt=cutoff).order_by("claimed_at")
    return batches.in_batches(lambda: batches.delete_batch(old, PRUNE_BATCH))
