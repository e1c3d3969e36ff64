"""The playground in a browser: chats, Markdown, approvals, questions, attachments, options, code, accessibility."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, ViewportSize, expect

from tests.playground import NARROW, WIDE, open_tab, said, say, sign_in, wait_for
from tests.stack.accessibility import serious_problems
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

CHART = '/call draw_chart {"title": "Runs", "series": [1, 2]}\n/say The tool said: {result}'
ASK = '/call ask_user {"question": "Which colour?", "options": ["Blue", "Green"]}\n/say {result} it is'
PRUNE = "from runs.models import RunEvent; RunEvent.objects.all().delete()"
DROP = """([name, text]) => {
  const dropped = new DataTransfer();
  dropped.items.add(new File([text], name, {type: "text/plain"}));
  return dropped;
}"""
HOSTILE = (
    "/say <img src=x onerror=alert(1)> ![picture](http://203.0.113.1/x.png) "
    "[click](javascript:alert(1)) <script>alert(1)</script> [data](data:text/html,x) **fine**"
)

# Marked needs minutes for the first, and its parser fails at the second.
SLOW_TEXTS = ["*a_" * 33_333, "> " * 40_000, "a" * 1_000_000]
UNUSABLE = 5_000  # milliseconds


def test_a_reload_keeps_the_chat(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    said(page, '/say A **bold** word.\n/call calculate {"expression": "6*7"}\n/say It is {result}.')
    said(page, "A second message")
    address = page.url
    assert re.fullmatch(rf"{service.url}/playground/chat_\w+", address)
    page.reload()
    expect(page.locator(".text strong")).to_have_text("bold")
    expect(page.locator(".text").nth(1)).to_have_text("It is 42.")
    card = page.locator("details.tool")
    card.locator("summary").click()
    expect(card.get_by_label("Result")).to_have_text("42")
    expect(page.locator(".user")).to_have_count(2)
    expect(page.locator("#chat-list a[aria-current]")).to_have_attribute("href", address.removeprefix(service.url))
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".user")).to_have_count(0)
    assert page.url == f"{service.url}/playground"
    page.go_back()
    expect(page.locator(".user")).to_have_count(2)
    # The events of a run are deleted before the run is.
    service.manage("shell", "-c", PRUNE)
    page.reload()
    card.locator("summary").click()
    expect(card.get_by_label("Result")).to_have_text("42")
    expect(page.locator(".text").first).to_have_text(re.compile("A bold word.*It is 42", re.DOTALL))


def test_a_long_chat_is_shown_in_pages(service: Stack, page: Page) -> None:
    client = service.session("ada")
    chat = client.post("/chats").json()["id"]
    # The questions of queued runs are on other pages than their answers.
    for number in range(23):
        body = {"message": f"/say Answer {number}", "onActiveRun": "enqueue"}
        last = client.post(f"/chats/{chat}/runs", body).json()["id"]
    service.wait_for(lambda: client.get(f"/runs/{last}").json()["status"] == "completed")
    sign_in(page, service.token("ada"))
    page.goto(f"{service.url}/playground/{chat}")
    page.get_by_role("button", name="Earlier messages").click()
    expect(page.locator(".user")).to_have_text([f"/say Answer {number}" for number in range(23)])
    expect(page.locator(".text")).to_have_text([f"Answer {number}" for number in range(23)])


def test_a_reload_continues_a_run(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    say(page, ASK)
    expect(page.get_by_role("button", name="Green")).to_be_visible()
    page.reload()
    page.get_by_role("button", name="Green").click()
    expect(page.locator(".text").last).to_have_text("Green it is")
    expect(page.locator(".answered")).to_have_text("Which colour? — Green")
    wait_for(page, "completed")


@pytest.mark.parametrize("page", ["401"], indirect=True)
def test_a_revoked_token_leads_to_the_sign_in_and_keeps_the_message(service: Stack, page: Page) -> None:
    client = service.session("ada")
    key = client.post("/api-keys", {"name": "one"}).json()
    sign_in(page, key["secret"])
    said(page, "Hello")
    expect(page.get_by_role("button", name="Regenerate")).to_be_visible()
    address = page.url
    client.delete(f"/api-keys/{key['id']}")
    say(page, "Do not lose me")
    expect(page.locator("#sign-in-problem")).to_contain_text("no longer valid")
    assert page.url == address
    sign_in(page, service.token("ada"))
    expect(page.locator("#message")).to_have_value("Do not lose me")
    expect(page.locator(".user")).to_have_text("Hello")


@pytest.mark.parametrize("page", ["404"], indirect=True)
def test_the_chat_of_another_user_is_not_shown(service: Stack, page: Page) -> None:
    chat = service.session("eve").post("/chats").json()["id"]
    page.goto(f"{service.url}/playground/{chat}")
    sign_in(page, service.token("ada"))
    expect(page.get_by_role("alert").last).to_contain_text("does not exist")


@pytest.mark.parametrize(("size", "surface"), [(WIDE, "session"), (NARROW, "public")], ids=["wide", "narrow"])
def test_a_run_is_shown_and_answered(service: Stack, page: Page, size: ViewportSize, surface: str) -> None:
    page.set_viewport_size(size)
    sign_in(page, service.token("ada") if surface == "session" else service.api_key("ada"))
    page.get_by_text("Ask for approval").click()
    page.get_by_role("button", name="Approve", exact=True).click()
    wait_for(page, "completed")
    expect(page.locator(".tool b")).to_have_text("draw_chart")
    expect(page.locator(".tool img")).to_be_visible()
    expect(page.locator(".text").last).to_have_text("Here it is.")
    say(page, "/ask Which?\n/say {result} it is")
    page.get_by_label("Your answer").fill("blue")
    page.get_by_label("Messages").get_by_role("button", name="Answer").click()
    expect(page.locator(".text").last).to_have_text("blue it is")
    say(page, "/stream 500 50")
    expect(page.locator(".text.live")).to_contain_text("fox")
    page.get_by_role("button", name="Stop").click()
    wait_for(page, "cancelled")
    # The tab keeps the token after a reload and drops it after sign-out.
    page.reload()
    expect(page.locator("#credits")).to_be_visible()
    bounds = page.locator("body").bounding_box()
    assert bounds is not None
    assert bounds["width"] == size["width"]
    page.get_by_role("button", name="Sign out").click()
    expect(page.locator("#sign-in")).to_be_visible()
    page.reload()
    expect(page.locator("#sign-in")).to_be_visible()


@pytest.mark.parametrize("page", ["net::ERR_"], indirect=True)
def test_the_page_continues_after_a_restart_of_the_server(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    say(page, "/stream 60 100")
    expect(page.locator(".text.live")).to_contain_text("fox")
    service.restart("web")
    wait_for(page, "completed")
    assert len(page.locator(".text").last.inner_text().split()) == 60


def test_an_approval_shows_what_would_be_run_and_a_refusal_has_a_reason(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    say(page, CHART)
    card = page.locator(".question")
    expect(card).to_contain_text("Spend up to 12 credits on draw_chart?")
    expect(card.get_by_label("Input of the call")).to_have_text('{"title":"Runs","series":[1,2]}')
    expect(card).to_contain_text("Draws a series of numbers")
    # The keyboard reaches the answer from here, and a key that is typed now spends nothing.
    expect(card).to_be_focused()
    page.get_by_label("Reason of a refusal").fill("Too dear for us")
    page.get_by_role("button", name="Refuse", exact=True).click()
    expect(page.locator(".text").last).to_contain_text("Too dear for us")
    expect(page.locator(".tool .pill")).to_have_text("Refused")
    expect(page.locator(".answered")).to_have_text("Refused: draw_chart for up to 12 credits: Too dear for us")


def test_attachments_regenerate_and_edit(service: Stack, page: Page, tmp_path: Path) -> None:
    sign_in(page, service.token("ada"))
    (tmp_path / "notes.txt").write_text("Some notes")
    with page.expect_file_chooser() as chosen:
        page.get_by_role("button", name="Attach").click()
    chosen.value.set_files(tmp_path / "notes.txt")
    page.dispatch_event("#talk", "drop", {"dataTransfer": page.evaluate_handle(DROP, ["more.md", "More"])})
    expect(page.locator("#files li")).to_have_count(2)
    said(page, "Read this")
    said(page, "And then?")
    page.get_by_role("button", name="Regenerate").first.click()
    expect(page.locator(".said")).to_have_count(1)
    wait_for(page, "completed")
    page.reload()
    expect(page.locator(".attached li")).to_have_text(["notes.txt", "more.md"])
    page.get_by_role("button", name="Edit", exact=True).click()
    expect(page.locator("#message")).to_have_value("Read this")
    page.get_by_role("button", name="Keep them").click()
    expect(page.locator("#message")).to_have_value("")
    page.get_by_role("button", name="Edit", exact=True).click()
    page.get_by_role("button", name="Remove more.md").click()
    say(page, "Read only one")
    expect(page.locator(".said .user")).to_have_text(["Read only one"])
    wait_for(page, "completed")
    http, chat = service.session("ada"), page.url.rsplit("/", 1)[1]
    for query, expected in (
        ("", [("Read only one", 1)]),
        ("?replaced=true", [("Read this", 2), ("And then?", 0), ("Read this", 2), ("Read only one", 1)]),
    ):
        messages = http.get(f"/chats/{chat}/messages{query}").json()["items"]
        asked = [(one["content"], len(one["attachments"])) for one in messages if one["role"] == "user"]
        assert asked == expected


def test_an_edit_replaces_a_run_that_waits(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    say(page, ASK)
    expect(page.locator(".question")).to_be_visible()
    page.get_by_role("button", name="Edit", exact=True).click()
    say(page, "/say No question")
    expect(page.locator(".said .user")).to_have_text(["/say No question"])
    wait_for(page, "completed")
    expect(page.locator(".question")).to_have_count(0)


def test_markdown_of_a_model_is_sanitised(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    said(page, HOSTILE)
    answer = page.locator(".text").last
    expect(answer.locator("strong")).to_have_text("fine")
    expect(answer).to_contain_text("<img src=x onerror=alert(1)>")
    expect(answer.locator("img, script")).to_have_count(0)
    links = answer.locator("a").evaluate_all("all => all.map(one => one.getAttribute('href'))")
    assert links == ["http://203.0.113.1/x.png", None, None]


def test_lists_keep_their_first_number_and_columns_their_alignment(page: Page) -> None:
    render = """async text => {
      const all = (await (await import('/static/playground/markdown.js')).render(text)).querySelectorAll('ol, th, td');
      return [...all].map(one => one.getAttribute('start') || one.align);
    }"""
    assert page.evaluate(render, "3. three\n4. four\n\n|a|b|\n|:-:|-:|\n|1|2|\n") == [
        "3",
        "center",
        "right",
        "center",
        "right",
    ]


@pytest.mark.parametrize("text", SLOW_TEXTS, ids=["slow", "deep", "long"])
def test_a_text_that_is_slow_to_read_as_markdown_is_shown_as_it_is(page: Page, text: str) -> None:
    """Meanwhile the page stays usable."""
    render = """async text => {
      const {render} = await import('/static/playground/markdown.js');
      let last = performance.now(), longest = 0;
      const watch = () => { longest = Math.max(longest, performance.now() - last); last = performance.now(); };
      const watching = setInterval(watch, 10);
      const shown = await render(text);
      watch();
      clearInterval(watching);
      const next = await render("**well**");
      return [shown.textContent, longest, next.querySelector("strong")?.textContent];
    }"""
    shown, longest, following = page.evaluate(render, text)
    assert shown.strip() == text.strip()
    assert longest < UNUSABLE
    assert following == "well"


def test_cells_without_text_are_not_made_by_the_million(page: Page) -> None:
    text = "|a" * 100 + "\n" + "|-" * 100 + "\n" + "x\n" * 40_000
    render = "async text => (await (await import('/static/playground/markdown.js')).render(text)).className"
    assert page.evaluate(render, text) == "plain"


def test_a_result_that_is_no_address_is_shown_as_text(page: Page) -> None:
    show = """async urls => {
      const {showCall, toolCard} = await import('/static/playground/tool.js');
      const card = toolCard();
      showCall(card, {name: "x", status: "COMPLETED", resultUrls: urls});
      return [...card.querySelectorAll('.results > *')].map(one => [one.tagName, one.textContent]);
    }"""
    urls = ["https://x/50%.csv", "https://", "javascript:alert(1)", "https://x/a%20b.csv", "https://x/"]
    texts = [["SPAN", text] for text in urls[:3]]
    assert page.evaluate(show, urls) == [*texts, ["A", "a b.csv"], ["A", "https://x/"]]


def test_no_amount_is_rounded_to_nothing(page: Page) -> None:
    show = """async amounts => {
      const {counted} = await import('/static/playground/dom.js');
      return amounts.map(amount => counted(amount));
    }"""
    assert page.evaluate(show, [0.0004, 0.1 + 0.2, 1]) == ["0.0004 credits", "0.3 credits", "1 credit"]


def test_the_timeline_shows_turns_calls_retries_and_cost(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    said(page, '/call calculate {"expression": "6*7"}\n/flaky 503 1 done')
    panel = page.locator("#show-timeline")
    for text in ("Queued", "Running", "calculate · turn 1, call 1", "Retry 1", "Completed"):
        expect(panel.locator("b").get_by_text(text, exact=True)).to_be_visible()
    # The page reads the run again when it has ended; only then it has a time.
    expect(panel.locator("dt").get_by_text("Time", exact=True)).to_be_visible()
    facts = dict(zip(panel.locator("dt").all_text_contents(), panel.locator("dd").all_text_contents(), strict=True))
    run = service.session("ada").get("/runs").json()["items"][0]
    assert facts["Turns"] == "2"
    assert facts["Calls"] == "1"
    assert facts["Retries"] == "1"
    assert facts["Tokens in"] == f"{run['usage']['inputTokens']:,}"
    assert facts["Cost"].startswith(f"{run['totalCreditsUsed']:g}"[:4])
    open_tab(page, "Credits")
    expect(page.locator("#show-credits .chart rect")).to_have_count(30)
    expect(page.locator("#show-credits")).to_contain_text("Calculate")


def test_the_shown_code_does_what_was_done(service: Stack, page: Page, tmp_path: Path) -> None:
    token = service.api_key("ada")
    sign_in(page, token)
    (tmp_path / "it's notes.txt").write_text("Some notes")
    page.set_input_files("#file", tmp_path / "it's notes.txt")
    say(page, f'{CHART.partition(chr(10))[0]}\n{ASK}, isn\'t it? "$HOME" `id` \\n')
    page.get_by_role("button", name="Approve", exact=True).click()
    page.get_by_role("button", name="Blue").click()
    wait_for(page, "completed")
    client = service.session("ada")
    open_tab(page, "Code")
    node = shutil.which("node")
    programs = {"curl": ["bash"], "Python": [sys.executable, "-"], **({"JavaScript": [node, "-"]} if node else {})}
    for language, program in programs.items():
        page.get_by_role("button", name=language, exact=True).click()
        text = page.locator("#sample").inner_text()
        assert token not in text
        arguments = [*program, "--input-type=module"] if language == "JavaScript" else program
        done = subprocess.run(
            arguments, input=text, cwd=tmp_path, env={"TOKEN": token, "PATH": "/usr/bin:/bin"},
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, ""), text
        assert 'Blue it is, isn\'t it? "$HOME" `id` \\n' in done.stdout
        assert done.stdout.split()[-1] == "completed"
        newest = client.get("/runs").json()["items"][0]
        assert (newest["status"], newest["toolInvocationCount"]) == ("completed", 2)
        message = client.get(f"/messages/{newest['userMessageId']}").json()
        assert [one["fileName"] for one in message["attachments"]] == ["it's notes.txt"]
    page.get_by_label("with my token").check()
    expect(page.locator("#sample")).to_contain_text(token)


def test_the_page_works_with_the_keyboard_and_a_screen_reader(service: Stack, page: Page) -> None:
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the message box")).to_be_focused()
    sign_in(page, service.token("ada"))
    expect(page.locator("#message")).to_be_focused()
    page.keyboard.type("/say Good *morning*")
    page.keyboard.press("Enter")
    wait_for(page, "completed")
    expect(page.get_by_role("status")).to_have_text("The agent answered: Good *morning*")
    page.get_by_role("tab", name="Timeline").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Code")).to_be_focused()
    expect(page.locator("#sample")).to_be_visible()


def test_axe_finds_nothing_serious(service: Stack, page: Page) -> None:
    found: dict[str, list[str]] = {}

    def check(state: str) -> None:
        found[state] = serious_problems(page)
        if page.viewport_size == WIDE:
            page.emulate_media(color_scheme="dark")
            found[f"{state}, dark"] = serious_problems(page, "color-contrast")
            page.emulate_media(color_scheme="light")

    check("signed out")
    sign_in(page, service.token("ada"))
    expect(page.locator("#examples button").first).to_be_visible()
    check("start")
    say(page, CHART)
    expect(page.locator(".question")).to_be_visible()
    check("approval")
    page.get_by_role("button", name="Approve", exact=True).click()
    wait_for(page, "completed")
    said(page, "/reason Well.\n/say # Title\n```python\n1\n```\n/fail It broke.", "failed")
    for tab in ("Timeline", "Code", "Credits", "Events"):
        open_tab(page, tab)
        check(tab)
    page.set_viewport_size(NARROW)
    check("chat, narrow")
    page.locator("#options summary").click()
    check("options, narrow")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Chats", exact=True).click()
    check("chats, narrow")
    page.locator("#chat-list").get_by_role("button", name="Delete").click()
    check("question before a chat is deleted")
    assert page.evaluate("document.documentElement.scrollWidth") == NARROW["width"]
    assert {where: problems for where, problems in found.items() if problems} == {}
