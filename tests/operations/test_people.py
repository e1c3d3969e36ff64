"""Tests of export_user and erase_user: canaries in every kind of content of a person, looked for everywhere."""

import base64
import hashlib
import io
import json
import re
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import redis
from django.apps import apps
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth.models import User
from django.contrib.contenttypes.models import ContentType
from django.core.files.storage import default_storage
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.models import Q

from apikeys.models import ApiKey
from chats import attachments
from config.api import session_tokens
from config.api.models import ErasedSubject
from config.kernel import clock
from config.kernel.errors import Unavailable
from credits.models import LedgerEntry
from runs import privacy
from runs.models import Run
from tests import factories
from tests.api.conftest import limits, redis_server  # noqa: F401
from tests.driver import Driver, InProcess, until
from tests.lifecycle.conftest import bench, engines  # noqa: F401
from tests.webhooks.conftest import deliver, emit, receiver, receivers  # noqa: F401
from tests.webhooks.receiver import answer
from webhooks import services as webhooks
from webhooks.models import Delivery, Endpoint

pytestmark = pytest.mark.django_db(transaction=True)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "privacy.md"
PLACES = (
    *("username", "email", "firstName", "lastName", "title", "message", "turn", "reasoning", "toolInput", "toolFile"),
    *("question", "answer", "error", "fileName", "fileContent", "keyName", "url", "receiver", "deletedTitle", "queued"),
    *("unusedFile", "asked"),
)


class Canaries:
    """One text for each place, which occurs nowhere else."""

    def __init__(self, name: str) -> None:
        self.texts = {place: f"canary-{name}-{place.lower()}" for place in PLACES}

    def __getitem__(self, place: str) -> str:
        return self.texts[place]

    def found(self, text: str) -> set[str]:
        return {place for place, canary in self.texts.items() if canary in text}


@pytest.fixture(autouse=True)
def quick(settings, tmp_path, monkeypatch):
    settings.MEDIA_ROOT = tmp_path / "files"
    monkeypatch.setattr("runs.privacy.ERASE_SETTLE_SECONDS", 0)
    monkeypatch.setattr("runs.privacy.ERASE_WAIT_SECONDS", 20)


def attach(http: InProcess, name: str, content: bytes) -> str:
    made = http.post("/attachments", {"fileName": name, "contentType": "text/plain", "sizeBytes": len(content)}).json()
    upload = made["upload"]
    path = upload["url"].split("/", 3)[3]
    assert http.client.put(f"/{path}", content, content_type="text/plain").status_code == 204
    assert http.post(f"/attachments/{made['id']}/complete").status_code == 200
    return made["id"]


def plant(name: str, receiver_answer: Any) -> tuple[Any, Canaries, Driver]:
    """A user with a canary in every kind of content, by requests. Three runs are live."""
    canaries = Canaries(name)
    user = factories.UserFactory(
        username=canaries["username"],
        email=f"{canaries['email']}@example.com",
        first_name=canaries["firstName"],
        last_name=canaries["lastName"],
    )
    client = factories.session_client(user)
    http = InProcess(client)
    driver = Driver(http)
    assert http.post("/webhooks", {"url": f"{receiver_answer.url}?{canaries['url']}", "extendedEvents": True}).json()
    key = http.post("/api-keys", {"name": canaries["keyName"]}).json()
    LogEntry.objects.create(
        user=factories.UserFactory(is_staff=True),
        content_type=ContentType.objects.get_for_model(ApiKey),
        object_id=key["id"],
        object_repr=str(ApiKey.objects.get(pk=key["id"])),
        action_flag=CHANGE,
        change_message=f"Revoked for {user.username}.",
    )
    chat = client.post("/api/v1/chats", {"title": canaries["title"]}, format="json", headers={"Idempotency-Key": name})
    attached = attach(http, canaries["fileName"], canaries["fileContent"].encode())
    attach(http, "unused.txt", canaries["unusedFile"].encode())
    file = json.dumps({"fileName": f"{canaries['toolInput']}.txt", "content": canaries["toolFile"]})
    script = (
        f"{canaries['message']}\n/reason {canaries['reasoning']}\n/call create_file {file}\n/say {canaries['turn']}"
    )
    done = driver.finish(script, chat=chat.json()["id"], attachmentIds=[attached])
    assert done["status"] == "completed", done
    asked = driver.ask(f"/ask {canaries['question']}\n/say ok")
    driver.respond(asked, kind="CLARIFICATION", answer=canaries["answer"])
    driver.wait(asked["id"])
    assert driver.finish(f"/fail {canaries['error']}")["status"] == "failed"
    gone = driver.chat()
    assert client.patch(f"/api/v1/chats/{gone}", {"title": canaries["deletedTitle"]}, format="json").status_code == 200
    assert client.delete(f"/api/v1/chats/{gone}").status_code == 204
    busy = driver.start("/wait 600")
    driver.wait(busy["id"], "running")
    driver.start(canaries["queued"], chat=busy["chatId"], onActiveRun="enqueue")
    driver.ask(f"/ask {canaries['asked']}")
    # Its run was purged before: only the name in the body leads to the installation endpoint's delivery.
    emit(user.pk, "agent.started", run_id="run_purged", chat_id="chat_purged")
    deliver()
    return user, canaries, driver


