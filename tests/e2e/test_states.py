"""Each state and each errorCode of a run, over HTTP with real worker processes."""

from collections.abc import Iterator

import pytest
import requests

from tests.driver import Driver
from tests.e2e.conftest import NOT_NEEDED
from tests.stack.plugin import given_services
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

# The limits are seconds apart, so that the intended limit is reached first even on a busy machine.
LIMITS = {
    "RUN_TURN_LIMIT": "4",
    "runs.engine.loop.RUN_CALLS_MAX": "10",
    "MODEL_TIMEOUT_SECONDS": "6",
    "RUN_TIMEOUT_SECONDS": "8",
    "WAITPOINT_EXPIRY_SECONDS": "8",
    "TOOL_TIMEOUT_SECONDS": "2",
}
FAILING = {
    "MODEL_ERROR": "/fail out of order",
    "MODEL_TIMEOUT": "/wait 600",
    "TURN_LIMIT_EXCEEDED": "\n".join(['/call calculate {"expression": "1"}', "/say on"] * 5),
    "CALL_LIMIT_EXCEEDED": "\n".join(['/call calculate {"expression": "1"}'] * 11),
    "RUN_TIMEOUT": "\n".join(["/wait 3", '/call calculate {"expression": "1"}'] * 3),
    "WAITPOINT_EXPIRED": "/ask Anyone?",
}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack(**given_services(), environment=LIMITS, without=NOT_NEEDED) as running:
        yield running


@pytest.fixture(params=["session", "public"])
def driver(stack: Stack, request: pytest.FixtureRequest) -> Driver:
    return Driver(getattr(stack, request.param)("ada"))


def code_of(run: dict) -> tuple[str, str | None]:
    return run["status"], run["errorCode"]


def test_completed(driver: Driver) -> None:
    run = driver.finish("Hello")
    assert code_of(run) == ("completed", None)
    assert driver.content(run)


def test_an_approved_call_completes(driver: Driver) -> None:
    run = driver.ask('/call draw_chart {"title": "T", "series": [3, 1, 4]}\n/say done')
    driver.respond(run, kind="CREDIT_APPROVAL", approved=True)
    run = driver.wait(run["id"])
    assert code_of(run) == ("completed", None)
    (call,) = run["toolInvocations"]
    assert (call["status"], call["creditUsed"]) == ("COMPLETED", 12)
    file = requests.get(call["resultUrls"][0], timeout=10)
    assert file.status_code == 200
    assert file.headers["Content-Type"].startswith("image/svg+xml")
    assert file.headers["X-Content-Type-Options"] == "nosniff"
    assert file.headers["Content-Disposition"].startswith("attachment")


def test_a_rejected_call_completes(driver: Driver) -> None:
    run = driver.ask('/call draw_chart {"title": "T", "series": [1]}\n/say done')
    driver.respond(run, kind="CREDIT_APPROVAL", approved=False)
    run = driver.wait(run["id"])
    assert code_of(run) == ("completed", None)
    assert run["toolInvocations"][0]["status"] == "REFUSED"


def test_clarified(driver: Driver) -> None:
    run = driver.ask("/ask Which?\n/say {result} it is")
    driver.respond(run, kind="CLARIFICATION", answer="blue")
    assert driver.content(driver.wait(run["id"])) == "blue it is"


def test_cancelled_while_running(driver: Driver) -> None:
    run = driver.start("/wait 600")
    driver.wait(run["id"], "running")
    assert driver.cancel(run["id"])["cancelRequestedAt"]
    assert code_of(driver.wait(run["id"])) == ("cancelled", None)


def test_cancelled_while_waiting(driver: Driver) -> None:
    run = driver.ask("/ask Which?")
    assert code_of(driver.cancel(run["id"])) == ("cancelled", None)


def test_cancelled_while_queued(driver: Driver) -> None:
    first = driver.ask("/ask Which?")
    queued = driver.start("later", first["chatId"], onActiveRun="enqueue")
    assert driver.cancel(queued["id"])["status"] == "cancelled"
    driver.cancel(first["id"])


def test_failed(stack: Stack) -> None:
    # The runs execute in parallel, because most of them last until their limit.
    session, public = Driver(stack.session()), Driver(stack.public())
    started = {code: session.start(message)["id"] for code, message in FAILING.items()}
    for code, run_id in started.items():
        for driver in (session, public):
            run = driver.wait(run_id)
            assert code_of(run) == ("failed", code)
            assert run["errorMessage"]
            assert run["pendingWaitpoint"] is None


def test_failed_by_its_budget(driver: Driver) -> None:
    run = driver.finish('/usage 1000 0\n/call calculate {"expression": "1"}\n/say no', maxCredits=0.5)
    assert code_of(run) == ("failed", "BUDGET_EXCEEDED")


def test_failed_for_lack_of_credits(stack: Stack) -> None:
    driver = Driver(stack.session("poor"))
    # The provider reports more than it was allowed, so that all that is held is charged.
    runs = (driver.finish("/usage 0 100000\n/say no") for _ in range(50))
    run = next(run for run in runs if run["status"] != "completed")
    assert code_of(run) == ("failed", "INSUFFICIENT_CREDITS")
    assert code_of(driver.finish("Hello")) == ("failed", "INSUFFICIENT_CREDITS")
    stack.manage("grant_credits", "poor", "100", "--reason", "a test")
    assert driver.finish("Hello")["status"] == "completed"


def test_tool_timeout(stack: Stack, silent_server: str) -> None:
    run = Driver(stack.session()).finish(f'/call web_fetch {{"url": "{silent_server}"}}\n/say on')
    assert run["status"] == "completed"
    assert run["toolInvocations"][0]["errorCode"] == "TOOL_TIMEOUT"


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Accepts connections and never answers."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/"
