"""Run a message and show on the terminal what happens."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser
from rest_framework.exceptions import ValidationError

from chats.services import create_chat
from config.api.authentication import user_of
from config.kernel import clock
from config.kernel.errors import DomainError, ValidationFailed
from config.kernel.jsontext import MalformedJSON, parse_object, to_text
from config.management import user_named
from runs import services
from runs.events import StreamType
from runs.models import FINAL_RUN_STATUSES, Run, RunEvent, RunStatus, WaitpointKind, WaitpointStatus, Worker
from runs.serializers import RunInput

DEFAULT_USER = "console"
POLL_SECONDS = 0.1
BATCH = 500
SHOWN_CHARS = 300
YES, NO = ("y", "yes"), ("n", "no", "")


class Command(BaseCommand):
    help = (
        "Start a run with MESSAGE and print its answer as it comes; ask its questions here. Run workers must be up. "
        "Exit 1 if the run does not complete. Ctrl-C cancels it."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("message")
        parser.add_argument("--user", help=f"whose run it is (default: {DEFAULT_USER}, which is created)")
        parser.add_argument("--agent", help="the name of an agent, or name@version (default: none)")
        parser.add_argument("--model", help="the name of a model (default: the agent's, or else the default model)")

    def handle(self, *args: Any, message: str, user: str | None, **options: Any) -> None:
        given = {name: options[name] for name in ("agent", "model") if options[name] is not None}
        try:
            self.run(self.owner(user), {"message": message} | given)
        except ValidationError as error:
            raise CommandError(json.dumps(error.detail)) from None
        except DomainError as error:
            fields = (error.details or {}).get("fields", {})
            texts = [error.message, *(text for found in fields.values() for text in found)]
            raise CommandError(" ".join(texts)) from None

    def run(self, user: Any, body: dict[str, Any]) -> None:
        run = services.start_run(user, create_chat(user).pk, **RunInput.validated(body))
        self.say(f"{run.pk}")
        if not Worker.objects.filter(expires_at__gt=clock.now()).exists():
            self.say("No run worker is up: the run waits until one starts (make run, or the Procfile's process runs).")
        try:
            end = self.follow(run)
        except KeyboardInterrupt:
            services.cancel_run(run)
            raise CommandError("The run is cancelled.") from None
        if end["status"] == RunStatus.FAILED:
            raise CommandError(printable(f"The run failed: {end['errorCode']}. {end['errorMessage']}"))
        if end["status"] == RunStatus.CANCELLED:
            raise CommandError("The run was cancelled.")

    def owner(self, username: str | None) -> Any:
        users = get_user_model()._default_manager
        if username is None and not users.filter(username=DEFAULT_USER).exists():
            return user_of({"sub": DEFAULT_USER})
        user = user_named(username or DEFAULT_USER)
        if not user.is_active:
            raise CommandError(f"The user {user.get_username()} is not active.")
        return user

    def follow(self, run: Run) -> dict[str, Any]:
        """Show the run's events as they come. Returns the data of the last one."""
        for kind, data in self.events(run):
            if kind == StreamType.MESSAGE_DELTA:
                self.stdout.write(printable(data["text"]), ending="")
                self.stdout.flush()
            elif kind == StreamType.MESSAGE_RESET:
                self.stdout.write("")
                self.say("The answer starts again.")
            elif kind == StreamType.TOOL_STARTED:
                self.say(f"{data['name']} {short(data['input'])}")
            elif kind == StreamType.TOOL_COMPLETED:
                urls = "".join(f" {url}" for url in data["resultUrls"])
                self.say(f"{data['name']} {data['status']}, {data['creditUsed']} credits{urls}")
            elif kind == StreamType.MODEL_RETRYING:
                self.say(f"The model failed ({data['reason']}). {data['model']} is asked in {data['delaySeconds']} s.")
            elif kind == StreamType.WAITPOINT_OPENED:
                self.ask(run, data)
            elif kind == StreamType.RUN_STATUS and data["status"] in FINAL_RUN_STATUSES:
                self.stdout.write("")
                return data
        raise CommandError("The run is gone.")

    def events(self, run: Run) -> Iterator[tuple[str, dict[str, Any]]]:
        """The events of the run until its last one, or until the run is deleted."""
        after = 0
        while True:
            found = RunEvent.objects.filter(run=run.pk, index__gt=after).order_by("index")
            rows = list(found.values_list("index", "type", "data")[:BATCH])
            for index, kind, data in rows:
                after = index
                yield kind, json.loads(data)
            if not rows:
                if not Run.objects.filter(pk=run.pk, chat__deleted_at=None).exists():
                    return
                time.sleep(POLL_SECONDS)

    def ask(self, run: Run, waitpoint: dict[str, Any]) -> None:
        """Ask the person at the terminal, unless the question was answered elsewhere by now."""
        pending = services.waitpoints_of(run.user_id).filter(pk=waitpoint["id"]).first()
        if pending is None or pending.status != WaitpointStatus.PENDING:
            return
        asked = waitpoint["requestPayload"]
        self.stdout.write("")
        if "reason" in asked:
            what = f"{asked['estimatedCredits']} credits, and has {asked['threshold']}"
            self.say(f"The run waits for more: its next step needs {what} ({asked['reason']}).")
            return
        try:
            if pending.kind == WaitpointKind.CREDIT_APPROVAL:
                call = f"{asked['toolName']} {short(asked['input'])}"
                answer: dict[str, Any] = {"approved": self.approve(call, asked)}
            elif asked.get("schema") is not None:
                self.say(f"The tool asks for a JSON object of this schema: {to_text(asked['schema'])}")
                answer = self.fill_in(asked["question"])
            else:
                for option in asked.get("options", ()):
                    self.say(f"- {option}")
                typed = ""
                while not typed:
                    typed = self.read(f"{asked['question']} ")
                answer = {"answer": typed}
        except EOFError:
            # Not cancelled: another client may answer.
            raise CommandError(f"The run waits for an answer to {pending.pk}, and there is no input.") from None
        try:
            services.respond(pending, {"kind": pending.kind} | answer)
        except ValidationFailed as error:
            self.say(error.message)
            self.ask(run, waitpoint)

    def fill_in(self, question: str) -> dict[str, Any]:
        while True:
            typed = self.read(f"{question} [empty: decline] ")
            if not typed:
                return {"declined": True}
            try:
                return {"data": parse_object(typed, subject="It")}
            except MalformedJSON as error:
                self.say(error.message)

    def approve(self, call: str, asked: dict[str, Any]) -> bool:
        while True:
            price = f"{asked['estimatedCredits']} credits (the limit without approval is {asked['threshold']})"
            typed = self.read(f"{call} costs up to {price}. Approve? [y/N] ").lower()
            if typed in YES + NO:
                return typed in YES

    def read(self, question: str) -> str:
        """A line from the terminal. Raises EOFError."""
        self.stderr.write(printable(question), ending="")
        self.stderr.flush()
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.strip()

    def say(self, text: str) -> None:
        """What is not the answer goes to the standard error output, so that the answer can be redirected."""
        self.stderr.write(printable(text))


def short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 1] + "…"


def printable(text: str) -> str:
    """Without control characters: a model or a tool must not control the terminal."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else "?" for sign in text)
