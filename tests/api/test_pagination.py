"""Keyset pagination (docs/api.md)."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from apikeys import keys
from apikeys.models import ApiKey
from apikeys.views import ApiKeyViewSet
from tests.factories import ChatFactory, MessageFactory, RunFactory

pytestmark = pytest.mark.django_db
MOMENT = datetime(2026, 11, 20, 12, 0, 0, tzinfo=UTC)


def pages(session, limit: int) -> list[str]:
    """Return the names of all items, read page by page."""
    names: list[str] = []
    cursor = ""
    while True:
        body = session.get(f"/api/v1/api-keys?limit={limit}{cursor}").json()
        assert len(body["items"]) <= limit
        names += [item["name"] for item in body["items"]]
        if body["nextCursor"] is None:
            return names
        cursor = f"&cursor={body['nextCursor']}"


@pytest.fixture
def five(user) -> list[ApiKey]:
    return [keys.create_key(user, name=str(number))[0] for number in range(5)]


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("ascending", [False, True])
def test_every_row_is_listed_once_in_order(session, five, monkeypatch, limit, ascending):
    monkeypatch.setattr(ApiKeyViewSet, "list", lambda view, _: view.page(view.get_queryset(), ascending=ascending))
    assert pages(session, limit) == (["0", "1", "2", "3", "4"] if ascending else ["4", "3", "2", "1", "0"])


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("ascending", [False, True])
@pytest.mark.parametrize(
    "micro",
    [
        [0] * 5,
        [0, 0, 0, 1, 1],
        [0, 1, 2, 3, 4],
        [0, 1000, 1000, 1001, 2000],
        [120_000, 120_000, 120_001, 121_000, 121_000],
    ],
)
def test_rows_with_the_same_time_are_each_listed_once(session, five, monkeypatch, limit, ascending, micro):
    """SQLite stores whole seconds, milliseconds and microseconds in different forms. Each form must work."""
    monkeypatch.setattr(ApiKeyViewSet, "list", lambda view, _: view.page(view.get_queryset(), ascending=ascending))
    for key, offset in zip(five, micro, strict=True):
        ApiKey.objects.filter(pk=key.pk).update(created_at=MOMENT + timedelta(microseconds=offset))
    expected = [
        key.name
        for key in sorted(ApiKey.objects.all(), key=lambda key: (key.created_at, key.pk), reverse=not ascending)
    ]
    assert pages(session, limit) == expected


def test_changes_between_pages_do_not_shift_the_pages(session, five, user):
    first = session.get("/api/v1/api-keys?limit=2").json()
    keys.create_key(user, name="new")
    ApiKey.objects.filter(name="3").delete()  # the cursor's own row
    rest = session.get(f"/api/v1/api-keys?limit=10&cursor={first['nextCursor']}").json()
    assert [item["name"] for item in rest["items"]] == ["2", "1", "0"]


INVALID = (
    ["limit=0", "limit=101", "limit=-1", "limit=1.5", "limit=x", "limit=", "limit=%00", "limit=%D9%A3", "limit=1e1"]
    + ["cursor=", "cursor=x", "cursor=%00", "cursor=%FF", "cursor=" + "A" * 5000, "cursor=W10"]
    + ["cursor=" + value for value in ("5", "-key", "5-", "5-a%00b", "-5-key", "5-%ED%A0%80", "9" * 18 + "-a", "5-a-b")]
)  # fmt: skip


def test_an_invalid_limit_or_cursor_is_400(session, five, subtests):
    for query in INVALID:
        with subtests.test(query[:100]):
            response = session.get(f"/api/v1/api-keys?{query}")
            assert (response.status_code, response.json()["error"]["code"]) == (400, "VALIDATION_ERROR")
            assert list(response.json()["error"]["details"]["fields"]) == [query.partition("=")[0]]


@pytest.mark.parametrize(("size", "lengths"), [(400_000, [2, 2, 1]), (2_000_000, [1] * 5), (1000, [5])])
def test_a_page_ends_before_a_mebibyte(session, user, size, lengths):
    chat = ChatFactory(user=user)
    sent = [MessageFactory(chat=chat, content=f"{number}{'x' * size}").pk for number in range(5)]
    found: list[str] = []
    page: dict[str, Any] = {}
    for length in lengths:
        cursor = f"&cursor={page['nextCursor']}" if found else ""
        response = session.get(f"/api/v1/chats/{chat.pk}/messages?limit=100{cursor}")
        page = response.json()
        assert len(page["items"]) == length
        assert length == 1 or len(response.content) <= 1024 * 1024 + 200
        found += [item["id"] for item in page["items"]]
    assert (found, page["nextCursor"]) == (sent, None)


def test_a_filtered_page_ends_before_a_mebibyte(session, user):
    chat = ChatFactory(user=user)
    pairs = {f"key{number}": "ü" * 512 for number in range(16)}
    runs = [RunFactory(chat=chat, metadata=pairs).pk for _ in range(80)]
    first = session.get("/api/v1/runs?limit=100&status=completed")
    assert len(first.content) <= 1024 * 1024 + 200
    rest = session.get(f"/api/v1/runs?limit=100&status=completed&cursor={first.json()['nextCursor']}").json()
    assert [run["id"] for run in first.json()["items"] + rest["items"]] == runs[::-1]
    assert rest["nextCursor"] is None
