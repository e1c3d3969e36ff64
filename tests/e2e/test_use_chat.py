"""The app of docs/examples/use-chat: the AI SDK's ``useChat`` in a browser, against this service alone."""

import re
import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from tests import node
from tests.e2e.conftest import NOT_NEEDED
from tests.http_server import serving
from tests.stack.plugin import given_services
from tests.stack.process import ROOT
from tests.stack.stack import Client, Stack

pytestmark = [pytest.mark.stack, pytest.mark.timeout(240)]  # the app is built in the first test's time

EXAMPLE = ROOT / "docs" / "examples" / "use-chat"
CHART = '/call draw_chart {"title": "<b>Sales</b>", "series": [3, 1, 4]}\n/say done'


class Files(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    """The service, and the address of the app that was built for it."""
    folder = tmp_path_factory.mktemp("use-chat")
    for file in EXAMPLE.iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    (folder / "node_modules").symlink_to(node.modules(EXAMPLE))
    with (
        serving(partial(Files, directory=folder / "dist")) as url,  # type: ignore[arg-type]
        Stack(**given_services(), environment={"CORS_ALLOWED_ORIGINS": url}, without=NOT_NEEDED) as stack,
    ):
        node.run("npm", "run", "build", folder=folder, packages=EXAMPLE, VITE_API=f"{stack.url}/api/v1")
        yield stack, url


@pytest.fixture
def opened(app: tuple[Stack, str], browser: Browser) -> Iterator[tuple[Client, Page]]:
    """A user's client, and the app, which asks for a token once and begins a chat."""
    stack, url = app
    page, wrong = browser.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.once("dialog", lambda dialog: dialog.accept(stack.token("ada")))
    page.goto(url)
    expect(page.get_by_label("Message")).to_be_visible()
    yield stack.session(), page
    page.close()
    assert wrong == []


def test_the_page_of_the_docs_quotes_the_app() -> None:
    quoted = re.findall(r"^```tsx\n(.*?)^```$", (ROOT / "docs" / "use-chat.md").read_text(), re.MULTILINE | re.DOTALL)
    app = (EXAMPLE / "main.tsx").read_text()
    assert quoted
    assert [code for code in quoted if code not in app] == []


def send(page: Page, message: str) -> None:
    page.get_by_label("Message").fill(message)
    page.get_by_role("button", name="Send").click()


def ended(page: Page, answers: int) -> None:
    """The page shows the cost of so many finished runs."""
    expect(page.get_by_text(" credits", exact=False).and_(page.locator("article > p.note"))).to_have_count(answers)
    expect(page.get_by_role("button", name="Send")).to_be_enabled()


def reload(page: Page) -> None:
    """Load the page again. Its buttons do nothing before it knows whether an answer is being written."""
    with page.expect_response(re.compile("/stream$")):
        page.reload()


def newest(client: Client) -> dict[str, Any]:
    (run,) = client.get("/runs?limit=1").json()["items"]
    whole: dict[str, Any] = client.get(f"/runs/{run['id']}").json()
    return whole


def runs(client: Client) -> list[dict[str, Any]]:
    """All runs of the chat that the newest one is in, those that were replaced too."""
    listed: list[dict[str, Any]] = client.get(f"/chats/{newest(client)['chatId']}/runs?replaced=true").json()["items"]
    return listed


def test_a_person_approves_refuses_and_answers(opened: tuple[Client, Page]) -> None:
    client, page = opened
    send(page, CHART)
    card = page.locator(".card")
    expect(card).to_contain_text("draw_chart wants to spend 12 credits")
    expect(card).to_contain_text("<b>Sales</b>")
    reload(page)
    page.get_by_role("button", name="Approve").click()
    ended(page, 1)
    assert newest(client)["toolInvocations"][0]["status"] == "COMPLETED"
    send(page, CHART)
    page.get_by_role("button", name="Refuse").click()
    ended(page, 2)
    assert newest(client)["toolInvocations"][0]["status"] == "REFUSED"
    send(page, "/ask Which colour?\n/say {result} it is")
    expect(card).to_contain_text("Which colour?")
    reload(page)
    expect(card).to_contain_text("Which colour?")
    page.get_by_label("Answer").fill("blue")
    page.get_by_role("button", name="Answer").click()
    ended(page, 3)
    expect(page.locator(".assistant").last).to_contain_text("blue it is")
    assert len(runs(client)) == 3


def test_an_answer_continues_after_a_reload_and_after_a_restart(
    app: tuple[Stack, str], opened: tuple[Client, Page]
) -> None:
    client, page = opened
    send(page, "/stream 80 100")  # longer than a reload takes on a busy machine
    expect(page.locator(".assistant p").first).not_to_be_empty()
    reload(page)
    expect(page.locator(".assistant p").first).not_to_be_empty()
    assert newest(client)["status"] == "running"
    app[0].restart("web")
    ended(page, 1)
    assert page.locator(".assistant div p").all_inner_texts() == [newest(client)["answer"]]
    assert len(runs(client)) == 1


def test_a_message_that_did_not_arrive_is_sent_again(opened: tuple[Client, Page]) -> None:
    client, page = opened
    page.route("**/ai-sdk/chat", lambda route: route.abort(), times=1)
    send(page, "/say heard")
    ended(page, 1)
    expect(page.locator("article p")).to_contain_text(["/say heard", "heard"])
    assert len(runs(client)) == 1


def test_a_person_regenerates_edits_and_stops(opened: tuple[Client, Page]) -> None:
    client, page = opened
    send(page, "/say one")
    ended(page, 1)
    send(page, "/say two")
    ended(page, 2)
    page.get_by_role("button", name="Regenerate").click()
    ended(page, 2)
    page.once("dialog", lambda dialog: dialog.accept("/say edited"))
    page.get_by_role("button", name="Edit").first.click()
    expect(page.locator(".assistant div p")).to_have_text(["edited"])
    ended(page, 1)
    assert [bool(run["replacedBy"]) for run in runs(client)] == [False, True, True, True]
    send(page, "/stream 500 40")
    expect(page.locator(".assistant").nth(1).locator("p").first).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    assert newest(client)["status"] == "cancelled"
    reload(page)
    expect(page.locator(".user p")).to_have_text(["/say edited", "/stream 500 40"])
    send(page, "/stream 500 40")
    expect(page.locator(".assistant").nth(2).locator("p").first).not_to_be_empty()
    page.once("dialog", lambda dialog: dialog.accept("/say at once"))
    page.get_by_role("button", name="Edit").first.click()
    expect(page.locator(".assistant div p")).to_have_text(["at once"])
