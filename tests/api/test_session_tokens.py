"""Session tokens of an identity provider and of the service itself (docs/api.md)."""

import base64
import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler

import jwt
import pytest
import time_machine
from cryptography.hazmat.primitives import serialization
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from rest_framework.test import APIClient

from config.api import authentication, session_tokens
from config.kernel.errors import Unavailable
from config.local.secrets import secret_from_file, signing_key
from tests import factories
from tests.driver import until
from tests.http_server import serving
from tests.threads import side_by_side

pytestmark = pytest.mark.django_db
User = get_user_model()


def call(token: str | None = None, header: str | None = None, path: str = "/api/v1/me"):
    client = APIClient()
    if token is not None or header is not None:
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {token}" if header is None else header)
    return client.get(path)


def refused(response) -> bool:
    body = response.json()
    return (
        response.status_code == 401
        and body["error"]["code"] == "UNAUTHORIZED"
        and response["WWW-Authenticate"] == "Bearer"
        and isinstance(body["error"]["message"], str)
    )


class TestLocalIssuer:
    def test_a_token_identifies_its_user(self):
        user = factories.UserFactory(username="ada", email="ada@example.com")
        body = call(session_tokens.mint("ada")).json()
        assert body == {
            "id": str(user.pk),
            "username": "ada",
            "email": "ada@example.com",
            "createdAt": body["createdAt"],
        }
        assert body["createdAt"].endswith("Z")

    def test_a_user_is_created_by_the_first_token_only(self):
        ids = {call(session_tokens.mint("new")).json()["id"] for _ in range(2)}
        assert len(ids) == 1
        assert not User.objects.get(username="new").has_usable_password()

    def test_one_query_for_a_known_user(self, django_assert_num_queries):
        factories.UserFactory(username="ada")
        token = session_tokens.mint("ada")
        with django_assert_num_queries(1):
            call(token)

    def test_an_inactive_user_is_refused(self):
        factories.UserFactory(username="gone", is_active=False)
        assert refused(call(session_tokens.mint("gone")))

    def test_a_token_expires_after_the_leeway(self):
        token = session_tokens.mint("ada", hours=1)
        now = time.time()
        with time_machine.travel(now + 3600 + 25, tick=False):
            assert call(token).status_code == 200
        with time_machine.travel(now + 3600 + 35, tick=False):
            assert refused(call(token))

    def test_the_key_file_is_created_once_and_is_private(self, settings, tmp_path):
        path = tmp_path / "deep" / "key.pem"
        with ThreadPoolExecutor(8) as pool:
            (settings.SESSION_KEY,) = set(pool.map(lambda _: secret_from_file(path, signing_key), range(8)))
        assert path.stat().st_mode & 0o777 == 0o600
        assert session_tokens.verify(session_tokens.mint("ada"))["sub"] == "ada"

    def test_another_installation_s_token_is_refused(self, settings):
        token = session_tokens.mint("ada")
        settings.SESSION_KEY = signing_key()
        assert refused(call(token))

    def test_the_public_key_is_not_accepted_as_a_shared_secret(self, settings):
        public = session_tokens.local_key(settings.SESSION_KEY).key
        pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        claims = jwt.decode(session_tokens.mint("ada"), options={"verify_signature": False})
        parts = [
            base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=")
            for part in ({"alg": "HS256", "typ": "JWT"}, claims)
        ]
        signer = jwt.get_algorithm_by_name("HS256")
        signature = base64.urlsafe_b64encode(signer.sign(b".".join(parts), pem)).rstrip(b"=")
        assert refused(call(b".".join([*parts, signature]).decode()))

    def test_an_unsigned_token_is_refused(self):
        claims = jwt.decode(session_tokens.mint("ada"), options={"verify_signature": False})
        assert refused(call(jwt.encode(claims, None, algorithm="none")))

    @pytest.mark.parametrize(
        "header",
        [
            "",
            "Bearer",
            "Bearer ",
            "Bearer a b",
            "Basic YTpi",
            "Bearer \xff\xfe",
            "Bearer ключ",
            "Bearer one, Bearer two",
            "Bearer " + "a" * 20_000,
            "Bearer ...",
            "Bearer a.b.c",
            "Bearer eyJhbGciOiJFZERTQSJ9.e30.",
            "Bearer " + base64.urlsafe_b64encode(b"[" * 5000).decode().rstrip("=") + ".e30.AAAA",
            "Bearer " + base64.urlsafe_b64encode(b'{"alg":"EdDSA","kid":{}}').decode().rstrip("=") + ".e30.AAAA",
            "Bearer " + base64.urlsafe_b64encode(b'{"alg":["EdDSA"]}').decode().rstrip("=") + ".e30.AAAA",
            "Token x",
        ],
    )
    def test_garbage_is_refused(self, header):
        assert refused(call(header=header))

    def test_no_header_is_refused(self):
        assert refused(call())

    def test_the_scheme_s_case_does_not_matter(self):
        assert call(header=f"bearer  {session_tokens.mint('ada')}").status_code == 200

    def test_two_authorization_headers_are_refused(self):
        # A WSGI server joins the two headers with a comma.
        token = session_tokens.mint("ada")
        assert refused(call(header=f"Bearer {token},Bearer {token}"))

    def test_api_keys_and_session_tokens_are_not_interchangeable(self, user):
        key = factories.public_client(user)
        assert key.get("/api/public/v1/key").status_code == 200
        assert refused(key.get("/api/v1/me"))
        assert refused(call(session_tokens.mint("ada"), path="/api/public/v1/key"))


