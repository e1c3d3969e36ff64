"""Rate limits (docs/api.md)."""

import logging
import socket

import pytest
import redis
from django.test import RequestFactory
from drf_spectacular.views import SpectacularSwaggerSplitView
from rest_framework.test import APIClient

from config.api import ratelimit
from config.api.views import SchemaView
from config.limits.window import Bucket, charge
from config.redis import PAUSE_SECONDS, shared
from tests import factories
from tests.threads import side_by_side

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.api.urls")]
HEADERS = ("X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset")


def shown(response) -> tuple[int, ...]:
    return tuple(int(response[name]) for name in HEADERS)


def refused(response) -> bool:
    return (
        response.status_code == 429
        and response.json()["error"]["code"] == "RATE_LIMITED"
        and int(response["Retry-After"]) >= 1
        and response["X-RateLimit-Remaining"] == "0"
    )


def test_each_call_reduces_the_remaining_calls(limits, session):
    limits.RATE_LIMIT_SESSION = 3
    assert [shown(session.get("/api/v1/me")) for _ in range(3)] == [(3, 2, 60), (3, 1, 60), (3, 0, 60)]
    response = session.get("/api/v1/me")
    assert refused(response)
    assert shown(response)[:2] == (3, 0)
    assert response["Retry-After"] in ("59", "60")


def test_a_refused_call_costs_nothing(limits, session):
    limits.RATE_LIMIT_SESSION = 1
    session.get("/api/v1/me")
    assert {session.get("/api/v1/me")["Retry-After"] for _ in range(5)} <= {"60", "59"}


def test_all_keys_of_a_user_share_a_limit_and_users_do_not(limits, user):
    limits.RATE_LIMIT_PUBLIC = 2
    first, second = factories.public_client(user), factories.public_client(user)
    assert [client.get("/api/public/v1/key").status_code for client in (first, second)] == [200, 200]
    assert refused(first.get("/api/public/v1/key"))
    assert factories.public_client(factories.UserFactory()).get("/api/public/v1/key").status_code == 200


def test_each_surface_has_its_own_limit(limits, user, session, public):
    limits.RATE_LIMIT_SESSION = limits.RATE_LIMIT_PUBLIC = 1
    assert session.get("/api/v1/me").status_code == 200
    assert public.get("/api/public/v1/key").status_code == 200


def test_run_starts_have_a_separate_limit(limits, session):
    limits.RATE_LIMIT_SESSION, limits.RATE_LIMIT_RUN_STARTS = 10, 2
    posts = [session.post("/api/v1/groups", {}, format="json") for _ in range(2)]
    assert [post.status_code for post in posts] == [201, 201]
    assert shown(posts[1])[:2] == (2, 0)  # the headers show the limit with the fewest calls left
    assert refused(session.post("/api/v1/groups", {}, format="json"))
    response = session.get("/api/v1/groups")
    assert (response.status_code, shown(response)[:2]) == (200, (10, 7))  # the refused start counts for neither limit


def test_ten_test_events_are_sent_in_a_minute(limits, user, session):
    factories.EndpointFactory(user=user)
    answers = [session.post("/api/v1/webhooks/test") for _ in range(11)]
    assert [answer.status_code for answer in answers] == [201] * 10 + [429]
    assert refused(answers[-1])
    assert user.webhook_endpoints.get().deliveries.count() == 10


def test_the_headers_show_the_limit_with_the_fewest_calls_left(limits, user, session):
    factories.EndpointFactory(user=user)
    limits.RATE_LIMIT_SESSION = 5
    assert shown(session.post("/api/v1/webhooks/test"))[:2] == (5, 4)
    limits.RATE_LIMIT_SESSION = 0
    assert shown(session.post("/api/v1/webhooks/test"))[:2] == (10, 8)


def test_invalid_credentials_count_by_address(limits, session):
    limits.RATE_LIMIT_UNAUTHENTICATED = 2
    bad = APIClient()
    bad.credentials(HTTP_AUTHORIZATION="Bearer x")
    answers = [bad.get("/api/v1/me"), APIClient().get("/api/public/v1/key")]
    assert [(answer.status_code, *shown(answer)[:2]) for answer in answers] == [(401, 2, 1), (401, 2, 0)]
    assert refused(bad.get("/api/v1/me"))
    assert session.get("/api/v1/me").status_code == 200  # a valid credential from the same address does not count
    assert bad.get("/api/v1/me", REMOTE_ADDR="10.0.0.9").status_code == 401


@pytest.mark.parametrize("path", ["/api/v1/nothing", "/api/fail/html", "/api/docs"])
def test_requests_without_a_view_count_by_address(limits, client, path):
    limits.RATE_LIMIT_UNAUTHENTICATED = 1
    assert shown(client.get(path)) == (1, 0, 60)
    assert refused(client.get(path))


def test_callers_that_an_outage_makes_unknown_are_not_refused(limits):
    limits.RATE_LIMIT_UNAUTHENTICATED = 1
    client = APIClient(raise_request_exception=False)
    answers = [client.get("/api/fail/database") for _ in range(3)]
    assert [(answer.status_code, shown(answer)[:2]) for answer in answers] == [(503, (1, 0))] * 3
    assert not any("Retry-After" in answer for answer in answers)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("get", "/api/v1/api-keys", 200),
        ("put", "/api/v1/me", 405),
        ("post", "/api/v1/api-keys", 400),
        ("delete", "/api/v1/api-keys/key_x", 404),
    ],
)
def test_every_answer_of_a_view_has_the_limit_headers(limits, session, method, path, status):
    limits.RATE_LIMIT_SESSION = 5
    response = getattr(session, method)(path)
    assert (response.status_code, *shown(response)[:2]) == (status, 5, 4)


