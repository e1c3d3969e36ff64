"""Admin actions: each needs a permission and a confirmation, calls the API's service once and is logged."""

import re
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.urls import reverse

from apikeys import keys
from config.kernel.money import MICRO
from credits.models import LedgerEntry
from runs import lifecycle, services
from runs.models import Run
from tests import factories
from tests.admin.conftest import make_run, unknown
from tests.credits.helpers import fund, place, rows, spend, state
from webhooks import services as webhooks
from webhooks.models import Endpoint

pytestmark = pytest.mark.django_db


def hidden(page: str) -> dict[str, Any]:
    """Return the hidden fields of the confirmation form."""
    fields: dict[str, Any] = {}
    for tag in re.findall(r"<input type=\"hidden\"[^>]*>|<textarea[^>]*hidden[^>]*>", page):
        name, value = re.search(r'name="([^"]*)"', tag), re.search(r'value="([^"]*)"', tag)
        if name and name[1] != "csrfmiddlewaretoken":
            fields.setdefault(name[1], []).append(value[1] if value else "")
    return fields


class Doing:
    """Performs the steps of an action as one member of staff: ``ask``, ``send``, ``confirm``."""

    def __init__(self, client: Any, model: str, name: str, *rows: Any) -> None:
        self.client, self.rows = client, [str(row.pk) for row in rows]
        self.url = reverse(f"admin:{model}_do", args=[name])
        self.one = reverse(f"admin:{model}_do_one", args=[rows[0].pk, name]) if len(rows) == 1 else None

    def ask(self) -> Any:
        return self.client.get(self.one or self.url)

    def send(self, step: str = "review", **data: Any) -> Any:
        return self.client.post(self.url, {"_selected_action": self.rows, "step": step, **data})

    def confirm(self, **data: Any) -> Any:
        """Send the form, if the action has one, and then the fields of the confirmation page."""
        page = self.send(**data)
        assert page.status_code == 200, page
        text = page.content.decode()
        assert "Yes, " in text, re.findall(r"errornote.*?</div>|text-red.*?</", text, re.DOTALL)
        return self.client.post(self.url, hidden(text))


def logged() -> list[tuple[str, str]]:
    """Return (object id, text) of each log entry, oldest first."""
    return [(entry.object_id, entry.get_change_message()) for entry in LogEntry.objects.order_by("pk")]


# --- runs ------------------------------------------------------------------------------------------------------------
@pytest.fixture
def waiting(user) -> Run:
    run = factories.WaitpointFactory(run__chat__user=user).run
    Run.objects.filter(pk=run.pk).update(finished_at=None)
    fund(user, 10 * MICRO)
    place(user, 4 * MICRO, run=run.pk, chat=run.chat_id)
    return run


def test_a_run_is_cancelled_by_the_service_of_the_api(sign_in, user, waiting, monkeypatch):
    asked = []
    real = services.cancel_run
    monkeypatch.setattr(services, "cancel_run", lambda run: (asked.append(run.pk), real(run))[1])
    doing = Doing(sign_in("support"), "runs_run", "cancel", waiting)
    assert waiting.pk in doing.ask().content.decode()
    waiting.refresh_from_db()
    assert (waiting.status, state(user), logged()) == ("waiting", (10 * MICRO, 4 * MICRO), [])
    answer = doing.confirm()
    assert (answer.status_code, answer["Location"]) == (302, reverse("admin:runs_run_change", args=[waiting.pk]))
    waiting.refresh_from_db()
    assert (waiting.status, state(user)) == ("cancelled", (10 * MICRO, 0))
    assert (logged(), asked) == ([(waiting.pk, "Cancelled.")], [waiting.pk])
    doing.send("confirm")
    assert len(logged()) == 1
    assert "do/cancel" not in doing.client.get(answer["Location"]).content.decode()


def test_many_runs_are_cancelled_from_the_list(sign_in, user, waiting):
    others = [factories.WaitpointFactory(run__chat__user=user).run for _ in range(2)]
    over = make_run(user)
    support = sign_in("support")
    chosen = [waiting, *others, over]
    page = support.post(
        reverse("admin:runs_run_changelist"), {"action": "cancel", "_selected_action": [run.pk for run in chosen]}
    )
    assert page.status_code == 200
    assert set(Run.objects.values_list("status", flat=True)) == {"waiting", "completed"}
    answer = support.post(reverse("admin:runs_run_do", args=["cancel"]), hidden(page.content.decode()), follow=True)
    assert "3 done" in answer.content.decode()
    assert Run.objects.filter(status="cancelled").count() == 3
    assert {pk for pk, _ in logged()} == {run.pk for run in [waiting, *others]}


