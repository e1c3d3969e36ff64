"""Pages of the admin: a run's timeline, read-only history, no secrets, and content only on the content page."""

import re
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.db import connection
from django.forms.models import model_to_dict
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from apikeys import keys
from chats.models import Attachment, Chat
from config.kernel import clock
from credits import ledger
from credits.models import Account, LedgerEntry
from runs.admin import timeline
from runs.catalogue import agents
from runs.models import (
    Agent,
    AgentModel,
    Compaction,
    ModelAttempt,
    Provider,
    Run,
    RunEvent,
    Tool,
    ToolInvocation,
    Turn,
    Waitpoint,
)
from tests import factories
from tests.admin.conftest import CONTENT, SECRET, make_run
from webhooks.models import Delivery, Endpoint

pytestmark = pytest.mark.django_db

FOREIGN = re.compile(r"""<(?:script|link|img|iframe|form)\b[^>]*?(?:src|href|action)=["'](?:https?:)?//[^"']*""")
HISTORY = [
    Run,
    Turn,
    ToolInvocation,
    Waitpoint,
    RunEvent,
    LedgerEntry,
    Account,
    Chat,
    Attachment,
    Endpoint,
    Delivery,
    LogEntry,
    keys.ApiKey,
]


def address(model: Any, page: str, *args: Any) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=args)


@pytest.fixture
def run(user) -> Run:
    return make_run(user, turns=2, error_code="MODEL_ERROR", error_message=CONTENT)


@pytest.fixture
def world(boss, user, run) -> Run:
    """Create a row of every model of the admin. Returns the run."""
    keys.create_key(user, name="ci")
    factories.AttachmentFactory(user=user, file_name=f"{CONTENT}.txt")
    Tool.objects.create(
        name="search", display_name="Search", description="-", node_type="http", price=1, url="https://x.example",
        secret_headers=f'{{"Authorization": "{SECRET}"}}',
    )  # fmt: skip
    LogEntry.objects.log_actions(boss.person.pk, [run], 2, change_message="Cancelled.")
    return run


# --- a run's page ----------------------------------------------------------------------------------------------------
def test_a_run_shows_its_timeline_on_one_page(boss, user, run):
    page = re.sub(r"\s+", " ", boss.get(address(Run, "change", run.pk)).content.decode())
    for piece in [
        user.username,
        run.chat_id,
        "completed",
        "Turn 2",
        "demo, 1,200 tokens in, 34 out",
        "calculate",
        "300 ms",  # a turn
        "1.5 s",  # a call
        "Clarification",
        "503 (71 ms)",  # an attempt
        "200 (5 ms)",
        "tool.completed",
        "delivered ×2",
        "message.delta",
        ">3.5<",  # 2 × (0.5 of a turn + 1.25 of a call)
        ">1.25<",
        ">0.5<",
    ]:
        assert piece in page, piece
    assert "5.0 s" in page  # from start to end


def test_charges_are_shown_at_the_step_that_caused_them(run):
    steps = timeline.build(run)["steps"]
    kinds = {(step.kind, step.title): step for step in steps}
    call = kinds["call", "calculate"]
    assert [entry.type for entry in call.charges] == ["HOLD", "CAPTURE", "RELEASE"]
    assert call.cost == "1.25"
    assert kinds["turn", "Turn 1"].cost == "0.5"
    assert all(0 <= step.left <= 100 and step.left + step.width <= 100.01 for step in steps)
    assert [step.started for step in steps] == sorted(step.started for step in steps)