def test_zero_disables_a_limit(limits, session):
    limits.RATE_LIMIT_SESSION = 0
    response = session.get("/api/v1/me")
    assert response.status_code == 200
    assert not any(name in response for name in HEADERS)


def test_calls_are_available_again_as_the_window_moves(limits, redis_server):
    bucket = Bucket("b", 3)
    client = redis.Redis.from_url(redis_server)
    while charge(bucket).allowed:
        pass
    # The bucket holds the times of requests. Move the first two back by a minute.
    for index in range(2):
        moment = int(client.lindex("ratelimit:b", index))
        client.lset("ratelimit:b", index, moment - 60_000_000)
    assert [charge(bucket).allowed for _ in range(3)] == [True, True, False]


def test_buckets_expire(limits, redis_server):
    charge(Bucket("b", 60))
    assert 0 < redis.Redis.from_url(redis_server).pttl("ratelimit:b") <= 60_000


@pytest.mark.parametrize("limit", [1, 7, 60, 599])
def test_a_full_bucket_holds_its_limit(limits, redis_server, limit):
    assert sum(charge(Bucket("b", limit)).allowed for _ in range(limit + 50)) == limit


def test_the_limit_is_exact_across_threads(limits, redis_server):
    bucket = Bucket("b", 40)
    assert sum(side_by_side(8, lambda _: sum(charge(bucket).allowed for _ in range(20)))) == 40


@pytest.mark.parametrize("path", ["/api/schema", "/api/docs", "/api/nothing"])
def test_an_address_over_its_limit_causes_no_work(limits, client, monkeypatch, path):
    limits.RATE_LIMIT_UNAUTHENTICATED = 1
    assert client.get(path).status_code in (200, 404)
    for view in (SchemaView, SpectacularSwaggerSplitView):
        monkeypatch.setattr(view, "dispatch", None)
    assert refused(client.get(path))


def test_pages_have_a_limit_by_address(limits, client):
    limits.RATE_LIMIT_PAGES = 2
    assert [client.get("/admin/login/", REMOTE_ADDR="203.0.113.9").status_code for _ in range(3)] == [200, 200, 429]
    assert client.get("/playground", REMOTE_ADDR="203.0.113.9").headers["Retry-After"]
    assert client.get("/docs/api", REMOTE_ADDR="203.0.113.9").status_code == 429
    assert client.get("/admin/login/", REMOTE_ADDR="203.0.113.10").status_code == 200
    assert client.get("/files/none", REMOTE_ADDR="203.0.113.9").status_code == 404


class TestAddress:
    @pytest.mark.parametrize(
        ("proxies", "forwarded", "found"),
        [
            (0, "1.1.1.1", "9.9.9.9"),
            (1, "1.1.1.1", "1.1.1.1"),
            (1, "6.6.6.6, 1.1.1.1", "1.1.1.1"),
            (2, "6.6.6.6, 1.1.1.1, 2.2.2.2", "1.1.1.1"),
            (2, "1.1.1.1", "1.1.1.1"),
            (1, "", "9.9.9.9"),
            (1, ",, ,", "9.9.9.9"),
            (1, "1.1.1.1:5000", "1.1.1.1"),
            (1, "[2001:db8::1]:5000", "2001:db8::/64"),
            (1, "2001:db8::2", "2001:db8::/64"),
            (1, "::ffff:1.1.1.1", "1.1.1.1"),
            (1, "nonsense", "unknown"),
            (1, "\xff", "unknown"),
            (1, "[", "unknown"),
        ],
    )
    def test_forwarded_addresses_are_used_from_trusted_proxies_only(self, settings, proxies, forwarded, found):
        settings.TRUSTED_PROXIES = proxies
        request = RequestFactory().get("/", REMOTE_ADDR="9.9.9.9", HTTP_X_FORWARDED_FOR=forwarded)
        assert ratelimit.address_of(request.META) == found


class TestWithoutRedis:
    @pytest.fixture(autouse=True)
    def fresh(self):
        shared.cache_clear()
        yield
        shared.cache_clear()

    @pytest.mark.parametrize("url", ["unix:///nowhere/redis.sock", "redis://127.0.0.1:1", "http://nonsense"])
    def test_requests_are_allowed_logged_and_counted(self, settings, session, caplog, url):
        settings.CACHE_REDIS_URL, settings.RATE_LIMIT_SESSION = url, 2
        with caplog.at_level(logging.WARNING):
            answers = [session.get("/api/v1/me") for _ in range(5)]
        assert {(answer.status_code, *shown(answer)) for answer in answers} == {(200, 2, 2, 0)}
        assert len([record for record in caplog.records if record.name == "config.redis"]) == 1

    def test_a_stalled_redis_is_tried_once(self, settings, session, caplog):
        settings.BROKER_TIMEOUT_SECONDS = 0.1
        with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts connections, never answers
            settings.CACHE_REDIS_URL = f"redis://127.0.0.1:{listener.getsockname()[1]}"
            assert {session.get("/api/v1/me").status_code for _ in range(5)} == {200}
            assert len([record for record in caplog.records if record.name == "config.redis"]) == 1

    def test_the_limit_applies_again_when_redis_is_back(self, settings, session, redis_server):
        redis.Redis.from_url(redis_server).flushall()
        settings.CACHE_REDIS_URL, settings.RATE_LIMIT_SESSION = "unix:///nowhere/redis.sock", 1
        session.get("/api/v1/me")
        server = shared(settings.CACHE_REDIS_URL)
        server.url, server.client = redis_server, None
        assert session.get("/api/v1/me").status_code == 200  # Redis is not tried again yet
        server.away_until -= PAUSE_SECONDS
        assert session.get("/api/v1/me")["X-RateLimit-Remaining"] == "0"
        assert refused(session.get("/api/v1/me"))
