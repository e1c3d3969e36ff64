"""``replaces``: a run that takes the place of an earlier one and of all after it."""

from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from chats import services as chat_services
from chats.models import Attachment, Message
from config.kernel import clock
from config.kernel.ids import new_id
from runs import catalogue, lifecycle, services
from runs.engine import history
from runs.models import Compaction, Run, RunStatus
from tests import factories
from tests.chats.conftest import announce, ready, storage, stored  # noqa: F401
from tests.lifecycle.conftest import Bench
from tests.lifecycle.contexts import Provider, provider  # noqa: F401
from tests.threads import side_by_side

# ruff: noqa: F811 (fixtures)
pytestmark = pytest.mark.django_db(transaction=True)


def said(bench: Bench, chat: str, query: str = "") -> list[tuple[str, str]]:
    items = bench.http.get(f"/chats/{chat}/messages?limit=100&{query}").json()["items"]
    return [(item["role"][0], item["content"]) for item in items]


def listed(bench: Bench, path: str, query: str = "") -> list[str]:
    return [item["id"] for item in bench.http.get(f"{path}?limit=100&{query}").json()["items"]]


def post(bench: Bench, chat: str, **body: Any) -> tuple[int, Any]:
    answer = bench.http.post(f"/chats/{chat}/runs", body)
    shown = answer.json()
    return answer.status_code, shown["id"] if answer.status_code == 201 else shown["error"]["code"]


def chat_of(bench: Bench, *messages: str) -> tuple[str, list[str]]:
    """A chat with these finished runs."""
    chat = bench.chat()
    return chat, [bench.wait(bench.start(message, chat)["id"])["id"] for message in messages]


def replaced_by(*run_ids: str) -> list[str | None]:
    found = dict(Run.objects.filter(pk__in=run_ids).values_list("pk", "replaced_by"))
    return [found[run_id] for run_id in run_ids]


def test_a_run_takes_the_place_of_another_and_of_all_after_it(bench: Bench):
    chat, (one, two, three) = chat_of(bench, "/say one", "/say two", "/say three")
    before = [bench.get(run) for run in (two, three)]
    ledger = bench.http.get("/me/credits/ledger").json()["items"]
    edited = bench.wait(bench.start("/say edited", chat, replaces=two)["id"])
    assert said(bench, chat) == [("u", "/say one"), ("a", "one"), ("u", "/say edited"), ("a", "edited")]
    assert len(said(bench, chat, "replaced=true")) == 8
    for path in (f"/chats/{chat}/runs", "/runs"):
        assert listed(bench, path) == listed(bench, path, "replaced=false") == [edited["id"], one]
        assert listed(bench, path, "replaced=true") == [edited["id"], three, two, one]
        assert listed(bench, path, "status=completed") == [edited["id"], one]
    assert [bench.get(run) for run in (two, three)] == [run | {"replacedBy": edited["id"]} for run in before]
    assert (bench.get(one)["replacedBy"], edited["replacedBy"]) == (None, None)
    summaries = bench.http.get(f"/chats/{chat}/runs?replaced=true").json()["items"]
    assert [item["replacedBy"] for item in summaries] == [None, edited["id"], edited["id"], None]
    assert [
        row for row in bench.http.get("/me/credits/ledger").json()["items"] if row["runId"] != edited["id"]
    ] == ledger
    assert said(bench, chat, f"runId={two}") == []
    assert said(bench, chat, f"runId={two}&replaced=true") == [("u", "/say two"), ("a", "two")]
    assert bench.http.get(f"/messages/{before[0]['userMessageId']}").json()["content"] == "/say two"


def test_the_model_is_not_told_of_replaced_runs(bench: Bench, provider: Provider):
    chat, (_, two, _) = chat_of(bench, "/say one", "/say two", "/say three")
    new = bench.wait(bench.start("/say new", chat, replaces=two)["id"])
    texts = [message.text for message in provider.requests[-1].messages]
    assert texts == ["/say one", "one", "/say new"]
    bench.wait(bench.start("/say next", chat)["id"])
    assert [message.text for message in provider.requests[-1].messages] == [*texts, "new", "/say next"]
    assert new["status"] == "completed"


