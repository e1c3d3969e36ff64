"""The message box and the list of chats of the playground in a browser."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.driver import until
from tests.playground import WIDE, open_tab, said, say, sign_in, wait_for
from tests.stack.browser import browsing
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

CHART = '/call draw_chart {"title": "Runs", "series": [1, 2]}\n/say {result}'


def test_enter_answers_an_open_question(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    say(page, "/ask Which colour?\n/say {result} it is")
    expect(page.locator(".question")).to_contain_text("Open until")
    page.fill("#message", "Blue")
    expect(page.locator("#send")).to_have_text("Answer")
    page.press("#message", "Enter")
    expect(page.locator(".text").last).to_have_text("Blue it is")
    expect(page.locator("#message")).to_have_value("")
    expect(page.locator(".user")).to_have_count(1)


def test_enter_says_that_a_decision_is_needed(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    say(page, CHART)
    expect(page.locator(".question")).to_be_visible()
    page.fill("#message", "Yes")
    page.press("#message", "Enter")
    expect(page.locator("#composer-note")).to_contain_text("waits for your decision")
    expect(page.locator("#message")).to_have_value("Yes")
    page.get_by_role("button", name="Refuse", exact=True).click()
    wait_for(page, "completed")
    expect(page.locator("#composer-note")).to_be_hidden()
    # A refusal is no error.
    expect(page.locator(".tool .notice")).to_have_count(0)


def test_enter_queues_behind_a_run_that_works(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    say(page, "/stream 500 50")
    expect(page.locator(".text.live")).to_contain_text("fox")
    expect(page.locator("#send")).to_have_text("Queue")
    for message in ("/say second", "/say third"):
        page.fill("#message", message)
        page.press("#message", "Enter")
        expect(page.locator(".user").last).to_have_text(message)
    expect(page.locator(".state .pill")).to_have_text(["Running", "Queued", "Queued"])
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".state .pill")).to_have_text(["Cancelled", "Completed", "Completed"])
    expect(page.locator(".text").last).to_have_text("third")
    expect(page.locator("#send")).to_have_text("Send")
    expect(page.locator("#stop")).to_be_hidden()


def test_enter_says_that_a_file_was_refused(browser: Browser, service: Stack) -> None:
    with browsing(browser, service.url, "/playground", viewport=WIDE, tolerated="400") as page:
        sign_in(page, service.token("ada"))
        page.set_input_files("#file", {"name": "a.exe", "mimeType": "application/x-msdownload", "buffer": b"MZ"})
        expect(page.locator("#files li.broken")).to_contain_text("contentType")
        page.fill("#message", "Read this")
        page.press("#message", "Enter")
        expect(page.locator("#composer-note")).to_contain_text("not accepted")
        expect(page.locator("#message")).to_have_value("Read this")


def test_chats_are_renamed_searched_and_deleted(service: Stack, page: Page) -> None:
    sign_in(page, service.token("cleo"))
    expect(page.locator("#examples button").first).to_be_visible()
    for message in ("Bananas", "Apples"):
        page.get_by_role("button", name="New chat").click()
        said(page, message)
        expect(page.locator("#chat-list a").first).to_contain_text(message)
    expect(page).to_have_title("Apples · Playground · Agent workflow service")
    chats = page.locator("#chat-list")
    chats.get_by_role("button", name="Rename").click()
    page.get_by_label("Title of the chat").fill("Pears <b>")
    page.keyboard.press("Enter")
    expect(chats.locator("a").first).to_contain_text("Pears <b>")
    expect(page).to_have_title(re.compile("Pears <b> · "))
    page.get_by_label("Search the chats by title").fill("BANANA")
    expect(chats.locator("a").locator("visible=true")).to_have_count(1)
    page.get_by_label("Search the chats by title").fill("")
    chats.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Keep").click()
    expect(chats.locator("a")).to_have_count(2)
    chats.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(chats.locator("a")).to_have_count(1)
    assert page.url == f"{service.url}/playground"
    titles = [chat["title"] for chat in service.session("cleo").get("/chats").json()["items"]]
    assert titles == ["Bananas"]


def test_code_has_its_language_and_can_be_copied(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    page.evaluate("navigator.clipboard.writeText = async text => { window.copied = text; }")
    said(page, "/say ```python x\nprint(1)\n```")
    expect(page.locator(".code-head")).to_contain_text("python")
    page.get_by_role("button", name="Copy the code").click()
    page.wait_for_function("window.copied === 'print(1)\\n'")
    assert page.locator(".text [class*=language]").count() == 0


def test_a_lost_connection_is_told(browser: Browser, service: Stack) -> None:
    with browsing(browser, service.url, "/playground", viewport=WIDE, tolerated="ERR_INTERNET_DISCONNECTED") as page:
        sign_in(page, service.token("ada"))
        page.context.set_offline(True)
        expect(page.locator("#offline")).to_be_visible()
        page.context.set_offline(False)
        expect(page.locator("#offline")).to_be_hidden()


def test_the_newest_is_one_click_away(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    said(page, "\n".join(f"/say {number}\n/say ---" for number in range(60)))
    expect(page.locator("#newest")).to_be_hidden()
    # The page follows the last text until it has seen the scroll, so once more if the text came in between.
    up = "document.getElementById('scroll').scrollTop = 0"
    until(lambda: page.evaluate(up) or page.locator("#newest").is_visible())
    page.locator("#newest").click()
    expect(page.locator("#newest")).to_be_hidden()
    expect(page.locator(".state .pill")).to_be_in_viewport()


def test_reasoning_output_and_a_failed_call_are_shown(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    said(page, '/reason It is easy.\n/call calculate {"expression": "six"}\n/say done')
    expect(page.locator(".reasoning p")).to_be_hidden()
    page.locator(".reasoning summary").click()
    expect(page.locator(".reasoning p")).to_have_text("It is easy.")
    expect(page.locator(".tool").get_by_label("Input")).to_have_text('{"expression":"six"}')
    expect(page.locator("#show-timeline")).to_contain_text(re.compile(r"Turn 1 · demo\d+ tokens in, \d+ out.*credits"))
    expect(page.locator("#show-timeline")).not_to_contain_text("pieces of text")
    page.locator("#options summary").click()
    page.get_by_label("Output schema").fill('{"type": "object", "properties": {"n": {"type": "integer"}}}')
    page.keyboard.press("Escape")
    said(page, '/call submit_output {"n": 42}')
    output = page.get_by_label("Output", exact=True)
    expect(output).to_have_text('{\n  "n": 42\n}')
    page.reload()
    expect(output).to_have_text('{\n  "n": 42\n}')


def test_instructions_metadata_and_an_older_version_are_sent(service: Stack, page: Page, tmp_path: Path) -> None:
    sign_in(page, service.token("ada"))
    page.select_option("#agent", label="Support")
    page.locator("#options summary").click()
    page.get_by_label("Version of the agent").select_option("1")
    page.get_by_label("Instructions").fill("Rhyme.")
    metadata = page.get_by_label("Metadata")
    metadata.fill("order")
    page.keyboard.press("Escape")
    page.fill("#message", "Hello")
    page.press("#message", "Enter")
    expect(metadata).to_be_focused()  # it is not name=value
    metadata.fill("order=A=1\ncustomer = c-4")
    expect(page.locator("#options summary")).to_have_text("Options (3)")
    said(page, "Hello")
    run = service.session("ada").get("/runs").json()["items"][0]
    assert run["agent"] == "support@1"
    assert run["metadata"] == {"order": "A=1", "customer": "c-4"}


def test_a_test_event_can_be_sent(service: Stack, page: Page) -> None:
    service.session("dora").post("/webhooks", {"url": "http://127.0.0.1:9/"})
    sign_in(page, service.token("dora"))
    open_tab(page, "Webhooks")
    page.get_by_role("button", name="Send a test event").click()
    expect(page.locator("#show-webhooks li")).to_contain_text("webhook.test")