def test_a_failed_action_changes_and_logs_nothing(sign_in, waiting, monkeypatch):
    def fail(run_id: str) -> None:
        Run.objects.filter(pk=run_id).update(error_message="half done")
        raise services.RunInProgress

    monkeypatch.setattr(lifecycle, "request_cancel", fail)
    answer = Doing(sign_in("support"), "runs_run", "cancel", waiting).send("confirm")
    waiting.refresh_from_db()
    assert (answer.status_code, waiting.error_message, logged()) == (302, None, [])


@pytest.mark.parametrize("step", ["review", "confirm"])
@pytest.mark.parametrize(
    ("model", "name", "data"),
    [
        ("credits_ledgerentry", "refund", {"amount": "1", "reason": "x"}),
        ("credits_account", "adjust", {"amount": "1", "reason": "x"}),
        ("apikeys_apikey", "narrow", {"scopes": []}),
        ("apikeys_apikey", "revoke", {}),
        ("runs_run", "cancel", {}),
    ],
)
def test_an_action_without_a_row_goes_back_to_the_list(boss, model, name, data, step):
    answer = boss.post(reverse(f"admin:{model}_do", args=[name]), {"step": step, **data}, follow=True)
    assert answer.redirect_chain == [(reverse(f"admin:{model}_changelist"), 302)]
    assert "Choose a row first." in answer.content.decode()


def shown() -> list[tuple[str, Any]]:
    """Return each model that has actions (``app_model``) with each of its actions."""
    reverse("admin:index")  # the first use of an address registers the pages
    return [
        (f"{model._meta.app_label}_{model._meta.model_name}", action)
        for model, page in admin.site._registry.items()
        for action in getattr(page, "staff_actions", ())
    ]


def test_every_action_has_a_label_and_a_question():
    for _, action in shown():
        assert action.label[0].isupper(), action.name
        assert action.question.endswith("."), action.name
        assert "\n" not in action.question, action.name


# --- permissions -----------------------------------------------------------------------------------------------------
PERMISSIONS = {
    ("runs_run", "cancel"): "runs.cancel_run",
    ("apikeys_apikey", "revoke"): "apikeys.revoke_apikey",
    ("apikeys_apikey", "narrow"): "apikeys.narrow_apikey",
    ("apikeys_serverkey", "create"): "apikeys.create_serverkey",
    ("apikeys_serverkey", "revoke"): "apikeys.revoke_serverkey",
    ("auth_user", "block"): "auth.change_user",
    ("auth_user", "unblock"): "auth.change_user",
    ("auth_user", "export"): "runs.read_run_content",
    ("auth_user", "erase"): "auth.delete_user",
    ("credits_account", "grant"): "credits.grant_credits",
    ("credits_account", "grant_to"): "credits.grant_credits",
    ("credits_account", "adjust"): "credits.adjust_credits",
    ("credits_ledgerentry", "refund"): "credits.refund_credits",
    ("webhooks_endpoint", "disable"): "webhooks.disable_endpoint",
    ("webhooks_endpoint", "test"): "webhooks.disable_endpoint",
    ("webhooks_endpoint", "installation"): "webhooks.set_installation_endpoint",
    ("webhooks_endpoint", "enable-installation"): "webhooks.set_installation_endpoint",
    ("webhooks_endpoint", "delete-installation"): "webhooks.set_installation_endpoint",
}


def test_every_action_has_the_permission_that_the_page_names():
    """``ALLOWED`` only tells the roles apart: these have no permission to erase, block or set up anything."""
    assert {(model, action.name): action.permission for model, action in shown()} == PERMISSIONS


ALLOWED = {
    ("runs_run", "cancel"): {"support"},
    ("apikeys_apikey", "revoke"): {"support"},
    ("apikeys_apikey", "narrow"): {"support"},
    ("webhooks_endpoint", "disable"): {"support"},
    ("credits_account", "grant"): {"billing"},
    ("credits_account", "grant_to"): {"billing"},
    ("credits_account", "adjust"): {"billing"},
    ("credits_ledgerentry", "refund"): {"billing"},
}