class TestIdentityProvider:
    @pytest.mark.parametrize("kid", ["r1", "e1", "o1"])
    def test_each_algorithm_is_accepted(self, provider, kid):
        response = call(provider.token(kid, email="ada@example.com"))
        assert response.status_code == 200
        assert (response.json()["username"], response.json()["email"]) == ("auth0|ada", "ada@example.com")

    def test_keys_are_fetched_once(self, provider):
        for kid in ("r1", "e1", "o1", "r1"):
            assert call(provider.token(kid)).status_code == 200
        assert provider.fetches == 1

    @pytest.mark.parametrize("claim", session_tokens.REQUIRED_CLAIMS)
    def test_each_claim_is_required(self, provider, claim):
        assert refused(call(provider.token("r1", **{claim: None})))

    @pytest.mark.parametrize(
        "changes",
        [
            {"exp": 1},
            {"exp": "soon"},
            {"exp": [1]},
            {"iat": 4_000_000_000},
            {"nbf": 4_000_000_000},
            {"aud": "others"},
            {"aud": ["others"]},
            {"aud": 5},
            {"iss": "https://evil.example.com/"},
            {"iss": session_tokens.LOCAL_ISSUER},
            {"sub": ""},
            {"sub": 7},
        ],
        ids=str,
    )
    def test_wrong_claims_are_refused(self, provider, changes):
        assert refused(call(provider.token("r1", **changes)))

    def test_a_list_of_audiences_with_the_expected_one_is_accepted(self, provider):
        assert call(provider.token("r1", aud=["others", "agents"])).status_code == 200

    def test_the_service_s_own_tokens_are_refused(self, provider):
        assert refused(call(session_tokens.mint("ada")))

    def test_an_algorithm_other_than_the_keys_is_refused(self, provider):
        # The signature of key e1 is valid, but the header names key r1.
        assert refused(call(provider.token("e1", headers={"kid": "r1"})))

    def test_other_algorithms_are_refused_before_any_fetch(self, provider):
        provider.add("r5", "RS512")
        secret = provider.document["keys"][0]["n"].encode()
        for token in (
            provider.token("r5"),
            jwt.encode(provider.claims(), secret, algorithm="HS256", headers={"kid": "r1"}),
            jwt.encode(provider.claims(), None, algorithm="none", headers={"kid": "r1"}),
        ):
            assert refused(call(token))
        assert provider.fetches == 0

    def test_a_symmetric_or_encryption_key_of_the_provider_is_not_used(self, provider):
        provider.add("enc", "RS256", use="enc")
        provider.document["keys"].append({"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0", "kid": "oct"})
        assert call(provider.token("r1")).status_code == 200
        assert refused(call(provider.token("enc")))

    def test_an_unknown_key_id_causes_a_fetch(self, provider):
        assert call(provider.token("r1")).status_code == 200
        provider.add("r2", "RS256")
        with time_passed(provider, 61):
            assert call(provider.token("r2")).status_code == 200
        assert provider.fetches == 2

    def test_a_withdrawn_key_is_no_longer_accepted(self, provider):
        token = provider.token("r1")
        assert call(token).status_code == 200
        provider.remove("r1")
        assert call(token).status_code == 200
        with time_passed(provider, session_tokens.SESSION_JWKS_CACHE_SECONDS + 1):
            assert refused(call(token))

    def test_many_unknown_keys_cause_one_fetch(self, provider):
        assert call(provider.token("r1")).status_code == 200
        storm = [provider.token("r1", headers={"kid": f"made-up-{n}"}) for n in range(20)]
        with time_passed(provider, 61):
            with ThreadPoolExecutor(20) as pool:
                outcomes = list(pool.map(outcome, storm))
            assert set(outcomes) == {"AuthenticationFailed"}
            assert provider.fetches == 2
            assert outcome(provider.token("r1", headers={"kid": "another"})) == "AuthenticationFailed"
            assert provider.fetches == 2

    def test_known_keys_do_not_wait_for_a_fetch(self, provider):
        good, unknown = provider.token("r1"), provider.token("r1", headers={"kid": "x"})
        assert outcome(good) == "auth0|ada"
        with time_passed(provider, 61):
            provider.delay.clear()  # the provider hangs
            asking = threading.Thread(target=outcome, args=(unknown,))
            asking.start()
            assert outcome(good) == "auth0|ada"
            assert asking.is_alive()
            provider.delay.set()
            asking.join()

    def test_an_unreachable_provider_has_no_effect_while_keys_are_cached(self, provider):
        token = provider.token("r1")
        assert call(token).status_code == 200
        provider.close()
        with time_passed(provider, session_tokens.SESSION_JWKS_CACHE_SECONDS * 2):
            assert call(token).status_code == 200
            assert refused(call(provider.token("r1", headers={"kid": "x"})))

    @pytest.mark.parametrize(
        "document",
        [
            *({}, [], "x", {"keys": []}, {"keys": "x"}, {"keys": [{"kty": "?"}]}),
            *({"keys": [{"kty": "oct"}]}, {"keys": [{"kty": "RSA", "alg": "none"}]}),
        ],
        ids=str,
    )
    def test_an_invalid_key_document_has_no_effect_while_keys_are_cached(self, provider, document):
        token = provider.token("r1")
        assert call(token).status_code == 200
        provider.document = document
        with time_passed(provider, session_tokens.SESSION_JWKS_CACHE_SECONDS * 2):
            assert call(token).status_code == 200

    def test_an_unreachable_provider_without_cached_keys_is_unavailable(self, provider):
        token = provider.token("r1")
        provider.close()
        response = call(token)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "UNAVAILABLE")

    def test_a_hanging_provider_causes_one_timeout(self, provider, monkeypatch):
        monkeypatch.setattr("config.api.session_tokens.SESSION_JWKS_TIMEOUT_SECONDS", 0.2)
        monkeypatch.setattr(session_tokens, "COLD_RETRY_SECONDS", 0.01)
        provider.delay.clear()
        tokens = [provider.token("r1")] * 16
        with ThreadPoolExecutor(16) as pool:
            assert set(pool.map(outcome, tokens)) == {"Unavailable"}
        assert provider.fetches == 1

    def test_only_the_first_fetch_of_a_hanging_provider_is_waited_for(self, provider, monkeypatch):
        monkeypatch.setattr("config.api.session_tokens.SESSION_JWKS_TIMEOUT_SECONDS", 0.2)
        provider.delay.clear()
        token = provider.token("r1")
        assert outcome(token) == "Unavailable"
        monkeypatch.setattr("config.api.session_tokens.SESSION_JWKS_TIMEOUT_SECONDS", 30)
        answer = call(token)  # the test ends in time because no fetch is waited for
        assert (answer.status_code, answer["Retry-After"]) == (503, "2")
        assert provider.fetches == 1  # and none is made so soon
        monkeypatch.setattr(session_tokens, "COLD_RETRY_SECONDS", 0)
        for _ in range(3):
            assert outcome(token) == "Unavailable"
        until(lambda: provider.fetches == 2)
        provider.delay.set()
        until(lambda: outcome(token) == "auth0|ada")
        assert provider.fetches == 2

    def test_a_provider_that_sends_slowly_has_one_time_limit(self, monkeypatch):
        ended = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
                with contextlib.suppress(OSError):
                    for _ in range(200):
                        self.wfile.write(b"x")
                        time.sleep(0.05)
                    ended.set()

        monkeypatch.setattr("config.api.session_tokens.SESSION_JWKS_TIMEOUT_SECONDS", 0.3)
        with serving(Handler) as url:
            with pytest.raises(Unavailable):
                session_tokens.Jwks(url).key_for("r1")
            assert not ended.is_set()

    def test_a_token_need_not_name_the_only_key(self, provider):
        provider.remove("e1")
        provider.remove("o1")
        assert call(provider.token("r1", headers={})).status_code == 200

    @pytest.mark.parametrize("subject", ["x" * 151, "a\0b", "line\nbreak", " padded ", "𝔘" * 151])
    def test_a_subject_that_is_not_a_valid_username_gets_a_stable_username(self, provider, subject):
        names = {call(provider.token("r1", sub=subject)).json()["username"] for _ in range(2)}
        assert len(names) == 1
        assert names.pop().startswith("sub-")

    def test_different_subjects_are_different_users(self, provider):
        names = [call(provider.token("r1", sub=subject)).json()["id"] for subject in ("x" * 151, "x" * 152, "x", "X")]
        assert len(set(names)) == 4

    def test_a_subject_that_looks_like_a_digest_is_a_user_of_its_own(self, provider):
        digest = call(provider.token("r1", sub="a\0b")).json()["username"]
        names = [call(provider.token("r1", sub=digest)).json()["username"] for _ in range(2)]
        assert names[0] == names[1] != digest

    @pytest.mark.parametrize("email", ["no address", 5, "a" * 300 + "@example.com", "a\0@example.com", None])
    def test_an_invalid_email_address_is_not_stored(self, provider, email):
        assert call(provider.token("r1", email=email)).json()["email"] == ""

    def test_the_email_address_is_updated_from_the_token(self, provider):
        call(provider.token("r1", email="old@example.com"))
        assert call(provider.token("r1", email="new@example.com")).json()["email"] == "new@example.com"
        assert call(provider.token("r1")).json()["email"] == "new@example.com"