def test_the_timeline_shows_cached_tokens_and_compactions_and_their_charges(sign_in, user, run):
    Turn.objects.filter(run=run, index=2).update(cached_tokens=800)
    at = run.created_at
    Compaction.objects.create(
        chat=run.chat, run=run, index=1, turn_index=2, kind="summary", text=f"{CONTENT} summarised", model="demo",
        tokens_before=9000, tokens_after=4000, input_tokens=5000, output_tokens=70, held=9, cost=9, started_at=at,
        finished_at=at,
    )  # fmt: skip
    hold = ledger.hold(user.pk, 9, cause="c1", run_id=run.pk, chat_id=run.chat_id, price={"turn": "c1"})
    ledger.settle(hold, 9, price={})
    steps = {step.title: step for step in timeline.build(run)["steps"]}
    assert "1,200 tokens in (800 of them cached), 34 out" in steps["Turn 2"].detail
    assert "about 9,000 tokens to 4,000; demo, 5,000 tokens in, 70 out" in steps["Compaction 1"].detail
    assert steps["Compaction 1"].cost == "0.000009"
    support = sign_in("support")
    assert CONTENT not in support.get(address(Run, "change", run.pk)).content.decode()
    assert f"{CONTENT} summarised" in support.get(reverse("admin:runs_run_content", args=[run.pk])).content.decode()


def test_a_replaced_run_leads_to_the_run_in_its_place(boss, run, user):
    page, by = address(Run, "change", run.pk), make_run(user)
    assert "Replaced by" not in boss.get(page).content.decode()
    Run.objects.filter(pk=run.pk).update(replaced_by=by.pk)
    assert f'href="{address(Run, "change", by.pk)}"' in boss.get(page).content.decode()


def test_a_run_names_what_it_is_about_and_what_was_refunded(boss, sign_in, user):
    agents.save("support", display_name="Support")
    run = make_run(user, agent="support@1", agent_name="support")
    call, turn = (LedgerEntry.objects.get(run_id=run.pk, type=kind) for kind in ("CAPTURE", "USAGE"))
    ledger.refund(call.pk, call.amount, reason="Sorry", staff=boss.person)
    ledger.refund(turn.pk, 1, reason="Sorry", staff=boss.person)
    page = boss.get(address(Run, "change", run.pk)).content.decode()
    versions = reverse("admin:runs_agent_versions", args=[Agent.objects.get(name="support").pk])
    model = AgentModel.objects.get(name="demo").pk
    for link in (
        reverse("person", args=[user.pk]), address(Chat, "change", run.chat_id), f"{versions}?right=1",
        address(AgentModel, "change", model),
    ):  # fmt: skip
        assert f'href="{link}"' in page
        assert (
            f'href="{link}"'
            not in sign_in(permissions=("runs.view_run",)).get(address(Run, "change", run.pk)).content.decode()
        )
    costs = {step.title: step.cost for step in timeline.build(run)["steps"]}
    assert (costs["calculate"], costs["Turn 1"]) == ("1.25, refunded 1.25", "0.5, refunded 0.000001")
    spent = dict(timeline.build(run)["facts"])["Credits spent"]
    assert spent == '1.75, refunded <span title="1.250001 credits">1.25</span>'


def test_a_failed_run_leads_to_its_provider_and_to_what_it_said(boss, sign_in, user):
    run = make_run(user, status="failed", error_code="MODEL_ERROR", failure_reason="provider_unauthorized")
    ModelAttempt.objects.create(
        run=run, turn_index=3, number=1, model="demo", provider="demo", reason="provider_unauthorized", http_status=401,
        detail=CONTENT, started_at=clock.now(), finished_at=clock.now(),
    )  # fmt: skip
    page = boss.get(address(Run, "change", run.pk)).content.decode()
    assert f'href="{address(Provider, "change", Provider.objects.get(name="demo").pk)}"' in page
    assert "What the provider said" in page
    assert CONTENT not in page
    assert CONTENT in boss.get(reverse("admin:runs_run_content", args=[run.pk])).content.decode()
    assert "What the provider said" not in sign_in("viewer").get(address(Run, "change", run.pk)).content.decode()