def dump() -> str:
    """Every row of every table as text."""
    lines = []
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")
            lines += [f"{table}: {bytes(v).decode(errors='replace') if isinstance(v, bytes | memoryview) else v}"
                      for row in cursor.fetchall() for v in row]  # fmt: skip
    return "\n".join(lines)


def stored(root: Path) -> str:
    return "\n".join(f"{path} {path.read_text(errors='replace')}" for path in root.rglob("*") if path.is_file())


def redis_dump(url: str) -> str:
    """Every key with its content as text."""
    server = redis.Redis.from_url(url, decode_responses=True)
    read = {
        "string": server.get,
        "list": lambda key: server.lrange(key, 0, -1),
        "hash": server.hgetall,
        "set": server.smembers,
        "zset": lambda key: server.zrange(key, 0, -1),
        "stream": server.xrange,
    }
    return "\n".join(f"{key} {read[server.type(key)](key)}" for key in server.scan_iter())


def exported(user: Any) -> list[str]:
    out = io.StringIO()
    call_command("export_user", user.username, stdout=out)
    return out.getvalue().splitlines()


def erase(user: Any) -> str:
    out = io.StringIO()
    call_command(
        "erase_user", user.username, reason="Asked on paper, case 7", yes=True, stdout=out, stderr=io.StringIO()
    )
    return re.search(r"erased-[0-9a-f]{16}", out.getvalue())[0]


@pytest.fixture
def planted(bench, receivers):  # noqa: F811
    central = receivers(answer(200))
    webhooks.register(webhooks.INSTALLATION, central.url, rotate=False, extended=True)
    return plant("ada", receivers(answer(200, b"canary-ada-receiver"))), plant(
        "bob", receivers(answer(200, b"canary-bob-receiver"))
    )


def test_no_canary_is_left(limits, planted, settings, caplog):  # noqa: F811
    (ada, canaries, driver), (bob, others, _) = planted
    files = Path(settings.MEDIA_ROOT)
    assert canaries.found(dump() + stored(files)) == set(PLACES)
    ledger = list(LedgerEntry.objects.filter(account=ada.pk).order_by("pk").values())
    before, secret = exported(bob), ApiKey.objects.filter(user=ada).count()
    assert secret == 1
    live = list(Run.objects.filter(user=ada, status__in=("running", "waiting", "queued")).values_list("pk", flat=True))
    assert len(live) == 3
    name = erase(ada)
    assert canaries.found(dump()) == set()
    assert canaries.found(stored(files)) == set()
    assert canaries.found(caplog.text) == set()
    in_redis = redis_dump(settings.CACHE_REDIS_URL)
    assert f"session:{ada.pk}" in in_redis  # the rate limits
    assert canaries.found(in_redis) == set()
    assert list(LedgerEntry.objects.filter(account=ada.pk).order_by("pk").values())[: len(ledger)] == ledger
    assert driver.http.get("/me").status_code == 401
    assert not User.objects.filter(username=canaries["username"]).exists()
    ErasedSubject.objects.update(erased_at=clock.now() - timedelta(hours=1))
    assert driver.http.get("/me").json()["id"] != str(ada.pk)  # a sign-in after the erasure is a new person
    ada.refresh_from_db()
    assert (ada.username, ada.email, ada.is_active, ada.first_name) == (name, "", False, "")
    assert LogEntry.objects.get(object_repr=name).change_message.endswith("Asked on paper, case 7")
    # Another user keeps everything; what ran has gone on.
    after = exported(bob)
    steady = [line for line in before if '"table": "runs_' not in line and "webhooks_" not in line]
    assert set(steady) <= set(after)
    assert others.found("\n".join(after)) >= others.found("\n".join(before))
    call_command("check_invariants", stdout=io.StringIO(), stderr=io.StringIO())
    call_command("reconcile_credits", stdout=io.StringIO(), stderr=io.StringIO())


