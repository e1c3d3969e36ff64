"""Run a message and show on the terminal what happens."""

import json
import sys
import time
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from rest_framework.exceptions import ValidationError

from chats.services import make_chat
from config.api.authentication import user_of
from config.api.errors import to_domain_error
from config.kernel import clock
from config.kernel.errors import DomainError
from config.kernel.jsontext import parse_object
from config.management import user_named
from runs import services
from runs.events import StreamType
from runs.models import FINAL_RUN_STATUSES, Run, RunStatus, Waitpoint, WaitpointKind, WaitpointStatus, Worker
from runs.serializers import RunInput
from runs.streams.reads import page

DEFAULT_USER = "console"
POLL_SECONDS = 0.1
SHOWN_CHARS = 300
DECISIONS = {"y": True, "yes": True, "n": False, "no": False, "": False}


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
        body = {"message": message} | {name: options[name] for name in ("agent", "model") if options[name] is not None}
        owner = user_of({"sub": DEFAULT_USER}) if user is None else user_named(user)
        if not owner.is_active:
            raise CommandError(f"The user {owner.get_username()} is not active.")
        try:
            asked = RunInput.validated(body)
            run = services.start_run(owner, make_chat(owner)[0].pk, **asked)
        except (ValidationError, DomainError) as error:
            raise CommandError(to_domain_error(error).message) from None
        self.say(run.pk)
        if not Worker.objects.filter(expires_at__gt=clock.now()).exists():
            self.say("No run worker is up: the run waits until one starts (make run, or the Procfile's process runs).")
        try:
            end = self.follow(run)
        except KeyboardInterrupt:
            services.cancel_run(run)
            raise CommandError("The run is cancelled.") from None
        if end["status"] == RunStatus.CANCELLED:
            raise CommandError("The run was cancelled.")
        if end["status"] != RunStatus.COMPLETED:
            raise CommandError(printable(f"The run {end['status']}: {end['errorCode']}. {end['errorMessage']}"))

    def follow(self, run: Run) -> dict[str, Any]:
        """Show the run's events as they come. Returns the data of the last one."""
        after = 0
        while (found := page(run.pk, after)) or Run.objects.filter(pk=run.pk, chat__deleted_at=None).exists():
            for event in found:
                after, data = event.index, json.loads(event.data)
                if event.type == StreamType.RUN_STATUS and data["status"] in FINAL_RUN_STATUSES:
                    self.stdout.write("")
                    return data
                self.show(run, event.type, data)
            if not found:
                time.sleep(POLL_SECONDS)
        raise CommandError("The run is gone.")

    def show(self, run: Run, kind: str, data: dict[str, Any]) -> None:
        match kind:
            case StreamType.MESSAGE_DELTA:
                self.stdout.write(printable(data["text"]), ending="")
                self.stdout.flush()
            case StreamType.MESSAGE_RESET:
                self.stdout.write("")
                self.say("The answer starts again.")
            case StreamType.TOOL_STARTED:
                self.say(f"{data['name']} {short(data['input'])}")
            case StreamType.TOOL_PARKED:
                ending = f"manage.py callback {data['toolInvocationId']} --result TEXT"
                self.say(f"{data['name']} awaits its outcome until {data['expiresAt']}. To give it: {ending}")
            case StreamType.TOOL_COMPLETED:
                what = " ".join([f"{data['creditUsed']} credits", *data["resultUrls"]])
                self.say(f"{data['name']} {data['status']}, {what}")
            case StreamType.MODEL_RETRYING:
                again = f"{data['model']} is asked in {data['delaySeconds']} s."
                self.say(f"The model failed ({data['reason']}). {again}")
            case StreamType.WAITPOINT_OPENED:
                self.ask(run, data)

    def ask(self, run: Run, waitpoint: dict[str, Any]) -> None:
        """Ask the person at the terminal, unless the question is answered elsewhere."""
        asked = waitpoint["requestPayload"]
        if "reason" in asked:
            what = f"{asked['estimatedCredits']} credits, and has {asked['threshold']}"
            self.say(f"\nThe run waits for more: its next step needs {what} ({asked['reason']}).")
            return
        self.stdout.write("")
        waitpoints = services.waitpoints_of(run.user_id).filter(pk=waitpoint["id"], status=WaitpointStatus.PENDING)
        while pending := waitpoints.first():
            try:
                services.respond(pending, {"kind": pending.kind} | self.answer(pending, asked))
            except ValidationError:
                continue
            except DomainError as error:
                self.say(error.message)

    def answer(self, waitpoint: Waitpoint, asked: dict[str, Any]) -> dict[str, Any]:
        """What is typed, in a body. Raises MalformedJSON."""
        if waitpoint.kind == WaitpointKind.CREDIT_APPROVAL:
            call = f"{asked['toolName']} {short(asked['input'])}"
            price = f"{asked['estimatedCredits']} credits (the limit without approval is {asked['threshold']})"
            typed = self.read(waitpoint, f"{call} costs up to {price}. Approve? [y/N] ")
            return {"approved": DECISIONS.get(typed.lower())}
        if asked.get("schema") is not None:
            self.say(f"The tool asks for a JSON object of this schema: {json.dumps(asked['schema'])}")
            typed = self.read(waitpoint, f"{asked['question']} [empty: decline] ")
            return {"data": parse_object(typed, subject="It")} if typed else {"declined": True}
        for option in asked.get("options", ()):
            self.say(f"- {option}")
        return {"answer": self.read(waitpoint, f"{asked['question']} ")}

    def read(self, waitpoint: Waitpoint, question: str) -> str:
        """A line from the terminal."""
        self.stderr.write(printable(question), ending="")
        self.stderr.flush()
        if not (line := sys.stdin.readline()):
            # The run is not cancelled: another client may answer.
            raise CommandError(f"The run waits for an answer to {waitpoint.pk}, and there is no input.")
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