def test_without_a_message_the_new_run_has_that_of_the_replaced_one(bench: Bench, storage):
    file = ready(bench.client, b"Hello")
    first = bench.finish("/say one", attachmentIds=[file["id"]])
    chat = first["chatId"]
    second = bench.wait(post(bench, chat, replaces=first["id"])[1])
    third = bench.wait(post(bench, chat, replaces=second["id"], message=None)[1])
    messages = [bench.http.get(f"/messages/{run['userMessageId']}").json() for run in (first, second, third)]
    assert [message["content"] for message in messages] == ["/say one"] * 3
    files = [message["attachments"][0] for message in messages]
    assert len({shown.pop("id") for shown in files}) == 3
    assert files[0] == files[1] == files[2]
    contents = [
        bench.client.get(f"/api/v1/attachments/{pk}/content") for pk in Attachment.objects.values_list("pk", flat=True)
    ]
    assert [b"".join(answer.streaming_content) for answer in contents] == [b"Hello"] * 3


def test_an_edit_keeps_the_attachments_that_it_names(bench: Bench, storage, settings):
    kept, dropped = (ready(bench.client, b"Hello")["id"] for _ in range(2))
    first = bench.finish("/say one", attachmentIds=[dropped, kept])
    chat = first["chatId"]
    new = ready(bench.client, b"Hello")["id"]
    second = bench.start("/say two", chat, replaces=first["id"], attachmentIds=[new, kept])
    shown = bench.http.get(f"/messages/{second['userMessageId']}").json()["attachments"]
    assert [bool(Attachment.objects.get(pk=item["id"]).copy_of) for item in shown] == [False, True]
    bench.wait(second["id"])
    # A client that has not loaded the new message knows the file by its first id.
    third = bench.wait(post(bench, chat, message="/say three", replaces=second["id"], attachmentIds=[kept])[1])
    fourth = bench.wait(post(bench, chat, message="/say four", replaces=third["id"], attachmentIds=[shown[1]["id"]])[1])
    files = [bench.http.get(f"/messages/{run['userMessageId']}").json()["attachments"] for run in (third, fourth)]
    assert {Attachment.objects.get(pk=file["id"]).copy_of for (file,) in files} == {kept}
    second = fourth
    # That of another message is not free.
    assert post(bench, chat, message="x", attachmentIds=[dropped])[0] == 400
    assert post(bench, chat, message="x", attachmentIds=[dropped], replaces=second["id"])[0] == 400
    assert replaced_by(second["id"]) == [None]
    # A copy has no bytes of its own.
    settings.ATTACHMENT_USER_MAX_BYTES = 20
    assert announce(bench.client, b"Hello").status_code == 201


def test_a_purge_removes_the_file_that_messages_share(bench: Bench, storage):
    first = bench.finish("/say one", attachmentIds=[ready(bench.client)["id"]])
    bench.wait(post(bench, first["chatId"], replaces=first["id"])[1])
    assert (Attachment.objects.count(), len(stored())) == (2, 1)
    bench.client.delete(f"/api/v1/chats/{first['chatId']}")
    assert chat_services.purge_chat(first["chatId"])
    assert (Attachment.objects.count(), Run.objects.count(), stored()) == (0, 0, [])


def test_an_edit_without_attachments_has_none(bench: Bench, storage):
    first = bench.finish("/say one", attachmentIds=[ready(bench.client)["id"]])
    second = bench.start("/say two", first["chatId"], replaces=first["id"])
    assert bench.http.get(f"/messages/{second['userMessageId']}").json()["attachments"] == []


def test_a_message_may_be_left_out_only_with_replaces(bench: Bench):
    chat, (run,) = chat_of(bench, "/say one")
    for body in ({}, {"message": None}, {"replaces": None}):
        answer = bench.http.post(f"/chats/{chat}/runs", body)
        assert list(answer.json()["error"]["details"]["fields"]) == ["message"]
    assert post(bench, chat, message="", replaces=run) == (400, "VALIDATION_ERROR")
    assert post(bench, chat, replaces="") == (400, "VALIDATION_ERROR")
    assert post(bench, chat, replaces=5) == (400, "VALIDATION_ERROR")
    assert replaced_by(run) == [None]


