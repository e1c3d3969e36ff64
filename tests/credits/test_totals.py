"""The totals of the usage reports: maintained by triggers, compared with the ledger, and rebuilt."""

import os
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from django.db import connection, transaction
from django.db.models import F
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from credits import ledger, reconcile, usage
from credits.models import ChatDayTotal, ChatTotal, DayTotal, LedgerEntry, RunTotal
from credits.reconcile import drift
from tests.credits.helpers import clerk, place, spend, stop_clock, turn
from tests.factories import UserFactory
from tests.tiers import examples

pytestmark = pytest.mark.django_db
KIRITIMATI = ZoneInfo("Pacific/Kiritimati")
KINDS = (DayTotal, ChatTotal, ChatDayTotal, RunTotal)


def off() -> list[str]:
    """Return only the differences of the totals, as the rows of these tests change no account."""
    return [line for model in reconcile.KINDS for line in reconcile.drift_of(model)]


def some_spending(user) -> None:
    ledger.refund(spend(user, 50, chat="chat_1").pk, 20, reason="r", staff=clerk())
    turn(user, 7, chat="chat_2", run="run_2")
    turn(user, 0, chat="chat_2", run="run_2")
    place(user, 9)


def written(model) -> list[tuple[int, int]]:
    return sorted(model.objects.values_list("amount", "records"))


def test_each_written_row_counts(user):
    spend(user, 5)
    against, other = LedgerEntry.objects.get(type="HOLD"), LedgerEntry.objects.get(type="GRANT")
    usage = {"account_id": user.pk, "type": "USAGE"}
    LedgerEntry.objects.create(amount=3, cause="x", chat_id="chat_1", run_id="run_1", against=against, **usage)
    LedgerEntry.objects.create(amount=4, cause="y", against=other, **usage)
    assert written(DayTotal) == [(5, 1), (7, 2)]
    assert written(ChatTotal) == written(ChatDayTotal) == [(8, 2)]
    assert written(RunTotal) == [(3, 1), (5, 1)]
    assert off() == []


@pytest.mark.skipif("TEST_DATABASE_URL" not in os.environ, reason="SQLite's text has no time zone")
@pytest.mark.services
def test_a_day_is_a_utc_day_in_any_session_time_zone(user, monkeypatch):
    stop_clock(monkeypatch, datetime(2026, 5, 5, 12, tzinfo=UTC))
    with connection.cursor() as cursor:
        for zone in ("Pacific/Kiritimati", "Pacific/Pago_Pago"):  # 14 hours before UTC, 11 behind
            cursor.execute(f"SET LOCAL TIME ZONE '{zone}'")
            turn(user, 1)
            assert list(drift()) == []
    assert {str(day) for day in DayTotal.objects.values_list("day", flat=True)} == {"2026-05-05"}


def test_rolled_back_rows_do_not_count(user):
    with transaction.atomic():
        spend(user, 5)
        transaction.set_rollback(True)
    assert [model.objects.count() for model in KINDS] == [0, 0, 0, 0]


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("change", [{"amount": 1}, {"records": 1}, {"latest": timedelta(microseconds=1)}])
def test_reconcile_finds_a_wrong_total(user, model, change):
    some_spending(user)
    assert list(drift()) == []
    total = model.objects.order_by("pk").first()
    model.objects.filter(pk=total.pk).update(**{name: F(name) + by for name, by in change.items()})
    (line,) = drift()
    assert line.startswith(f"{user.username}: {model._meta.verbose_name} of ")


def test_differences_are_read_one_by_one(user):
    """The first line appears before all differences are read, so their number does not matter."""
    for number in range(150):
        turn(user, 1, run=f"run_{number}")
    RunTotal.objects.update(amount=5)
    with CaptureQueriesContext(connection) as queries:
        found = reconcile.drift_of(RunTotal)
        next(found)
        assert len(queries) == 2
        assert len(list(found)) == 149


@pytest.mark.parametrize("model", KINDS)
def test_reconcile_finds_a_missing_or_superfluous_total(user, model):
    some_spending(user)
    lost = model.objects.order_by("-pk").first()
    model.objects.filter(pk=lost.pk).delete()
    assert len(list(drift())) == 1
    lost.save(force_insert=True)
    assert list(drift()) == []
    keys = {"account_id": user.pk, "amount": 0, "records": 0, "latest": lost.latest}
    other = {"day": datetime(2020, 1, 1, tzinfo=UTC).date(), "chat_id": "chat_9", "run_id": "run_9", "tool_key": ""}
    model.objects.create(**keys, **{name: value for name, value in other.items() if hasattr(model, name)})
    assert len(list(drift())) == 1


def test_reconcile_names_both_amounts(user, monkeypatch):
    stop_clock(monkeypatch, datetime(2026, 5, 5, 23, 59, 59, 999999, tzinfo=UTC))
    spend(user, 5_000_000)
    DayTotal.objects.update(amount=4_000_000)
    assert list(drift()) == [f"{user.username}: day total of day 2026-05-05, tool_key draw is 4, the ledger says 5"]


