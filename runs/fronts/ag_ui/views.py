"""AG-UI, and CopilotKit's runtime: ``POST …/ag-ui/agents/{agent}`` and the four routes under ``…/copilotkit``."""

from itertools import dropwhile
from typing import Any

from django.http import HttpResponse, HttpResponseBase
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiResponse, extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from chats.models import Chat, Message
from chats.services import CLIENT_ID, find_chat
from config.api.viewsets import find
from config.kernel.errors import NotFound, ValidationFailed
from config.kernel.jsontext import require_text
from runs import catalogue, models, services
from runs.events import StreamType
from runs.fronts import reads, starts
from runs.fronts.ag_ui import events
from runs.fronts.ag_ui.events import CAPABILITIES, AgUi, Transcript
from runs.fronts.rendering import CLIENT, Part
from runs.fronts.views import Frames, FrontViewSet, frame
from runs.models import LIVE_RUN_STATUSES, ClientRun, Run, Waitpoint, WaitpointKind, WaitpointStatus
from runs.streams.views import CONTENT_TYPE, HEADERS, opening_of

DEFAULT = "default"  # stands for a run without an agent
NO_AGENT = "There is no agent with this name."
# The kind of the key that names the run that a request answered, if it shows runs in line.
ANSWERED = "ag-ui answered"
RUN_ID_MAX_CHARS = 1000
RESUME_STATUSES = ("resolved", "cancelled")
NO_INPUT = {"type": "object", "properties": {}}
RESULTS_MAX = 100  # the most results of calls in a request; earlier ones are ignored
# The most interrupts that a request may answer, with some queries for each. A chat has one open interrupt at a time.
INTERRUPTS_MAX = 100
CONNECTED_MESSAGES = 200  # the most that a connecting client gets

INFO = {
    "version": "1.75.0",
    "mode": "sse",
    "audioFileTranscriptionEnabled": False,
    "threadEndpoints": {"list": False, "inspect": False, "mutations": False, "realtimeMetadata": False},
    "suggestions": False,
    "a2uiEnabled": False,
    "openGenerativeUIEnabled": False,
    "telemetryDisabled": True,
}

Object = dict[str, Any]
EVENTS = {(200, CONTENT_TYPE): OpenApiResponse(OpenApiTypes.STR, description="The events.")}


class Sent:
    """A ``RunAgentInput``. ``thread`` and ``name``: the client's ids of the chat and of the AG-UI run. ``message``: the
    user's last message, empty if there is none. ``trailing``: the messages of the agent and tools after it. No other
    message of the client's history is used.
    """

    def __init__(self, body: Any) -> None:
        """Raises ValidationFailed, MalformedJSON."""
        problems: dict[str, list[str]] = {}
        self.thread, self.name = body.get("threadId"), body.get("runId")
        if not isinstance(self.thread, str) or not CLIENT_ID.fullmatch(self.thread):
            problems["threadId"] = ["Use 1 to 128 printable ASCII characters."]
        if not isinstance(self.name, str) or not 0 < len(self.name) <= RUN_ID_MAX_CHARS:
            problems["runId"] = [f"Use a text of 1 to {RUN_ID_MAX_CHARS} characters."]
        fields = ("messages", "resume", "tools", "context")
        lists = {field: [] if body.get(field) is None else body[field] for field in fields}
        for field, given in lists.items():
            if not isinstance(given, list) or not all(isinstance(item, dict) for item in given):
                problems[field], lists[field] = ["Use a list of objects."], []
        messages, self.resume, self.tools, self.context = lists.values()
        wrong = (index for index, entry in enumerate(self.resume) if entry.get("status") not in RESUME_STATUSES)
        if (index := next(wrong, None)) is not None:
            problems[f"resume.{index}.status"] = [f"Use one of these: {', '.join(RESUME_STATUSES)}."]
        if len({str(entry.get("interruptId")) for entry in self.resume}) > INTERRUPTS_MAX:
            problems["resume"] = [f"At most {INTERRUPTS_MAX} different interrupts."]
        if problems:
            raise ValidationFailed(problems)
        properties = body.get("forwardedProps")
        run = properties.get("run") if isinstance(properties, dict) else None
        self.run = {} if run is None else run
        last = max((index for index, message in enumerate(messages) if message.get("role") == "user"), default=-1)
        self.message = messages[last] if last >= 0 else {}
        self.trailing = [said for said in messages[last + 1 :] if said.get("role") in ("assistant", "tool")]
        require_text(vars(self))
        self.text = starts.text_of(self.message.get("content"))
        name: Any = self.message.get("id")
        is_kept = isinstance(name, str) and len(name) <= models.ClientRun.MESSAGE_ID_MAX_CHARS
        self.message_id = name if is_kept else ""

    def results(self) -> dict[str, Object]:
        """The results of calls by the calls' ids, as REST takes them."""
        found: dict[str, Object] = {}
        for message in self.trailing:
            call_id, error = message.get("toolCallId"), message.get("error")
            if message.get("role") == "tool" and isinstance(call_id, str):
                failed = error[: starts.ERROR_MAX_CHARS] if isinstance(error, str) else ""
                found[call_id] = {"error": failed} if failed else {"result": starts.text_of(message.get("content"))}
        return found

    def said(self, agent: str | None) -> Object:
        """The options of the run that the protocol has fields of its own for. Raises ValidationFailed."""
        said: Object = {"agent": agent} if agent else {}
        if self.tools:
            tools = [(tool.get("name"), tool.get("description"), tool.get("parameters")) for tool in self.tools]
            said["clientTools"] = [
                {"name": name, "description": text, "inputSchema": NO_INPUT if schema is None else schema}
                for name, text, schema in tools
            ]
        given = self.run.get("instructions") if isinstance(self.run, dict) else None
        lines = []
        for entry in self.context:
            for name in ("description", "value"):
                if not isinstance(entry.get(name), str):
                    raise ValidationFailed({f"context.{name}": ["A text is required."]})
            lines.append(f"{entry['description']}: {entry['value']}")
        if lines and (given is None or isinstance(given, str)):
            said["instructions"] = "\n".join([*([given] if given else []), *lines])
        return said