@pytest.mark.parametrize(("model", "name"), ALLOWED)
def test_each_action_requires_its_permission(sign_in, user, waiting, model, name):
    row = {
        "runs_run": lambda: waiting,
        "apikeys_apikey": lambda: keys.create_key(user, name="ci")[0],
        "webhooks_endpoint": lambda: factories.EndpointFactory(user=user),
        "credits_account": lambda: user.credit_account,
        "credits_ledgerentry": lambda: spend(user, MICRO),
    }[model]()
    target = () if name == "grant_to" else (row,)
    listing = reverse(f"admin:{model}_changelist")
    where = listing if name == "grant_to" else reverse(f"admin:{model}_change", args=[row.pk])
    data = {"amount": "1", "reason": "x", "user": user.username, "scopes": []}
    before = (state(user), keys.ApiKey.objects.filter(revoked_at=None).count())
    # Those who may do it come last.
    for role in sorted(("viewer", "support", "billing"), key=ALLOWED[model, name].__contains__):
        client = sign_in(role)
        doing = Doing(client, model, name, *target)
        allowed = role in ALLOWED[model, name]
        assert doing.ask().status_code == (200 if allowed else 403), role
        assert (f"do/{name}/" in client.get(where).content.decode()) == allowed, role
        answer = doing.send("confirm", nonce="n", **data)
        if not allowed:
            assert answer.status_code == 403, role
            client.post(listing, {"action": name, "_selected_action": [row.pk]})
            assert (state(user), keys.ApiKey.objects.filter(revoked_at=None).count()) == before, role
            assert logged() == [], role


def test_a_user_who_is_not_staff_is_redirected(client, user, waiting):
    client.force_login(user)
    for url in (reverse("admin:index"), reverse("admin:runs_run_do_one", args=[waiting.pk, "cancel"])):
        assert client.get(url).status_code == 302
    assert client.post(reverse("admin:runs_run_do", args=["cancel"]), {"step": "confirm"}).status_code == 302


def test_an_action_also_requires_the_view_permission(sign_in, waiting):
    client = sign_in(permissions=("runs.cancel_run",))
    assert Doing(client, "runs_run", "cancel", waiting).send("confirm").status_code == 403


def test_unknown_actions_and_objects_are_refused(sign_in, waiting):
    support = sign_in("support")
    assert support.get(reverse("admin:runs_run_do", args=["cancel"])).status_code == 302
    assert support.get(reverse("admin:runs_run_do", args=["explode"])).status_code == 404
    assert support.get(reverse("admin:runs_run_do_one", args=[unknown("run"), "cancel"])).status_code == 404
    assert sign_in("billing").get(reverse("admin:credits_account_do_one", args=["x", "grant"])).status_code == 404
    nobody = {"_selected_action": [unknown("run"), "\0"], "step": "confirm"}
    assert support.post(reverse("admin:runs_run_do", args=["cancel"]), nobody).status_code == 302
    assert logged() == []


def test_a_request_without_a_csrf_token_is_refused(sign_in, waiting):
    from django.test import Client

    forger = Client(enforce_csrf_checks=True)
    forger.force_login(sign_in("support").person)
    body = {"_selected_action": [waiting.pk], "step": "confirm"}
    assert forger.post(reverse("admin:runs_run_do", args=["cancel"]), body).status_code == 403
    waiting.refresh_from_db()
    assert waiting.status == "waiting"


# --- keys and endpoints ----------------------------------------------------------------------------------------------
def test_keys_are_revoked(sign_in, user):
    key, secret = keys.create_key(user, name="ci")
    client = factories.public_client(user)
    Doing(sign_in("support"), "apikeys_apikey", "revoke", key).confirm()
    key.refresh_from_db()
    assert key.revoked_at is not None
    assert logged() == [(key.pk, "Revoked.")]
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    assert client.get("/api/public/v1/key").status_code == 401