def test_a_run_leads_to_the_playground_and_its_trace(boss, run, settings):
    page = address(Run, "change", run.pk)
    Run.objects.filter(pk=run.pk).update(trace_parent=f"00-{'ab' * 16}-{'cd' * 8}-01")
    settings.PLAYGROUND, settings.TRACE_URL = False, ""
    text = boss.get(page).content.decode()
    assert "/playground" not in text
    assert f"<code>{'ab' * 16}</code>" in text
    settings.PLAYGROUND, settings.TRACE_URL = True, "https://traces.example/t/{trace}"
    text = boss.get(page).content.decode()
    assert "/playground" not in text  # it shows nobody the chat of another user
    assert f'href="https://traces.example/t/{"ab" * 16}"' in text

    settings.EMBEDDED, settings.SESSION_ISSUER = True, ""
    for owner in (get_user_model().objects.get(is_superuser=True), factories.UserFactory(username="demo")):
        ledger.grant(owner.pk, 10_000_000, cause=f"test:{owner.pk}")  # staff get no sign-up credits
        own = make_run(owner)
        assert f'href="/playground/{own.chat_id}"' in boss.get(address(Run, "change", own.pk)).content.decode()
    # Outside the embedded default, nobody signs in to the playground as this user without a token of theirs.
    settings.EMBEDDED = False
    assert "/playground" not in boss.get(address(Run, "change", own.pk)).content.decode()


def test_every_role_sees_why_a_run_failed(sign_in, run):
    Run.objects.filter(pk=run.pk).update(failure_reason="provider_unauthorized")
    for role in ("viewer", "support", "billing"):
        client = sign_in(role)
        assert client.get(reverse("find"), {"q": run.pk})["Location"] == address(Run, "change", run.pk)
        text = client.get(address(Run, "change", run.pk)).content.decode()
        assert "The model, or the connection to it, failed." in text
        assert "provider_unauthorized" in text


def test_charges_and_deliveries_of_a_run_need_their_permissions(sign_in, boss, run):
    charge = LedgerEntry.objects.filter(type="CAPTURE", run_id=run.pk)[0]
    ledger.refund(charge.pk, 1, reason="canary-of-a-reason", staff=boss.person)
    own = {"credits.view_ledgerentry": ("canary-of-a-reason", "Charges"),
           "webhooks.view_delivery": ("tool.completed", "Webhook deliveries")}  # fmt: skip
    for held in ([], *([name] for name in own), list(own)):
        page = sign_in(permissions=("runs.view_run", *held)).get(address(Run, "change", run.pk)).content.decode()
        for name, texts in own.items():
            for text in texts:
                assert (text in page) == (name in held), (name, text)


def test_pruned_and_live_runs_have_a_timeline(boss, user):
    over = make_run(user, status="failed", error_code="WORKER_LOST")
    RunEvent.objects.all().delete()
    states = [step.title for step in timeline.build(over)["steps"] if step.kind == "state"]
    assert states == ["queued", "running", "failed"]
    live = make_run(user, status="running", finished_at=None)
    assert "so far" in boss.get(address(Run, "change", live.pk)).content.decode()


def test_the_timeline_is_capped_and_its_queries_do_not_grow(boss, user, monkeypatch):
    short, long = make_run(user, turns=1), make_run(user, turns=8)

    def queries(run: Run) -> int:
        with CaptureQueriesContext(connection) as asked:
            boss.get(address(Run, "change", run.pk))
        return len(asked)

    queries(short)
    assert queries(short) == queries(long) <= 20
    monkeypatch.setattr(timeline, "ROWS_MAX", 5)
    shown = timeline.build(long)
    kinds = [step.kind for step in shown["steps"]]
    assert [kinds.count(kind) for kind in ("turn", "call", "waitpoint")] == [5, 5, 5]
    assert len(shown["deliveries"]) == 5
    assert 0 < len(shown["charges"]) <= 5
    assert shown["more"] == ["turns", "tool calls", "waitpoints", "charges", "webhook deliveries"]