class AgUiViewSet(FrontViewSet):
    tag = "ag-ui"
    lookup_url_kwarg = "agent"
    # ``run`` checks further scopes, which depend on what it does.
    required_scopes = {"run": "runs:read", "info": "runs:read", "connect": "runs:read", "stop": "runs:write"}
    error_statuses = {"run": {402, 409, -406}, "connect": {-406}, "stop": {-406}}

    @extend_schema(request=None, responses=EVENTS)
    def run(self, request: Request, agent: str) -> HttpResponseBase:
        sent = Sent(self.body())
        return self.open_stream(lambda: self.answer(sent, None if agent == DEFAULT else agent))

    def answer(self, sent: Sent, agent: str | None) -> Frames:
        # A run can be answered and continue when its agent is no longer offered.
        chat = self.chat(sent.thread, make=True) if offers(agent) else find_chat(self.request.user, sent.thread)
        if chat is None:
            raise NotFound(NO_AGENT)
        key = starts.key_of("ag-ui", sent.name)
        row, repeats = starts.find(chat, key), True
        line, given = list[Run](), set[str]()
        # Read before the answers are given: the runs may end at once after them.
        answers = bool(sent.resume or sent.trailing)
        waiting = starts.repeated(chat, sent.message_id) if answers else None
        ahead = live_runs(chat.pk) if answers else []
        if (answered := self.answered(chat, sent, row)) is not None:
            run, index, repeats, given = answered
            line = [each for each in ahead if each.created_at > run.created_at]
            if then := self.beside(chat, sent, agent, run, waiting):
                line = [*(each for each in line if each.created_at < then.created_at), then]
            elif line:
                repeats = True  # the client may not have their messages
            kept = {"run": line[-1], "index": 0} if line else {"run": run, "index": index}
            if row is None:
                ClientRun.objects.get_or_create(chat=chat, key=key, defaults=kept)
            elif line:
                ClientRun.objects.filter(pk=row.pk).update(**kept)
            if line:
                first = {"chat": chat, "key": starts.key_of(ANSWERED, sent.name)}
                ClientRun.objects.get_or_create(**first, defaults={"run": run})
        elif row is not None:
            run, index = row.run, row.index
        elif sent.trailing and (newest := self.newest(chat)) is not None:
            run, index = newest, 0
        else:
            run, index, repeats = self.started(chat, key, sent, agent), 0, False
        rendering = self.rendering(run, sent.thread, sent.name, line)
        if repeats:
            rendering.before = rendering.snapshot(Transcript(run, index, line).messages)
        else:
            rendering.given = given
        return self.in_turn(rendering, run, index)

    def rendering(self, *about: Any) -> AgUi:
        rendering = AgUi(*about)
        rendering.with_user_messages = self.has_scope("chats:read")
        return rendering

    def in_turn(self, rendering: AgUi, run: Run, index: int) -> Frames:
        """What follows in the run after this event, and then the runs ``rendering.then`` in the same AG-UI run."""
        rest, later = None, rendering.then
        for number in reversed(range(len(later))):
            other = self.rendering(later[number], rendering.thread, rendering.name, later[number + 1 :])
            other.is_sent = True
            rest = Frames(other, opening_of(self.request, later[number]), then=rest)
        return Frames(rendering, opening_of(self.request, run), (index, 0), continues=True, then=rest)

    def started(self, chat: Chat, key: str, sent: Sent, agent: str | None, **defaults: Any) -> Run:
        if not offers(agent):
            raise NotFound(NO_AGENT)
        self.require_scope("runs:write")
        if not sent.text:
            raise ValidationFailed({"messages": ["The last message must be the user's, with a text."]})
        said = sent.said(agent) | {"message": sent.text}
        options = starts.options_of(self.request.user, sent.run, **said)
        given = sent.run.keys() - said.keys()
        return self.start(chat, key, defaults | options, given=given, repeated_id=sent.message_id)

    def beside(self, chat: Chat, sent: Sent, agent: str | None, answered: Run, run: Run | None) -> Run | None:
        """The run of the message that the client sends beside its answers. None if it is the ``answered`` run, or ended
        before the answers came. ``run``: the message's run before the answers, if there was one.
        """
        if not sent.text or starts.is_same(answered, sent.text):
            return None
        if run is None and not sent.trailing:
            key = starts.key_of("ag-ui", sent.name, sent.message_id)
            run = self.started(chat, key, sent, agent, on_active_run="enqueue")
        return run if run and run.pk != answered.pk and not run.is_over else None

    # --- answers ------------------------------------------------------------------------------------------------------

    def answered(self, chat: Chat, sent: Sent, row: ClientRun | None) -> tuple[Run, int, bool, set[str]] | None:
        """Give the client's answers. Returns the answered run, the index of the event after which it continues, whether
        the client may know what follows, and the calls that have the client's results. None if the request has no
        answers, or if its stream shows the run of its ``row``.
        """
        run, index, is_late, repeats = None, 0, True, False
        waitpoints = services.waitpoints_of(self.request.user).filter(run__chat=chat)
        entries: dict[str, tuple[str, Object, Waitpoint]] = {}
        for position, entry in enumerate(sent.resume):
            if (name := str(entry.get("interruptId"))) in entries:
                continue  # of thousands about one interrupt, the first counts
            self.require_scope("waitpoints:respond")
            waitpoint = find(waitpoints, name)  # an unknown one refuses the request, before another one is answered
            index = reads.index_of(waitpoint.run_id, StreamType.WAITPOINT_OPENED, {waitpoint.pk})
            later = models.RunEvent.objects.filter(run=waitpoint.run_id, index__gt=index)
            repeats |= later.filter(type=StreamType.TOOL_COMPLETED).exists()
            entries[name] = f"resume.{position}.payload", entry, waitpoint
        for field, entry, waitpoint in entries.values():
            waitpoint.refresh_from_db()
            is_late &= waitpoint.status != WaitpointStatus.PENDING
            self.give(waitpoint, entry, field)
            run = waitpoint.run
        results, given = sent.results(), set[str]()
        ours = services.invocations_of(self.request.user).filter(run__chat=chat, node_type=CLIENT)
        for call in ours.filter(pk__in=[*results][-RESULTS_MAX:]).select_related("run"):
            is_late &= not call.is_open
            self.submit(call, results[call.pk])
            given.add(call.pk)
            run = run or call.run
        if run is None:
            return None
        run.refresh_from_db()
        # Some clients answer under the AG-UI id of the run that asked. If the row has another run, it belongs to a
        # message beside the answers.
        if row is not None and is_late and (row.run_id == run.pk or run.is_over):
            return None
        after = index if sent.resume else reads.index_of(run.pk, StreamType.TOOL_COMPLETED, given)
        return run, after, repeats or is_late, given

    def give(self, waitpoint: Waitpoint, entry: Object, field: str) -> None:
        approves, payload = waitpoint.kind == WaitpointKind.CREDIT_APPROVAL, entry.get("payload")
        if entry["status"] == "cancelled":
            if not approves:
                self.require_scope("runs:write")
                if waitpoint.status == WaitpointStatus.PENDING:
                    services.cancel_run(waitpoint.run)
                return
            payload = False
        with starts.fields_under(field):
            name = "approved" if approves else "answer"
            self.respond(waitpoint, payload if isinstance(payload, dict) else {name: payload})

    def newest(self, chat: Chat) -> Run | None:
        """The chat's active run, or its last one."""
        runs = Run.objects.filter(chat=chat, replaced_by=None).order_by("-created_at", "-pk")
        return self.active_run(chat) or runs.first()

    # --- CopilotKit ---------------------------------------------------------------------------------------------------

    @extend_schema(request=None, responses={200: None})
    def info(self, request: Request) -> Response:
        shown = {DEFAULT: "The service's own model and tools, without an agent."}
        for agent in (version.agent for version in catalogue.read().agents.values()):
            shown.setdefault(agent.name, agent.description or agent.display_name)
        agents = {
            name: {"name": name, "description": text, "className": "HttpAgent", "capabilities": CAPABILITIES}
            for name, text in shown.items()
        }
        return Response(INFO | {"agents": agents})

    @extend_schema(request=None, responses=EVENTS)
    def connect(self, request: Request, agent: str) -> HttpResponseBase:
        sent = Sent(self.body())
        chat = find_chat(request.user, sent.thread)
        run = self.newest(chat) if chat else None
        if run is None:
            return HttpResponse(content_type=CONTENT_TYPE, headers=HEADERS)
        rendering, last = self.rendering(run, sent.thread, sent.name), run.last_stream_index
        ends: list[Part] = [rendering.of_run("RUN_FINISHED")]
        if run.is_over:
            shown = events.messages_of(run, Message.objects.all())
        else:
            rendering.then = [each for each in live_runs(run.chat_id) if each.created_at > run.created_at]
            seen = Transcript(run, last, rendering.then, sent.thread, sent.name)
            shown, ends = seen.messages, []
            if reads.asks_at(run.pk, last):
                ends = seen.ask_now()
            elif seen.awaits_client and reads.only_the_client_can_go_on(run.pk, seen.calls, last):
                ends = seen.client_calls()
        # Without the results of calls that are not shown.
        kept = dropwhile(lambda message: message["role"] == "tool", shown[-CONNECTED_MESSAGES:])
        rendering.before = rendering.snapshot(list(kept))
        if not ends:
            return self.open_stream(lambda: self.in_turn(rendering, run, last))
        parts = [*rendering.resumed(), *ends]
        content = b"".join(frame(part, f"{last}.{number}") for number, part in enumerate(parts))
        return HttpResponse(content, content_type=CONTENT_TYPE, headers=HEADERS)

    @extend_schema(request=None, responses={200: None})
    def stop(self, request: Request, agent: str, threadId: str) -> Response:
        body = self.body()
        require_text(body)
        name = body.get("runId")
        chat = find_chat(request.user, threadId)
        first = last = self.active_run(chat) if chat else None
        if chat is not None and name is not None:
            # The named run may be in line. Its stream shows the runs before it.
            row, answered = (starts.find(chat, starts.key_of(kind, str(name))) for kind in ("ag-ui", ANSWERED))
            last = row.run if row else None
            first = answered.run if answered else last
        stopped = list[Run]()
        if first and last:
            shown = Run.objects.filter(chat=chat, created_at__range=(first.created_at, last.created_at))
            # The last one first: none of them starts meanwhile.
            live = shown.filter(status__in=LIVE_RUN_STATUSES).order_by("-created_at")
            stopped = [services.cancel_run(run) for run in live]
        return Response({"stopped": bool(stopped)})


def live_runs(chat_id: str) -> list[Run]:
    """The active run and those in line, oldest first, without columns that can be large: a stream keeps the rows."""
    runs = Run.objects.filter(chat=chat_id, status__in=LIVE_RUN_STATUSES).order_by("created_at", "pk")
    return list(runs.only("chat", "status", "created_at", "assistant_message_id", "last_stream_index"))


def offers(agent: str | None) -> bool:
    return agent is None or catalogue.find_agent(agent) is not None
