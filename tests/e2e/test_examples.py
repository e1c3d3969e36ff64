"""The chat apps of docs/examples: one in a terminal, one in a browser, whose page has another origin."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.e2e.conftest import NOT_NEEDED
from tests.http_server import serving
from tests.stack.plugin import given_services
from tests.stack.process import ROOT
from tests.stack.stack import Client, Stack

pytestmark = pytest.mark.stack

EXAMPLES = ROOT / "docs" / "examples"
CHART = '/call draw_chart {"title": "<b>Sales</b>", "series": [3, 1, 4]}'
LINES_MAX = 80


@pytest.fixture(scope="module")
def app() -> Iterator[tuple[str, Any]]:
    """The address of the browser's app, and its handler, which is given the address of the API."""

    class App(BaseHTTPRequestHandler):
        api = ""

        def do_GET(self) -> None:
            name = "client_tool.html" if "client_tool" in self.path else "chat.html"
            page = (EXAMPLES / name).read_text().replace("http://127.0.0.1:8000/api/v1", self.api)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *args: Any) -> None:
            pass

    with serving(App) as url:
        yield url, App


@pytest.fixture(scope="module")
def stack(app: tuple[str, Any]) -> Iterator[Stack]:
    url, handler = app
    with Stack(**given_services(), environment={"CORS_ALLOWED_ORIGINS": url}, without=NOT_NEEDED) as running:
        handler.api = f"{running.url}/api/v1"
        yield running


@pytest.fixture
def open_app(stack: Stack, app: tuple[str, Any], browser: Browser) -> Iterator[Callable[[], Page]]:
    """Opens the app. Its user is asked for a token once."""
    page, wrong, asked = browser.new_page(), list[str](), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))

    def opened() -> Page:
        page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept(stack.token("ada"))))
        page.goto(app[0])
        expect(page.get_by_label("Message")).to_be_visible()
        return page

    yield opened
    page.close()
    assert (wrong, len(asked)) == ([], 1)


def newest(client: Client) -> dict[str, Any]:
    (run,) = client.get("/runs?limit=1").json()["items"]
    whole: dict[str, Any] = client.get(f"/runs/{run['id']}").json()
    return whole


def send(page: Page, message: str) -> None:
    page.get_by_label("Message").fill(message)
    page.get_by_role("button", name="Send").click()


def test_the_apps_are_short() -> None:
    assert len((EXAMPLES / "chat.py").read_text().splitlines()) <= LINES_MAX
    (script,) = re.findall(r"<script[^>]*>\n(.*?)</script>", (EXAMPLES / "chat.html").read_text(), re.DOTALL)
    assert len(script.splitlines()) <= LINES_MAX