def test_only_a_run_of_the_same_chat_can_be_replaced(bench: Bench):
    chat, (run,) = chat_of(bench, "/say one")
    others = bench.finish("/say other")["id"]
    theirs = factories.RunFactory().pk
    for wrong in (others, theirs, new_id("run"), "x" * 10_000, "run_\u0130", "../" + run):
        assert post(bench, chat, message="x", replaces=wrong) == (404, "NOT_FOUND")
    assert post(bench, factories.ChatFactory().pk, replaces=run) == (404, "NOT_FOUND")
    bench.client.delete(f"/api/v1/chats/{chat}")
    assert post(bench, chat, replaces=run) == (404, "NOT_FOUND")
    assert replaced_by(run, others, theirs) == [None] * 3


def test_a_request_that_is_refused_replaces_nothing(bench: Bench):
    chat, (run,) = chat_of(bench, "/say one")
    assert post(bench, chat, replaces=run, model="none") == (400, "VALIDATION_ERROR")
    active = bench.start("/wait 30", chat)["id"]
    assert post(bench, chat, replaces=run) == (409, "RUN_IN_PROGRESS")
    assert post(bench, chat, replaces=active) == (409, "RUN_IN_PROGRESS")
    assert post(bench, chat, replaces=active, onActiveRun="enqueue") == (409, "RUN_IN_PROGRESS")
    assert replaced_by(run, active) == [None, None]


@pytest.mark.parametrize("message", ["/wait 30", "/ask Which?"])
def test_a_run_that_is_cancelled_for_it_can_be_replaced(bench: Bench, message: str):
    chat, (first,) = chat_of(bench, "/say one")
    active = bench.start(message, chat)["id"]
    bench.wait(active, "running", "waiting")
    new = bench.wait(post(bench, chat, message="/say new", replaces=active, onActiveRun="cancel")[1])
    assert (new["answer"], bench.get(active)["status"]) == ("new", "cancelled")
    assert replaced_by(first, active) == [None, new["id"]]
    assert said(bench, chat) == [("u", "/say one"), ("a", "one"), ("u", "/say new"), ("a", "new")]


def test_live_runs_after_it_are_replaced_and_end_by_themselves(bench: Bench, provider: Provider):
    chat, (first,) = chat_of(bench, "/say one")
    active = bench.start("/ask Which?", chat)["id"]
    bench.wait(active, "waiting")
    queued = bench.start("/say queued", chat, onActiveRun="enqueue")["id"]
    new = post(bench, chat, message="/say new", replaces=first, onActiveRun="enqueue")[1]
    behind = bench.start("/say behind", chat, onActiveRun="enqueue")["id"]
    assert replaced_by(first, active, queued, new, behind) == [new, new, new, None, None]
    bench.respond(bench.get(active), kind="CLARIFICATION", answer="Blue")
    assert [bench.wait(run)["status"] for run in (active, queued, new, behind)] == ["completed"] * 4
    # The answers of runs that were replaced before they began are left out too.
    assert said(bench, chat) == [("u", "/say new"), ("u", "/say behind"), ("a", "new"), ("a", "behind")]
    assert [message.text for message in provider.requests[-1].messages] == ["/say new", "new", "/say behind"]


def test_a_run_can_be_replaced_twice(bench: Bench):
    chat, (first, second) = chat_of(bench, "/say one", "/say two")
    third = bench.wait(post(bench, chat, replaces=first)[1])["id"]
    fourth = bench.wait(post(bench, chat, message="/say four", replaces=first)[1])["id"]
    assert replaced_by(first, second, third, fourth) == [fourth, third, fourth, None]
    fifth = bench.wait(post(bench, chat, message="/say five", replaces=second)[1])["id"]
    assert replaced_by(first, second, third, fourth, fifth) == [fourth, fifth, fourth, fifth, None]
    assert said(bench, chat) == [("u", "/say five"), ("a", "five")]


