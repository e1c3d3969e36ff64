"""Starts runs for clients whose requests have ids: a repeated request starts nothing."""

import hashlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from django.db.models import Q
from rest_framework.exceptions import ValidationError

from chats.models import Chat, Message
from chats.services import locking
from config.api.errors import flatten
from config.kernel.errors import NotFound, ValidationFailed
from config.kernel.ids import is_plausible_id
from config.kernel.jsontext import dumps
from runs import services
from runs.events import join_text
from runs.fronts.rendering import CLIENT
from runs.models import ClientRun, Run, RunStatus
from runs.serializers import RunInput
from runs.tools.schema import one_check_of

ERROR_MAX_CHARS = 1000  # the part of a client's error about a failed call that is kept


def options_of(user: Any, given: Any, **said: Any) -> dict[str, Any]:
    """The validated RunInput of the client's options ``given`` and of what the protocol ``said``. Raises
    ValidationFailed, in which the names of options begin with ``run.``.
    """
    if not isinstance(given, dict):
        raise ValidationFailed({"run": ["Use an object with the fields of a run."]})
    if wrong := [name for name in ("message", "attachmentIds") if name in given]:
        raise ValidationFailed({f"run.{name}": ["The message is not an option."] for name in wrong})
    with fields_under("run", given.keys() - said.keys()), one_check_of(user.pk, given | said):
        options = RunInput.validated(given | said)
    if "onActiveRun" not in given:
        del options["on_active_run"]  # ``start_once`` has another default
    return options


@contextmanager
def fields_under(prefix: str, names: Collection[str] | None = None) -> Iterator[None]:
    """Errors name the fields of the client's body: all fields, or these ``names``, are under ``prefix``."""
    try:
        yield
    except (ValidationError, ValidationFailed) as error:
        fields = flatten(error.detail) if isinstance(error, ValidationError) else (error.details or {})["fields"]
        there = {name: names is None or name.partition(".")[0] in names for name in fields}
        renamed = {f"{prefix}.{name}" if there[name] else name: texts for name, texts in fields.items()}
        raise ValidationFailed(renamed) from None


def text_of(content: Any) -> str:
    """The text of a message's content: a text, or a list of parts. Empty for anything else."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else ""
    texts = (part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text")
    return join_text(text for text in texts if isinstance(text, str))


def key_of(*names: str) -> str:
    """The key for a client's id of a request, which may have any length."""
    return hashlib.sha256(dumps(names)).hexdigest()


def find(chat: Chat, key: str) -> ClientRun | None:
    return ClientRun.objects.select_related("run").filter(chat=chat, key=key).first()


def named(chat: Chat, message_id: str) -> Run | None:
    """The run of a message of the chat, by the client's id of a user's message or by our own id of any message."""
    row = find(chat, key_of(message_id))
    return row.run if row else _of_message(chat, message_id)


def _of_message(chat: Chat, message_id: str) -> Run | None:
    if not (message_id.startswith("msg_") and is_plausible_id(message_id)):
        return None
    return Run.objects.filter(pk__in=Message.objects.filter(pk=message_id, chat=chat).values("run_id")).first()


def start_once(
    user: Any, chat: Chat, key: str, options: dict[str, Any], *, message_id: str | None = None, repeated_id: str = ""
) -> Run:
    """The run that the client's request starts, or that it started before. If the message ``message_id`` now has
    another text, the new run replaces the message's run. ``repeated_id`` is the client's id of the message in a
    protocol with other ids for requests: the same message starts nothing while its run is live. By default, an active
    run is cancelled if it waits for the caller, if the new run replaces it, or if it is later than the replaced run.
    Raises what ``services.start_run`` raises.
    """
    with transaction.atomic():
        locked = locking(user.pk, chat.pk).first()
        if locked is None:
            raise NotFound
        row = find(chat, key)
        before = row.run if row else message_id and _of_message(chat, message_id)
        if before:
            if message_id is None or is_same(before, options["message"]):
                return before
            options = options | {"replaces": before.pk}
        live = repeated(chat, repeated_id, options.get("message")) if row is None else None
        if live and not live.is_over:
            return ClientRun.objects.create(chat=chat, key=key, run=live).run
        replaced = Run.objects.filter(pk=options.get("replaces"), chat=chat).first() if "replaces" in options else None
        later = Run.objects.filter(chat=chat, created_at__gte=replaced.created_at) if replaced else Run.objects.none()
        if "on_active_run" not in options:
            cancels = waits_for_caller(locked) or later.filter(pk=locked.active_run_id).exists()
            options = options | {"on_active_run": "cancel" if cancels else "enqueue"}
            if not cancels:
                # Nobody would see the answers of the later runs in line.
                for run in later.filter(status=RunStatus.QUEUED):
                    services.cancel_run(run)
        run = services.start_run(user, chat.pk, **options)
        if replaced is not None:
            # The client's ids of the replaced run now mean its successor.
            ClientRun.objects.filter(chat=chat, run=replaced).update(run=run, index=0)
        if row is None:
            ClientRun.objects.create(chat=chat, key=key, run=run, message_id=repeated_id)
        return run


def repeated(chat: Chat, repeated_id: str, message: str | None = None) -> Run | None:
    """The newest run of the message with this id, the client's or our own, and with this text; None means any text."""
    if not repeated_id:
        return None
    rows = ClientRun.objects.filter(chat=chat, message_id=repeated_id).select_related("run").order_by("-pk")
    runs = [*(row.run for row in rows), _of_message(chat, repeated_id)]
    return next((run for run in runs if run and is_same(run, message)), None)


def is_same(run: Run, message: str | None) -> bool:
    """Whether the run answers a message with this text; None means any text."""
    return message is None or Message.objects.filter(pk=run.user_message_id, content=message).exists()


def waits_for_caller(chat: Chat) -> bool:
    """Whether the chat's active run waits for an answer, or for calls that the client executes."""
    waits = Q(status=RunStatus.WAITING) | Q(status=RunStatus.RUNNING, invocations__awaiting=CLIENT)
    return chat.active_run_id is not None and Run.objects.filter(waits, pk=chat.active_run_id).exists()
