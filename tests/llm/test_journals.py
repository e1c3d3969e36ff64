"""Transcripts of random journals: every kind of provider accepts them, and a run is sent in the same bytes while it
runs and later as an earlier run of its chat.
"""

import itertools
import json
from typing import Any

import pytest
from django.db import connection
from django.utils.module_loading import import_string
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.kernel import clock
from config.kernel.ids import new_id
from runs.engine import history
from runs.engine.transcript import Cut, RunPart, messages, turn_parts
from runs.llm.base import AssistantMessage, ToolMessage, UserMessage
from runs.models import OUTPUT_TOOL, Run, ToolInvocation, Turn
from tests import factories
from tests.llm.helpers import at, client_of, model_of, request_of
from tests.llm.sdk_types import problems
from tests.llm.test_request_types import TYPES, arguments, check_anthropic, check_openai, check_responses, reasoning_of
from tests.tiers import examples

CHECKS = {"openai": check_openai, "openai_responses": check_responses, "anthropic": check_anthropic}
# The SDK's types do not know the fields in which other servers want reasoning back.
MODEL = {kind: model_of(at("http://127.0.0.1:9", kind), dialect={"reasoningBack": kind != "openai"}) for kind in CHECKS}

texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["", " ", "word " * 200]
)
statuses = st.sampled_from(
    [
        ("COMPLETED", None, None),
        ("FAILED", "TOOL_ERROR", "broken"),
        ("FAILED", "OUTCOME_UNKNOWN", "The run ended while the tool was at work."),
        ("FAILED", "UNKNOWN_TOOL", "There is no such tool."),
        ("REFUSED", "APPROVAL_REFUSED", "The user refused the call."),
        ("CANCELLED", None, None),
    ]
)


@st.composite
def journals(draw: Any, kind: str) -> dict[str, Any]:
    """A run: its turns, the last one without calls of tools if it completed, and the text that no turn has. Of the
    others some are answers that do not fit the schema of the output: in plain words, or by a call that is told so.
    """
    turns = []
    for _ in range(draw(st.integers(0, 3))):
        # Ids come again in each run, as from servers that count them from 1.
        ids = [f"call_{number}" for number in range(1, draw(st.integers(1, 3)) + 1)]
        calls = [(call_id, draw(arguments.filter(storable)), draw(statuses), draw(texts)) for call_id in ids]
        told = [("call_9", draw(arguments.filter(storable)), "INVALID_INPUT: no")]
        answers = draw(st.sampled_from([(calls, []), (calls, told), ([], told), ([], [])]))
        turns.append((draw(texts), answers[0], draw(reasoning_of(kind)), draw(st.booleans()), answers[1]))
    status = draw(st.sampled_from(["completed", "failed", "cancelled"]))
    if status == "completed":
        told = draw(st.sampled_from([[], [("call_9", '{"a": 1}', None)]]))
        turns.append((draw(texts), [], draw(reasoning_of(kind)), True, told))
    return {"message": draw(texts) or "Hi", "turns": turns, "status": status, "unrecorded": draw(texts)}


def storable(text: str) -> bool:
    return "\x00" not in text and text.isprintable()


def store(chat: Any, journal: dict[str, Any], origin: str) -> Run:
    run = factories.RunFactory(chat=chat, status=journal["status"], turn_count=len(journal["turns"]))
    message = factories.MessageFactory(chat=chat, run_id=run.pk, content=journal["message"])
    Run.objects.filter(pk=run.pk).update(user_message_id=message.pk)
    said = []
    for index, (text, calls, reasoning, same, answers) in enumerate(journal["turns"], 1):
        listed = [{"id": call_id, "name": "calculate", "arguments": given} for call_id, given, *_ in calls]
        listed += [
            {"id": call_id, "name": OUTPUT_TOOL, "arguments": given, "told": told, "key": new_id("out")}
            for call_id, given, told in answers
        ]
        now = clock.now()
        Turn.objects.create(
            run=run, index=index, model="m", origin=origin if same else "other/model", text=text, tool_calls=listed,
            reasoning=list(reasoning), started_at=now, finished_at=now,
        )  # fmt: skip
        said.append(text)
        for place, (call_id, _, (status, code, why), result) in enumerate(calls, 1):
            factories.ToolInvocationFactory(
                run=run, turn_index=index, call_index=place, tool_call_id=call_id, status=status, error_code=code,
                error_message=why, result=result if status == "COMPLETED" else "",
            )  # fmt: skip
    if journal["status"] != "completed":
        said.append(journal["unrecorded"])
    content = "\n\n".join(text for text in said if text)
    factories.MessageFactory(chat=chat, run_id=run.pk, role="assistant", content=content)
    run.refresh_from_db()
    return run