def test_a_keys_scopes_are_narrowed_and_never_widened(sign_in, user):
    key, _ = keys.create_key(user, name="ci")
    doing = Doing(sign_in("support"), "apikeys_apikey", "narrow", key)
    assert "runs:write" in doing.ask().content.decode()
    doing.confirm(scopes=["runs:read", "chats:read"])
    key.refresh_from_db()
    assert key.scopes == ["chats:read", "runs:read"]
    assert "runs:write" in logged()[0][1]
    for wrong in (["runs:write"], ["runs:read", "everything"]):
        assert "Select a valid choice" in doing.send("confirm", scopes=wrong).content.decode()
    key.refresh_from_db()
    assert key.scopes == ["chats:read", "runs:read"]
    assert len(logged()) == 1


def test_an_endpoint_is_disabled(sign_in, user, monkeypatch):
    endpoint = factories.EndpointFactory(user=user)
    asked = []
    real = webhooks.change
    monkeypatch.setattr(webhooks, "change", lambda *a, **b: (asked.append((*a, b)), real(*a, **b))[1])
    doing = Doing(sign_in("support"), "webhooks_endpoint", "disable", endpoint)
    doing.confirm()
    endpoint.refresh_from_db()
    assert (endpoint.enabled, asked, logged()) == (False, [(user, {"enabled": False})], [(endpoint.pk, "Disabled.")])
    doing.send("confirm")
    assert len(logged()) == 1


def test_the_installation_endpoint_is_set_up(boss, sign_in):
    doing = Doing(boss, "webhooks_endpoint", "installation")
    assert "Enter a valid" in doing.send(url="ftp://example.com/").content.decode() or not Endpoint.objects.exists()
    shown = boss.get(doing.confirm(url="http://127.0.0.1:9000/hook").url).content.decode()
    endpoint = Endpoint.objects.get()
    assert (endpoint.user, endpoint.extended_events, endpoint.url) == (None, True, "http://127.0.0.1:9000/hook")
    assert endpoint.secret in shown
    assert endpoint.secret not in boss.get(reverse("admin:webhooks_endpoint_changelist")).content.decode()
    assert logged() == [(endpoint.pk, "Set up as the installation endpoint, with a new secret.")]
    doing.confirm(url="http://127.0.0.1:9000/other")
    changed = Endpoint.objects.get()
    assert (changed.url, changed.secret) == ("http://127.0.0.1:9000/other", endpoint.secret)
    Doing(boss, "webhooks_endpoint", "disable", endpoint).confirm()
    Doing(boss, "webhooks_endpoint", "enable-installation", endpoint).confirm()
    assert Endpoint.objects.get().enabled
    assert sign_in("support").get(doing.url).status_code == 403
    Doing(boss, "webhooks_endpoint", "delete-installation", endpoint).confirm()
    assert Endpoint.objects.get().deleted_at is not None


# --- credits ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def billing(sign_in):
    return sign_in("billing")


def test_credits_are_granted_with_a_reason(billing, user):
    fund(user, 0)
    doing = Doing(billing, "credits_account", "grant", user.credit_account)
    doing.ask()
    page = doing.send(amount="12.5", reason="Sorry for Monday").content.decode()
    assert "12.5" in page
    assert "Sorry for Monday" in page
    assert rows(user) == []
    doing.confirm(amount="12.5", reason="Sorry for Monday", days="30")
    entry = LedgerEntry.objects.get(account_id=user.pk, type="GRANT", reason="Sorry for Monday")
    assert (entry.amount, entry.staff) == (12_500_000, billing.person)
    assert entry.expires_at is not None
    assert logged() == [(str(user.pk), "Granted 12.5: Sorry for Monday")]


def test_credits_are_granted_by_username_to_a_user_without_an_account(billing):
    stranger = factories.UserFactory(username="grace")
    Doing(billing, "credits_account", "grant_to").confirm(user="grace", amount="5", reason="Welcome")
    assert state(stranger) == (105 * MICRO, 0)
    assert logged() == [(str(stranger.pk), "Granted 5: Welcome")]


def test_a_repeated_confirmation_moves_credits_once(billing, user):
    fund(user, 0)
    doing = Doing(billing, "credits_account", "grant", user.credit_account)
    sent = hidden(doing.send(amount="5", reason="Once").content.decode())
    for _ in range(2):
        billing.post(doing.url, sent)
    assert rows(user) == [("GRANT", 5 * MICRO)]
    assert len(logged()) == 1
    # A newly opened page makes a separate grant.
    doing.confirm(amount="5", reason="Once")
    assert len(rows(user)) == 2


