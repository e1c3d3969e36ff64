"""Give a parked tool call its result, as its tool would by a callback."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from runs import services
from runs.models import ToolInvocation
from runs.tools.base import ToolResult, clean_result


class Command(BaseCommand):
    help = "Give INVOCATION, a tool call that awaits its outcome, a result. Exit 1 if it is not accepted."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("invocation")
        parser.add_argument("--result", required=True, metavar="TEXT", help="what the model is told")

    def handle(self, *args: Any, invocation: str, result: str, **options: Any) -> None:
        call = ToolInvocation.objects.filter(pk=invocation).first()
        if call is None:
            raise CommandError(f"There is no tool call {invocation}.")
        call, accepted = services.record_callback(call, clean_result(ToolResult(result)))
        if not accepted:
            raise CommandError(f"The call does not await an outcome: it is {call.status}.")
        self.stdout.write(f"{invocation} is {call.status}.")