@pytest.mark.parametrize("rank", ["is_staff", "is_superuser"])
def test_a_token_never_stands_for_a_staff_account(rank):
    person = factories.UserFactory(username="boss")
    assert call(session_tokens.mint("boss")).status_code == 200
    setattr(person, rank, True)
    person.save()
    answer = call(session_tokens.mint("boss"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "UNAUTHORIZED")
    with pytest.raises(CommandError, match="staff"):
        call_command("session_token", "boss")


def test_a_credential_of_another_surface_is_named(client):
    user = factories.UserFactory()
    key, server_key = (
        each._credentials["HTTP_AUTHORIZATION"] for each in (factories.public_client(user), factories.server_client())
    )
    token = f"Bearer {session_tokens.mint(user.username)}"
    own = "This is a session token: it is for a user's own requests to /api/v1."
    for path, header, message in (
        ("/api/v1/me", key, "This is an API key: it is for /api/public/v1."),
        ("/api/v1/me", server_key, "This is a server key: it is for session tokens and the credits of users alone."),
        ("/api/public/v1/key", token, own),
        ("/api/v1/users/ada/credits", token, own),
        ("/api/v1/me", "Bearer nothing", "The session token is not valid."),
    ):
        answer = client.get(path, headers={"Authorization": header})
        assert (answer.status_code, answer.json()["error"]["message"]) == (401, message)


@pytest.mark.django_db(transaction=True)
def test_a_hanging_provider_delays_no_request_that_needs_no_key(provider, monkeypatch, client):
    monkeypatch.setattr("config.api.session_tokens.SESSION_JWKS_TIMEOUT_SECONDS", 10)
    key = factories.public_client(factories.UserFactory())
    provider.delay.clear()
    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(call, provider.token("r1", sub=f"user-{number}")) for number in range(16)]
        until(lambda: provider.fetches == 1)
        assert key.get("/api/public/v1/key").status_code == 200
        assert client.get("/livez").status_code == 200
        assert not any(request.done() for request in waiting)
        provider.delay.set()
        assert {request.result().status_code for request in waiting} == {200}
    assert provider.fetches == 1


def test_a_first_request_finds_the_user_that_a_concurrent_request_created(monkeypatch):
    def overtaken(password: None) -> str:
        User.objects.get_or_create(username="twin")
        return "!"

    monkeypatch.setattr(authentication, "make_password", overtaken)  # between the look-up of the user and its creation
    assert call(session_tokens.mint("twin")).status_code == 200
    assert User.objects.filter(username="twin").count() == 1


@pytest.mark.django_db(transaction=True)
def test_concurrent_first_requests_create_one_user():
    token = session_tokens.mint("twin")
    assert {answer.status_code for answer in side_by_side(8, lambda _: call(token))} == {200}
    assert User.objects.filter(username="twin").count() == 1


def outcome(token: str) -> str:
    try:
        return session_tokens.verify(token)["sub"]
    except Exception as error:
        return type(error).__name__


class time_passed:
    """Makes the cached keys older. The cache uses the monotonic clock, which a test cannot set."""

    def __init__(self, provider, seconds: float) -> None:
        self.jwks, self.seconds = session_tokens.jwks(provider.url), seconds

    def __enter__(self) -> None:
        self.jwks.tried_at -= self.seconds
        self.jwks.fetched_at -= self.seconds

    def __exit__(self, *args) -> None:
        pass