def test_a_new_sign_in_after_an_erasure_does_not_revive_older_tokens(user, client):
    def status(age: int) -> int:
        with mock.patch("time.time", return_value=time.time() - age):
            token = session_tokens.mint(user.username)
        return client.get("/api/v1/me", headers={"Authorization": f"Bearer {token}"}).status_code

    name = user.username
    erase(user)
    ErasedSubject.objects.update(erased_at=clock.now() - timedelta(minutes=10))
    user.username = name
    assert [status(age) for age in (1200, 300, 1200, 0, 300)] == [401, 200, 401, 200, 200]


def test_an_erasure_that_dies_anywhere_can_be_repeated(planted, settings):
    (ada, canaries, _), _ = planted
    for deaths in range(1, 100):
        calls = iter(range(deaths))

        def die(*_: Any, calls: Any = calls) -> None:
            if next(calls, None) is None:
                raise InterruptedError

        try:
            privacy.erase(ada, "case 8", die)
        except InterruptedError:
            ada.refresh_from_db()
            assert not ada.is_active
            assert ada.username == canaries["username"]
        else:
            break
    assert deaths > 3
    assert canaries.found(dump() + stored(Path(settings.MEDIA_ROOT))) == set()
    call_command("check_invariants", stdout=io.StringIO(), stderr=io.StringIO())


def test_storage_that_is_away_leaves_the_name_for_a_repetition(planted, monkeypatch, settings):
    (ada, canaries, _), _ = planted
    monkeypatch.setattr("runs.privacy.ERASE_WAIT_SECONDS", 0.5)

    def away(attachment_id: str, **_: Any) -> None:
        raise Unavailable

    with monkeypatch.context() as patch:
        patch.setattr(attachments.files, "remove_all", away)
        with pytest.raises(CommandError, match="Repeat the command"):
            erase(ada)
    ada.refresh_from_db()
    assert ada.username == canaries["username"]
    erase(ada)
    assert canaries.found(dump() + stored(Path(settings.MEDIA_ROOT))) == set()


def test_a_run_that_cannot_end_is_named(user, monkeypatch):
    """Its worker is gone, and no worker is up that could take it over."""
    run = factories.RunFactory(chat__user=user, status="running", worker_id="wrk_gone")
    monkeypatch.setattr("runs.privacy.ERASE_WAIT_SECONDS", 0.2)
    with pytest.raises(CommandError, match=run.pk):
        erase(user)
    assert Run.objects.filter(pk=run.pk).exists()
    user.refresh_from_db()
    assert not user.is_active


def test_a_file_that_a_cancelled_call_stores_late_is_removed(bench, user, settings, monkeypatch):  # noqa: F811
    monkeypatch.setattr("runs.privacy.ERASE_SETTLE_SECONDS", 2)
    storing, go_on, write = threading.Event(), threading.Event(), default_storage.save

    def late(*arguments: Any) -> str:
        storing.set()
        assert go_on.wait(30)
        name = write(*arguments)
        stored_late.set()
        return name

    stored_late = threading.Event()
    monkeypatch.setattr(default_storage, "save", late)
    run = bench.start('/call create_file {"fileName": "late.txt", "content": "canary"}')
    assert storing.wait(20)
    erasing = threading.Thread(target=lambda: (privacy.erase(user, "case 3", lambda *_: None), connection.close()))
    erasing.start()
    until(lambda: Run.objects.filter(pk=run["id"], status="cancelled").exists())
    erasing.join(0.5)  # without the wait for the call's thread, everything is removed by now
    go_on.set()
    assert stored_late.wait(20)
    erasing.join()
    assert not Run.objects.filter(pk=run["id"]).exists()
    assert stored(Path(settings.MEDIA_ROOT)) == ""