def test_lists_make_no_query_per_row(boss, world, user):
    def queries(model: Any) -> int:
        with CaptureQueriesContext(connection) as asked:
            assert boss.get(address(model, "changelist")).status_code == 200
        return len(asked)

    # The first visit fills caches.
    before = [{model: queries(model) for model in HISTORY} for _ in range(2)][-1]
    other = factories.UserFactory()
    make_run(other, turns=3)
    keys.create_key(other, name="other")
    factories.AttachmentFactory(user=other)
    assert {model: queries(model) for model in HISTORY} == before
    assert max(before.values()) <= 8, before


# --- read-only -------------------------------------------------------------------------------------------------------
def test_history_is_read_only_even_for_superusers(boss, world):
    for model in HISTORY:
        row = model._default_manager.order_by("pk").first()
        before = model_to_dict(row), model._default_manager.count()
        body = {field.name: "1" for field in model._meta.concrete_fields} | {"_save": "1", "post": "yes"}
        # An event has no page of its own.
        shown = boss.get(address(model, "change", row.pk)).status_code
        assert shown == (302 if model is RunEvent else 200), model
        assert boss.get(address(model, "add")).status_code == 403, model
        for page in ("change", "delete"):
            assert boss.post(address(model, page, row.pk), body).status_code == 403, (model, page)
        assert boss.post(address(model, "add"), body).status_code == 403, model
        bulk = {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"}
        boss.post(address(model, "changelist"), bulk)
        boss.post(address(model, "changelist"), bulk | {"select_across": "1"})
        row.refresh_from_db()
        assert (model_to_dict(row), model._default_manager.count()) == before, model
        assert "delete_selected" not in boss.get(address(model, "changelist")).content.decode(), model


def test_a_user_with_history_cannot_be_deleted(boss, user, run):
    boss.post(reverse("admin:auth_user_delete", args=[user.pk]), {"post": "yes"})
    boss.post(
        reverse("admin:auth_user_changelist"),
        {"action": "delete_selected", "_selected_action": [user.pk], "post": "yes"},
    )
    user.refresh_from_db()
    assert Run.objects.filter(pk=run.pk).exists()


# --- secrets and content ---------------------------------------------------------------------------------------------
def every_page(client: Any) -> Any:
    """Yield (address, text) of every page of the admin that GET opens, except the content page."""
    yield "dashboard", client.get(reverse("admin:index")).content.decode()
    for model in admin.site._registry:
        listing = address(model, "changelist")
        yield listing, client.get(listing).content.decode()
        for row in model._default_manager.order_by("-pk")[:2]:
            for page in ("change", "history", "delete"):
                url = address(model, page, row.pk)
                yield url, client.get(url).content.decode()
    for name, label in (("runs_run", "cancel"), ("apikeys_apikey", "narrow"), ("webhooks_endpoint", "disable")):
        app, model_name = name.split("_")
        row = next(m for m in admin.site._registry if m._meta.model_name == model_name)._default_manager.first()
        yield label, client.get(reverse(f"admin:{name}_do_one", args=[row.pk, label])).content.decode()


def test_no_page_shows_secrets_or_content_or_loads_from_another_host(boss, world, user):
    endpoint = Endpoint.objects.get(user=user)
    digest, key_id = keys.ApiKey.objects.values_list("digest", "pk").get()
    seen = ""
    for url, text in every_page(boss):
        assert text == "" or text.count("<main") == text.count("</main>") == 1, url
        for hidden in (CONTENT, SECRET, digest, endpoint.secret):
            assert hidden not in text, url
        assert FOREIGN.findall(text) == [], url
        seen += text
    assert world.pk in seen
    assert key_id in seen


def test_the_content_page_requires_a_permission_and_is_logged(sign_in, run):
    page = reverse("admin:runs_run_content", args=[run.pk])
    assert sign_in("viewer").get(page).status_code == 403
    assert sign_in("billing").get(page).status_code == 403
    assert not LogEntry.objects.exists()
    support = sign_in("support")
    text = support.get(page).content.decode()
    assert text.count(CONTENT) >= 8
    assert all(text.count(f">{label}</h3>") == 2 for label in ("New in the input", "Input", "Asked", "Answer"))
    assert text.count(">Output</h3>") == 4  # of two turns and two calls
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id) == (support.person, run.pk)
    assert "Read its messages" in entry.get_change_message()


