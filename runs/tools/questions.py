"""A server's questions to the user during a call, and their answers, which the call's ``remote_task`` stores."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from config.kernel.jsontext import from_text, to_text
from runs.tools.base import clean_text, shorten, tool_error
from runs.tools.schema import read_schema

QUESTION_MAX_CHARS = 4000
QUESTION_SCHEMA_MAX_BYTES = 16 * 1024
REQUESTS_MAX = 16  # the most requests of a server in one call, including those that are declined
KEY_MAX_CHARS = 200
STATE_MAX_CHARS = 64 * 1024

ASKS = '"questions":[{'  # the text of a dialogue contains this as long as the user is to be asked
DECLINED: Mapping[str, Any] = {"action": "decline"}


@dataclass(frozen=True, slots=True)
class Question:
    """``key`` is the server's id of the request."""

    key: str
    text: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """The state of an open call: a task, if there is a ``task_id``, or a call that is made again with ``answers``."""

    task_id: str = ""
    state: str | None = None  # the server wants this back with the answers
    interval: float | None = None  # seconds until the task is asked for again
    questions: tuple[Question, ...] = ()  # not answered yet; the first one is asked
    answers: Mapping[str, Any] = field(default_factory=dict)  # by key: not sent to the server yet
    told: tuple[str, ...] = ()  # answered keys of a task; its server may still show them
    begun: bool = False  # an ordinary call is being made again with the answers
    requests: int = 0
    answered: int = 0  # requests that the user has answered

    @classmethod
    def from_text(cls, text: str) -> Self:
        if not text:
            return cls()
        values = from_text(text)
        values["questions"] = tuple(Question(**question) for question in values["questions"])
        values["interval"] = None if values["interval"] is None else float(values["interval"])
        return cls(**values | {"told": tuple(values["told"])})

    def to_text(self) -> str:
        return to_text(asdict(self))

    @property
    def question(self) -> Question | None:
        """What the user is to be asked."""
        return self.questions[0] if self.questions else None

    @property
    def is_answered(self) -> bool:
        """Whether an ordinary call is to be made again."""
        return bool(self.answers) and not self.questions and not self.begun

    def with_requests(self, requests: Mapping[str, Any]) -> Self:
        """The dialogue with a server's requests; those that are no form are declined. Blocks. Raises ToolFailure."""
        known = {*self.told, *self.answers, *(question.key for question in self.questions)}
        new = {key: request for key, request in requests.items() if key not in known}
        if self.requests + len(new) > REQUESTS_MAX:
            raise tool_error(f"The tool's server asks for more than {REQUESTS_MAX} things.")
        if not all(is_storable(key, KEY_MAX_CHARS) for key in new):
            raise tool_error("The tool's server gave a request a name that cannot be used.")
        found = {key: _form(key, request) for key, request in new.items()}
        return replace(
            self,
            questions=(*self.questions, *filter(None, found.values())),
            answers=dict(self.answers) | {key: DECLINED for key, question in found.items() if question is None},
            requests=self.requests + len(new),
        )

    def with_answer(self, data: Mapping[str, Any] | None) -> Self:
        """The dialogue with the user's answer to the first question; None declines the question."""
        first, *others = self.questions
        answer = DECLINED if data is None else {"action": "accept", "content": data}
        answers = dict(self.answers) | {first.key: answer}
        return replace(self, questions=tuple(others), answers=answers, answered=self.answered + 1)

    def when_told(self, state: str | None = None) -> Self:
        """After the server got the answers. ``state``: the server wants it back next time. Raises ToolFailure."""
        if state is not None and not is_storable(state, STATE_MAX_CHARS):
            raise tool_error("The tool's server gave a state that cannot be kept.")
        told = (*self.told, *self.answers) if self.task_id else ()
        return replace(self, answers={}, told=told, begun=False, state=state)


def is_storable(text: str, limit: int) -> bool:
    return len(text) <= limit and clean_text(text) == text


def _form(key: str, request: Any) -> Question | None:
    """The question of a form elicitation; None for other requests, and for a form that cannot be shown or checked."""
    match request:
        case {"method": "elicitation/create", "params": {"message": str(text), "requestedSchema": schema, **others}}:
            text = clean_text(text).strip()
            with suppress(ValueError):
                parsed = read_schema(schema)
                is_short = len(to_text(parsed).encode()) <= QUESTION_SCHEMA_MAX_BYTES
                if text and is_short and others.get("mode", "form") == "form":
                    return Question(key, shorten(text, QUESTION_MAX_CHARS), parsed)
    return None