def test_an_account_is_adjusted(billing, user):
    fund(user, MICRO)
    Doing(billing, "credits_account", "adjust", user.credit_account).confirm(amount="-2.5", reason="Counted twice")
    assert state(user) == (-1_500_000, 0)
    entry = LedgerEntry.objects.get(reason="Counted twice")
    assert (entry.type, entry.staff) == ("ADJUSTMENT", billing.person)
    assert logged() == [(str(user.pk), "Adjusted by -2.5: Counted twice")]


def test_refunds_do_not_exceed_the_charge(billing, user):
    fund(user, 10 * MICRO)
    entry = spend(user, 4 * MICRO)
    doing = Doing(billing, "credits_ledgerentry", "refund", entry)
    doing.confirm(amount="3", reason="Broken chart")
    assert state(user) == (9 * MICRO, 0)
    page = doing.send("confirm", amount="1.5", reason="Greedy", nonce="x").content.decode()
    assert "At most 1 credits of this row can still be refunded" in page
    assert state(user) == (9 * MICRO, 0)
    assert logged() == [(entry.pk, "Refunded 3: Broken chart")]


def test_only_charges_can_be_refunded(billing, user):
    fund(user, 10 * MICRO)
    place(user, MICRO)
    held = LedgerEntry.objects.get(type="HOLD")
    page = Doing(billing, "credits_ledgerentry", "refund", held).send("confirm", amount="1", reason="x", nonce="x")
    assert "Only a CAPTURE or USAGE row can be refunded" in page.content.decode()
    assert logged() == []


BAD = ["-1", "0", "NaN", "Infinity", "1e400", "0.0000001", "abc", "", "9" * 30, "10000000000", "1,5", "\u0000"]


@pytest.mark.parametrize("action", ["grant", "grant_to", "adjust", "refund"])
def test_an_invalid_amount_is_a_clear_error_and_changes_nothing(billing, user, action):
    fund(user, 10 * MICRO)
    entry = spend(user, MICRO)
    before = state(user), LedgerEntry.objects.count()
    model, target = {
        "grant": ("credits_account", (user.credit_account,)),
        "grant_to": ("credits_account", ()),
        "adjust": ("credits_account", (user.credit_account,)),
        "refund": ("credits_ledgerentry", (entry,)),
    }[action]
    doing = Doing(billing, model, action, *target)
    # All have the same kind of field, but an adjustment may be negative. Only the ledger rejects one of 0, at the
    # confirmation.
    tried = [(amount, step) for amount in ("NaN", "") for step in ("review", "confirm")]
    wrong = {"grant": BAD, "adjust": ["0"]}.get(action, ["-1", "0"])
    for amount, step in [*tried, *((amount, "confirm") for amount in wrong)]:
        page = doing.send(step, amount=amount, reason="x", user=user.username, nonce="n")
        assert (page.status_code, page.context["confirm"]) == (200, False), (amount, step)
        said = str(page.context["form"].errors)
        assert re.search(r"The amount|This field is required|Null characters|at most|must not be 0", said), said
    assert (state(user), LedgerEntry.objects.count()) == before
    assert logged() == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"user": "nobody"}, "There is no user nobody."),
        ({"user": ""}, "This field is required."),
        ({"user": "\u0000"}, "Null characters"),
        ({"reason": ""}, "This field is required."),
        ({"reason": "   "}, "This field is required."),
        ({"reason": "x" * 501}, "at most 500 characters"),
        ({"reason": "a\u0000b"}, "Null characters"),
        ({"days": "-1"}, "greater than or equal to 1"),
        ({"days": "NaN"}, "Enter a whole number"),
        ({"days": "9" * 40}, "less than or equal to"),
    ],
)
def test_other_invalid_input_is_a_clear_error(billing, user, wrong, said):
    fund(user, 0)
    data = {"user": user.username, "amount": "1", "reason": "x", "nonce": "n"} | wrong
    page = Doing(billing, "credits_account", "grant_to").send("confirm", **data)
    assert page.status_code == 200
    assert said in page.content.decode()
    assert (rows(user), logged()) == ([], [])