def test_a_person_chats_in_a_terminal(stack: Stack) -> None:
    client = stack.public()
    typed = [CHART, "yes", CHART, "too dear", "/ask Which colour?", "blue", "/say hello", "/fail", ""]
    said = subprocess.run(
        [sys.executable, "chat.py"],
        cwd=EXAMPLES,
        env={"API": client.base, "TOKEN": client.credential},
        input="\n".join([*typed, ""]),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (said.returncode, said.stderr) == (0, "")
    failed, hello, asked, refused, approved = client.get("/runs?limit=5").json()["items"]
    assert [run["status"] for run in (failed, hello, asked, refused, approved)] == ["failed", *["completed"] * 4]
    assert len({run["chatId"] for run in (failed, approved)}) == 1
    for part in (
        'draw_chart may cost 12 credits: {"title": "<b>Sales</b>", "series": [3, 1, 4]}',
        "Which colour?",
        f"hello\n[completed, {hello['totalCreditsUsed']} credits]",
        f"[{failed['errorMessage']}, ",
        f"[completed, {approved['totalCreditsUsed']} credits]",
    ):
        assert part in said.stdout
    calls = [client.get(f"/runs/{run['id']}").json()["toolInvocations"][0] for run in (approved, refused, asked)]
    assert [call["status"] for call in calls] == ["COMPLETED", "REFUSED", "COMPLETED"]
    assert "blue" in calls[2]["result"]


def test_the_terminal_shows_all_of_an_answer_though_the_server_restarts(stack: Stack) -> None:
    client = stack.session()
    with subprocess.Popen(
        [sys.executable, "chat.py"],
        cwd=EXAMPLES,
        env={"API": client.base, "TOKEN": client.credential},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as app:
        assert app.stdin is not None
        assert app.stdout is not None
        app.stdin.write(b"/stream 100 50\n\n")
        app.stdin.flush()
        said = app.stdout.read(len("you: ") + 20)
        stack.restart("web")
        said += app.stdout.read()
    run = newest(client)
    assert run["answer"]
    assert f"you: {run['answer']}\n[completed, {run['totalCreditsUsed']} credits]\n" in said.decode()


def test_a_person_approves_refuses_and_answers_in_a_browser(stack: Stack, open_app: Callable[[], Page]) -> None:
    client, page = stack.session(), open_app()
    send(page, CHART)
    expect(page.get_by_text("draw_chart may cost 12 credits")).to_contain_text("<b>Sales</b>")
    page.get_by_role("button", name="Approve").click()
    expect(page.get_by_text("completed, ")).to_have_count(1)
    run = newest(client)
    assert run["toolInvocations"][0]["status"] == "COMPLETED"
    assert f"completed, {run['totalCreditsUsed']} credits" in page.inner_text("main")
    expect(page.get_by_role("link", name="chart.svg")).to_have_attribute(
        "href", run["toolInvocations"][0]["resultUrls"][0]
    )
    send(page, CHART)
    page.get_by_label("Reply").fill("too dear")
    page.get_by_label("Reply").press("Enter")  # never an approval
    expect(page.get_by_text("completed, ")).to_have_count(2)
    assert newest(client)["toolInvocations"][0]["status"] == "REFUSED"
    send(page, "/ask Which colour?")
    expect(page.locator("form.card")).to_contain_text("Which colour?")
    page.get_by_label("Reply").fill("blue")
    page.get_by_role("button", name="Answer").click()
    expect(page.get_by_text("completed, ")).to_have_count(3)
    expect(page.locator("form.card")).to_have_count(0)
    send(page, "/fail")
    expect(page.locator("p.note")).to_have_count(5)
    expect(page.locator("p.note").last).to_contain_text(f"{newest(client)['errorMessage']}, ")


def test_a_reload_keeps_the_chat_its_question_and_its_answer(stack: Stack, open_app: Callable[[], Page]) -> None:
    client, page = stack.session(), open_app()
    send(page, "/say one")
    expect(page.get_by_text("completed, ")).to_have_count(1)
    send(page, CHART)
    expect(page.locator("form.card")).to_be_visible()
    page.reload()
    expect(page.locator("form.card")).to_contain_text("<b>Sales</b>")
    expect(page.locator("p.assistant")).to_have_text("one")
    expect(page.get_by_label("Message")).to_be_hidden()
    page.get_by_role("button", name="Approve").click()
    expect(page.get_by_label("Message")).to_be_visible()
    send(page, "/stream 100 30")
    expect(page.locator("p.agent").last).not_to_be_empty()
    page.reload()
    expect(page.get_by_text("completed, ")).to_have_count(1)
    expect(page.locator("p.agent")).to_have_text(newest(client)["answer"])
    expect(page.locator("p.user")).to_have_count(3)


def test_a_wrong_token_is_told(app: tuple[str, Any], stack: Stack, browser: Browser) -> None:
    page = browser.new_page()
    page.on("dialog", lambda dialog: dialog.accept("wrong"))
    page.goto(app[0])
    expect(page.locator("p.note")).to_contain_text("token")
    page.close()


def test_an_origin_that_is_not_allowed_is_told(app: tuple[str, Any], stack: Stack, browser: Browser) -> None:
    page = browser.new_page()
    page.on("dialog", lambda dialog: dialog.accept(stack.token("ada")))
    page.goto(app[0].replace("127.0.0.1", "localhost"))
    expect(page.locator("p.note")).to_contain_text("CORS_ALLOWED_ORIGINS=http://localhost")
    page.close()


def test_a_wait_for_credits_is_no_approval(stack: Stack, open_app: Callable[[], Page]) -> None:
    client = stack.session()
    chat = client.post("/chats").json()["id"]
    body = {"message": '/usage 1000 0\n/call calculate {"expression": "1"}\n/say on', "maxCredits": 0.5}
    page = open_app()
    page.evaluate("chat => sessionStorage.setItem('chat', chat)", chat)
    client.post(f"/chats/{chat}/runs", body | {"onCreditsExhausted": "wait"})
    page.reload()
    expect(page.locator("form.card")).to_contain_text("The next step needs")
    page.get_by_role("button", name="End the run").click()
    expect(page.locator("p.note").last).to_contain_text("credits")
    assert newest(client)["errorCode"] == "BUDGET_EXCEEDED"


def test_the_page_executes_a_tool_of_its_own(stack: Stack, app: tuple[str, Any], browser: Browser) -> None:
    page = browser.new_page()
    given = {"Session token": stack.token("ada"), "Which?": "green"}
    page.add_init_script(f"window.prompt = (text) => ({json.dumps(given)})[text]")
    page.goto(f"{app[0]}/client_tool.html")
    page.get_by_label("Message").fill('/call pick_colour {"question": "Which?"}\n/say It is {result}.')
    page.get_by_role("button", name="Send").click()
    expect(page.get_by_text("It is green.")).to_be_visible()
    page.close()