def test_long_content_is_cut_and_markup_is_escaped(sign_in, run):
    Turn.objects.filter(run=run).update(text="<script>alert(1)</script>" + "x" * 30_000)
    text = sign_in("support").get(reverse("admin:runs_run_content", args=[run.pk])).content.decode()
    assert "<script>alert" not in text
    assert "The rest is not shown." in text
    assert len(text) < 120_000


# --- what pages may run ----------------------------------------------------------------------------------------------
def test_names_of_rows_are_shown_as_they_are_written(boss, run):
    provider = Provider.objects.create(name="acme-bad", kind="demo")
    user = factories.UserFactory(username="zoe")
    for page, name in (
        (reverse("admin:runs_provider_change", args=[provider.pk]), "acme-bad"),
        (reverse("admin:runs_run_change", args=[run.pk]), run.pk),
        (reverse("person", args=[user.pk]), "zoe"),
    ):
        heading = re.findall(r'truncate tracking-tight">([^<]*)<', boss.get(page).content.decode())
        assert heading[-1] == name
        assert heading[0][0].isupper()


@pytest.mark.parametrize("path", ["/admin/", "/admin/login/", "/admin/nothing/", "/api/docs"])
def test_pages_allow_only_their_own_scripts(boss, path):
    policy = boss.get(path)["Content-Security-Policy"]
    parts = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert parts["default-src"] == "'self'"
    assert set(parts["script-src"].split()) <= {"'self'", "'unsafe-eval'"}
    assert (parts["object-src"], parts["frame-ancestors"], parts["form-action"]) == ("'none'", "'none'", "'self'")


def test_holds_and_partial_charges_of_turns_are_shown(boss, user):
    """Of a turn under way, and of requests that ended early; not of one that cost nothing."""
    run = make_run(user, status="running", finished_at=None)
    price = {"model": "demo", "in": 500_000, "out": 1_500_000, "inputTokens": 1234, "outputTokens": 4096}

    def hold(turn: int, number: int) -> Any:
        cause = f"turn:{run.pk}:{turn}:1.{number}"
        common = {"run_id": run.pk, "chat_id": run.chat_id, "price": price | {"turn": turn}}
        return ledger.hold(user.pk, 6_000_000, cause=cause, **common)

    used = price | {"inputTokens": 1000, "outputTokens": 200, "estimated": True, "partial": True}
    ledger.settle(hold(2, 1), 800_000, price=used)
    began = clock.now()
    ledger.settle(hold(2, 2), 700_000, price=used)
    ModelAttempt.objects.create(
        run=run, turn_index=2, number=1, model="demo", provider="demo", reason="connection_lost",
        started_at=began, finished_at=clock.now(),
    )  # fmt: skip
    ledger.settle(hold(2, 3), 0)
    hold(2, 4)
    steps = [(step.title, step.detail, step.cost) for step in timeline.build(run)["steps"] if step.charges]
    assert sorted(steps) == [
        ("Turn 1", "demo, 1,200 tokens in, 34 out", "0.5"),
        ("Turn 2", "demo, at most 1,234 tokens in, 4,096 out", "6 held"),
        ("Turn 2 ended early", "demo, 1,000 tokens in, 200 out, estimated", "0.7"),
        ("Turn 2 ended early", "demo, 1,000 tokens in, 200 out, estimated", "0.8"),
        ("calculate", "call 1.1", "1.25"),
    ]
    page = boss.get(address(LedgerEntry, "changelist") + f"?q={run.pk}").content.decode()
    assert page.count("demo, turn 2, ended early") == 2
    assert "demo, turn 2<" in page