@pytest.mark.parametrize("second", [0, 1, 43_200, 86_399])
def test_the_first_hours_of_a_period_are_added_to_the_whole_days(user, monkeypatch, second):
    """Also for a start at midnight. Each row is a separate digit, so a missing or double row shows."""
    now = datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=second)
    travel = stop_clock(monkeypatch, now)
    start, tick = now - timedelta(days=7), timedelta(microseconds=1)
    midnight = start.replace(hour=0, minute=0, second=0) + timedelta(days=1)
    for power, moment in enumerate((start - tick, start, midnight - tick, midnight, now)):
        travel.now = moment
        turn(user, 10**power)
    period = usage.period_of("7d")
    of_day = defaultdict(int)
    for power, moment in enumerate((start, midnight - tick, midnight, now), 1):
        of_day[moment.date()] += 10**power
    assert usage.summary(user.pk, period)["total_debited_all"] == 11110
    with timezone.override(KIRITIMATI):
        assert {day["date"]: day["amount"] for day in usage.by_day(user.pk, period)} == of_day
    assert [chat["amount"] for chat in usage.by_chat(user.pk, period)] == [11110]


def test_a_refund_in_the_first_hours_of_a_period_is_subtracted(user, monkeypatch):
    now = datetime(2026, 11, 20, 12, tzinfo=UTC)
    travel = stop_clock(monkeypatch, now - timedelta(days=7) + timedelta(hours=1))
    ledger.refund(spend(user, 10).pk, 4, reason="r", staff=clerk())
    travel.now = now
    period = usage.period_of("7d")
    assert [chat["amount"] for chat in usage.by_chat(user.pk, period)] == [6]
    assert usage.summary(user.pk, period)["total_debited_all"] == 10


MOMENTS = st.one_of(
    # Near the starts of the periods and of their first days, to the microsecond.
    st.tuples(st.sampled_from([0, 6, 7, 8, 29, 30, 31, 89, 90, 91]), st.sampled_from([0, 1]), st.integers(-2, 2)),
    st.tuples(st.integers(0, 95), st.sampled_from([0, 1]), st.integers(-86_400_000_000, 86_400_000_000)),
)


@settings(max_examples=examples(15), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    second=st.integers(0, 86_399),
    rows=st.lists(
        st.tuples(
            MOMENTS,
            st.sampled_from(["CAPTURE", "USAGE", "REFUND"]),
            st.integers(1, 10**12),
            st.sampled_from(["draw", None, "search"]),
            st.sampled_from(["chat_1", "chat_2", None]),
        ),
        max_size=20,
    ),
)
def test_reports_equal_the_sums_of_the_rows(second, rows, user):
    """Compared row by row, for each period and any time of day."""
    now = datetime(2026, 11, 20, tzinfo=UTC) + timedelta(seconds=second)
    user = UserFactory()
    against = LedgerEntry.objects.create(account_id=user.pk, type="HOLD", amount=1, cause=f"{user.pk}")
    maker = clerk().pk
    entries = []
    for number, ((days, of_day, offset), type, amount, tool, chat) in enumerate(rows):
        moment = now - timedelta(days=days)
        if of_day:
            moment = moment.replace(hour=0, minute=0, second=0)
        moment = min(now, moment + timedelta(microseconds=offset))
        entry = LedgerEntry(account_id=user.pk, type=type, amount=amount, tool_key=tool, chat_id=chat, reason="r")
        entry.staff_id = maker
        entry.cause, entry.created_at = f"{user.pk}:{number}", moment
        if type in ("CAPTURE", "USAGE"):
            entry.against = LedgerEntry.objects.create(
                account_id=user.pk, type="HOLD", amount=1, cause=f"{user.pk}:{number}:hold"
            )
        elif type == "REFUND":
            entry.against = against
        entries.append(entry)
    LedgerEntry.objects.bulk_create(entries)
    for name, length in usage.PERIODS.items():
        # The time zone of the caller must not change a report.
        start = (now - timedelta(days=length)).astimezone(KIRITIMATI) if length else None
        inside = [entry for entry in entries if start is None or entry.created_at >= start]
        debits = [entry for entry in inside if entry.type != "REFUND"]
        period = usage.Period(start, now)
        by_tool, by_day, by_chat = defaultdict(list), defaultdict(list), defaultdict(list)
        for entry in debits:
            by_tool[entry.tool_key or "model"].append(entry)
            by_day[entry.created_at.date()].append(entry)
        for entry in inside:
            if entry.chat_id:
                by_chat[entry.chat_id].append(entry)
        with timezone.override(KIRITIMATI):
            summary, days = usage.summary(user.pk, period), usage.by_day(user.pk, period)
        assert {(g["tool_key"], g["amount"], g["records"], g["latest"]) for g in summary["groups"]} == {
            (tool, sum(e.amount for e in of), len(of), max(e.created_at for e in of)) for tool, of in by_tool.items()
        }, name
        assert [(d["date"], d["amount"], d["records"]) for d in days] == [
            (day, sum(e.amount for e in of), len(of)) for day, of in sorted(by_day.items())
        ], name
        assert {(c["chat_id"], c["amount"], c["latest"]) for c in usage.by_chat(user.pk, period)} == {
            (chat, sum(-e.amount if e.type == "REFUND" else e.amount for e in of), max(e.created_at for e in of))
            for chat, of in by_chat.items()
        }, name
    assert off() == []