@pytest.mark.django_db
@pytest.mark.parametrize("kind", CHECKS)
@given(data=st.data())
@settings(max_examples=examples(10), deadline=None, suppress_health_check=list(HealthCheck))
def test_every_provider_accepts_the_transcript_of_any_journal(kind: str, data: Any):
    model = MODEL[kind]
    chat = factories.ChatFactory()
    stored = [store(chat, journal, model.origin) for journal in data.draw(st.lists(journals(kind), max_size=3))]
    own = store(chat, data.draw(journals(kind)), model.origin)
    loaded = history.load(own, 128_000)
    turns = turn_parts(Turn.objects.filter(run=own), ToolInvocation.objects.filter(run=own))
    turns = turns[:-1] if own.status == "completed" else turns
    cut = data.draw(
        st.builds(
            Cut,
            last_run_id=st.sampled_from([None, "run_before"]),
            text=st.sampled_from(["", "a summary"]),
            notes_run_id=st.sampled_from([None, own.pk, *(run.pk for run in stored)]),
            notes_turn=st.integers(0, 3),
            short_turn=st.integers(0, 3),
            result_chars=st.sampled_from([None, 500]),
        )
    )
    found = messages(cut, [*loaded.runs, RunPart(own.pk, loaded.message, tuple(turns))])
    body = client_of(model.server).body(request_of(*found, model=model, instructions="Be brief."))
    assert problems(body, import_string(TYPES[kind])) == []
    CHECKS[kind](body)
    ids = [call.id for message in found if isinstance(message, AssistantMessage) for call in message.tool_calls]
    assert len(ids) == len(set(ids))
    roles = [UserMessage if isinstance(message, UserMessage) else None for message in found]
    for before, after in itertools.pairwise(found):
        if isinstance(after, UserMessage):
            assert isinstance(before, AssistantMessage)
            assert not before.tool_calls
    assert roles[-1] or isinstance(found[-1], ToolMessage) or not turns


@pytest.mark.django_db
@given(data=st.data())
@settings(max_examples=examples(10), deadline=None, suppress_health_check=list(HealthCheck))
def test_a_run_has_the_same_bytes_while_it_runs_and_later(data: Any):
    model = MODEL["anthropic"]
    chat = factories.ChatFactory()
    store(chat, data.draw(journals("anthropic")), model.origin)
    own = store(chat, data.draw(journals("anthropic")), model.origin)
    loaded = history.load(own, 128_000)
    turns = turn_parts(Turn.objects.filter(run=own), ToolInvocation.objects.filter(run=own))
    turns = turns if turns and turns[-1].calls else turns[:-1]
    now = messages(Cut(), [*loaded.runs, RunPart(own.pk, loaded.message, tuple(turns))])
    following = store(chat, {"message": "Next", "turns": [], "status": "failed", "unrecorded": ""}, model.origin)
    after = history.load(following, 128_000)
    later = messages(Cut(), [*after.runs, RunPart(following.pk, after.message, ())])
    assert later[: len(now)] == now
    assert json.dumps(str(later))


@pytest.mark.django_db
def test_a_long_chat_takes_a_constant_number_of_queries_and_what_the_window_holds(django_assert_num_queries):
    chat = factories.ChatFactory()
    calls = [("call_1", "{}", ("COMPLETED", None, None), "x" * 1000)]
    journal = {"message": "Hi", "turns": [("", calls, (), True, []), ("Done", [], (), True, [])], "status": "completed"}
    for _ in range(60):
        own = store(chat, journal | {"unrecorded": ""}, "m")
    with django_assert_num_queries(4):
        loaded = history.load(own, 128_000)
    assert (len(loaded.runs), loaded.unloaded) == (51, 0)
    with django_assert_num_queries(4):
        loaded = history.load(own, 2000)
    assert len(loaded.runs) == 51
    assert 5 <= len(loaded.runs) - loaded.unloaded <= 8
    assert [run.is_loaded for run in loaded.runs] == sorted(run.is_loaded for run in loaded.runs)


@pytest.mark.django_db
def test_a_run_begins_its_own_history_in_any_form_of_its_time():
    """The database's default writes a time in another form than Django: SQLite compares them as texts."""
    chat = factories.ChatFactory()
    nothing = {"message": "Hi", "turns": [], "status": "failed", "unrecorded": ""}
    earlier, own, later = (store(chat, nothing | {"message": name}, "m") for name in ("earlier", "own", "later"))
    with connection.cursor() as cursor:
        for run in (earlier, own, later):
            cursor.execute("UPDATE runs_run SET created_at = '2026-11-20 10:00:00.000' WHERE id = %s", [run.pk])
    own.refresh_from_db()
    loaded = history.load(own, 128_000)
    assert loaded.message.text == "own"
    assert [part.run_id for part in loaded.runs] == [earlier.pk]