def test_two_erasures_at_once(planted, settings):
    (ada, canaries, _), _ = planted
    failed: list[Exception] = []

    def one() -> None:
        try:
            privacy.erase(ada, "case 9", lambda *_: None)
        except Exception as error:
            failed.append(error)
        finally:
            connection.close()

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert canaries.found(dump() + stored(Path(settings.MEDIA_ROOT))) == set()


def test_progress_is_a_line_at_the_end_of_each_step():
    person = factories.UserFactory()
    for _ in range(3):
        factories.ChatFactory(user=person)
    screen = io.StringIO()
    call_command("erase_user", person.username, reason="case 4", yes=True, stdout=io.StringIO(), stderr=screen)
    lines = screen.getvalue().splitlines()
    assert "3 of 3 chats removed" in lines
    assert "1 of 3 chats removed" not in lines


def test_staff_and_a_reason_with_the_name_are_refused(user):
    staff = factories.UserFactory(is_staff=True)
    for someone, reason in ((staff, "case 1"), (user, f"wish of {user.username}"), (user, "  "), (user, "\udcff")):
        with pytest.raises(CommandError):
            call_command("erase_user", someone.username, reason=reason, yes=True)
        someone.refresh_from_db()
        assert someone.is_active
    with pytest.raises(CommandError, match="--yes"):
        call_command("erase_user", user.username, reason="case 1")
    assert user.is_active
    with pytest.raises(CommandError, match="no user"):
        call_command("erase_user", "nobody", reason="case 1")


def test_an_export_has_everything_but_secrets(planted):
    (ada, canaries, _), (_, others, _) = planted
    endpoint = Endpoint.objects.get(user=ada)
    lines = [json.loads(line) for line in exported(ada)]
    rows = "\n".join(json.dumps(line) for line in lines if "row" in line)
    content = {}
    for line in lines:
        if "file" in line:
            content[line["file"]] = content.get(line["file"], b"") + base64.b64decode(line["base64"])
    text = rows + b"\n".join(content.values()).decode()
    assert canaries.found(text) == set(PLACES)
    assert others.found(text) == set()
    assert endpoint.secret not in text
    assert ApiKey.objects.get(user=ada).digest not in text
    assert hashlib.sha256(canaries["fileContent"].encode()).hexdigest() in text
    tables = {line["table"] for line in lines if "row" in line}
    assert {"auth_user", "credits_account", "credits_ledgerentry", "webhooks_attempt", "runs_turn"} <= tables
    deliveries = [line["row"]["id"] for line in lines if line.get("table") == "webhooks_delivery"]
    assert sorted(deliveries) == sorted(
        Delivery.objects.filter(Q(user=ada) | Q(body__contains=canaries["username"])).values_list("pk", flat=True)
    )


# --- the table in docs/privacy.md ------------------------------------------------------------------------------------
def tables_of_the_service() -> dict[str, str]:
    models = [model for model in apps.get_models(include_auto_created=True) if not model._meta.abstract]
    return {model._meta.label: model._meta.db_table for model in models if model._meta.managed}


def test_every_table_has_a_rule():
    assert set(privacy.TABLES) == set(tables_of_the_service())


def test_the_page_lists_every_table_with_what_happens_to_it():
    rows = dict(re.findall(r"^\| `(\w+)` \| .*? \| ([^|]+?) \|$", PAGE.read_text(), re.MULTILINE))
    names = tables_of_the_service()
    assert rows == {names[label]: table.erasure for label, table in privacy.TABLES.items()}


def test_every_reference_to_a_person_has_a_rule():
    """A column that leads to a user must be the one by which rows are found, or be named here with a reason."""
    other = {("credits.LedgerEntry", "staff")}  # the member of staff who corrected an account, not its person
    for model in apps.get_models(include_auto_created=True):
        for field in model._meta.concrete_fields:
            if field.related_model is not None and field.related_model._meta.label == privacy.USER:
                label = model._meta.label
                table = privacy.TABLES[label]
                assert (label, field.name) in other or table.erasure != privacy.NO_DATA, label