@pytest.mark.parametrize("on_active_run", ["reject", "enqueue", "cancel"])
def test_of_replacements_at_the_same_time_one_is_left(user, session, settings, on_active_run: str):
    settings.RATE_LIMIT_RUN_STARTS = 1000
    chat = factories.ChatFactory(user=user)
    run = factories.RunFactory(chat=chat, created_at=clock.now())
    factories.MessageFactory(chat=chat, run_id=run.pk, id=run.user_message_id)
    body = {"replaces": run.pk, "onActiveRun": on_active_run}
    clients = [factories.session_client(user) for _ in range(16)]
    answers = side_by_side(
        16, lambda number: clients[number].post(f"/api/v1/chats/{chat.pk}/runs", body, format="json")
    )
    expected = [201] + [409] * 15 if on_active_run == "reject" else [201] * 16
    assert sorted(answer.status_code for answer in answers) == expected
    left = session.get(f"/api/v1/chats/{chat.pk}/runs").json()["items"]
    assert [item["id"] for item in left] == [Run.objects.order_by("-created_at").first().pk]
    assert Message.objects.filter(replaced=False).count() == 1


def test_the_same_idempotency_key_replaces_once(bench: Bench):
    chat, (run,) = chat_of(bench, "/say one")
    path, body = f"/api/v1/chats/{chat}/runs", {"replaces": run}
    first, again = (bench.client.post(path, body, format="json", HTTP_IDEMPOTENCY_KEY="a") for _ in range(2))
    assert (first.json(), again["Idempotent-Replayed"]) == (again.json(), "true")
    assert replaced_by(run, first.json()["id"]) == [first.json()["id"], None]


def long_chat(user: Any, runs: int) -> tuple[str, list[str]]:
    """A chat of finished runs, with a message and an answer each."""
    chat, now = factories.ChatFactory(user=user), clock.now() - timedelta(days=1)
    of_run = {"chat": chat, "user": user, "status": RunStatus.COMPLETED}
    times = [now + timedelta(seconds=number) for number in range(runs)]
    rows = [Run(user_message_id=new_id("msg"), created_at=time, **of_run) for time in times]
    Run.objects.bulk_create(rows, 500)
    messages = (
        Message(id=key, chat=chat, run_id=row.pk, role=role, content="x" * 500, created_at=row.created_at)
        for row in rows
        for role, key in (("user", row.user_message_id), ("assistant", new_id("msg")))
    )
    Message.objects.bulk_create(messages, 500)
    return chat.pk, [row.pk for row in rows]


def test_the_statements_of_a_replacement_do_not_grow_with_the_chat(user, session):
    counts = []
    catalogue.refresh()
    for runs in (2, 200):
        chat, ids = long_chat(user, runs)
        with CaptureQueriesContext(connection) as queries:
            new = services.start_run(user, chat, message="x", replaces=ids[0])
        counts.append(len(queries))
        assert set(replaced_by(*ids)) == {new.pk}
        assert Message.objects.filter(chat=chat, replaced=False).count() == 1
    assert counts[0] == counts[1]


def compaction(run: str, index: int, **cut: Any) -> Compaction:
    now = clock.now()
    return Compaction.objects.create(
        chat_id=Run.objects.get(pk=run).chat_id,
        run_id=run,
        index=index,
        turn_index=1,
        kind="summary",
        tokens_before=2,
        tokens_after=1,
        started_at=now,
        finished_at=now,
        **cut,
    )


def test_a_summary_is_used_only_while_none_of_its_runs_is_replaced(user):
    chat, ids = long_chat(user, 5)
    kept = compaction(ids[2], 1, last_run_id=ids[0], text="Of the first.")
    compaction(ids[4], 1, last_run_id=ids[2], text="Of the first three.")
    new = services.start_run(user, chat, message="x", replaces=ids[2])
    found = history.load(new, 8192)
    assert (found.compaction, found.cut.text) == (kept, "Of the first.")
    assert [part.run_id for part in found.runs] == [ids[1]]
    lifecycle.request_cancel(new.pk)
    new = services.start_run(user, chat, message="x", replaces=ids[0])
    found = history.load(new, 8192)
    assert (found.compaction, found.runs) == (None, ())
