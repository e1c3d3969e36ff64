"""The playground in a browser: the message box, the list of chats, and what the options of a run send."""

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.playground import open_tab, said, say, sign_in, wait_for
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


@pytest.mark.parametrize("page", ["400"], indirect=True)
def test_enter_says_that_a_file_was_refused(service: Stack, page: Page) -> None:
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


@pytest.mark.parametrize("page", ["ERR_INTERNET_DISCONNECTED"], indirect=True)
def test_a_lost_connection_is_told(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    page.context.set_offline(True)
    expect(page.locator("#offline")).to_be_visible()
    page.context.set_offline(False)
    expect(page.locator("#offline")).to_be_hidden()


# With text that arrives before the page gets the event of the scroll.
SCROLL_UP = """async () => {
    const loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
    const { atEnd } = await import(loaded.find((name) => name.includes("/playground/dom.")));
    document.getElementById("scroll").scrollTop = 0;
    atEnd();
}"""


def test_the_newest_is_one_click_away(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    said(page, "\n".join(f"/say {number}\n/say ---" for number in range(60)))
    expect(page.locator("#newest")).to_be_hidden()
    page.evaluate(SCROLL_UP)
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
    service.session("cleo").post("/webhooks", {"url": "http://127.0.0.1:9/"})
    sign_in(page, service.token("cleo"))
    open_tab(page, "Webhooks")
    page.get_by_role("button", name="Send a test event").click()
    expect(page.locator("#show-webhooks li")).to_contain_text("webhook.test")


# --- the options of a run -------------------------------------------------------------------------------------------


def sent_by(page: Page, message: str) -> Any:
    """The body of the run that the message starts."""
    with page.expect_request(lambda asked: asked.method == "POST" and asked.url.endswith("/runs")) as sent:
        say(page, message)
    return sent.value.post_data_json


def regenerated(page: Page, button: Locator) -> Any:
    """The body of the run that the button starts, once that run is completed. Until the run has started, the page shows
    the one that it replaces, and keeps no options.
    """
    with page.expect_request(lambda asked: asked.method == "POST" and asked.url.endswith("/runs")) as sent:
        button.click()
    started = sent.value.response()
    assert started is not None
    open_tab(page, "Timeline")
    expect(page.locator("#show-timeline")).to_contain_text(started.json()["id"])
    wait_for(page, "completed")
    return sent.value.post_data_json


def test_the_options_are_sent(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    page.select_option("#model", "demo")
    page.locator("#options summary").click()
    page.get_by_label("Budget of the run").fill("20")
    page.get_by_label("Ask before a call over").fill("0.05")
    for tool in page.locator("#tools input:not([value=calculate])").all():
        tool.uncheck()
    body = sent_by(page, '/call calculate {"expression": "1+1"}')
    options = {"model": "demo", "tools": ["calculate"], "maxCredits": 20, "creditApprovalThreshold": 0.05}
    assert body == {"message": body["message"], **options}
    expect(page.locator(".question")).to_contain_text("0.1 credits")


def test_examples_are_in_words_unless_the_model_is_demo(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    with page.expect_request("**/runs") as sent:
        page.get_by_text("Use a tool").click()
    assert sent.value.post_data_json["message"].startswith("/")
    wait_for(page, "completed")
    real = {"name": "gpt", "displayName": "GPT", "provider": "openai", "isDefault": True}
    page.route("**/models?*", lambda asked: asked.fulfill(json={"items": [real], "nextCursor": None}))
    page.goto(f"{service.url}/playground")
    with page.expect_request("**/runs") as sent:
        page.get_by_text("Use a tool").click()
    assert not sent.value.post_data_json["message"].startswith("/")
    wait_for(page, "completed")


def test_an_agent_s_tools_can_be_switched_off(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    tools = page.locator("#tools input")
    everything = tools.evaluate_all("all => all.map(one => one.value)")
    page.select_option("#agent", label="Support")
    assert sorted(tools.evaluate_all("all => all.map(one => one.value)")) == ["ask_user", "calculate"]
    page.locator("#options summary").click()
    page.get_by_label(re.compile("Calculate")).uncheck()
    expect(page.locator("#options summary")).to_have_text("Options (1)")
    assert sent_by(page, "Hello") == {"message": "Hello", "agent": "support", "tools": ["ask_user"]}
    wait_for(page, "completed")
    page.select_option("#agent", label="Writer")
    expect(page.locator("#tools")).to_be_hidden()
    assert sent_by(page, "Hello") == {"message": "Hello", "agent": "writer"}
    wait_for(page, "completed")
    page.select_option("#agent", label="No agent")
    assert tools.evaluate_all("all => all.map(one => one.value)") == everything


def test_examples_follow_the_model_of_the_agent(service: Stack, page: Page) -> None:
    real = {"name": "gpt", "displayName": "GPT", "provider": "openai", "isDefault": True}
    demo = {"name": "demo", "displayName": "Demo", "provider": "demo", "isDefault": False}
    page.route("**/models?*", lambda asked: asked.fulfill(json={"items": [real, demo], "nextCursor": None}))
    sign_in(page, service.token("ada"))
    scripts = page.get_by_text("A calculation; costs 0.1 credits")
    expect(scripts).to_be_hidden()
    page.select_option("#agent", label="Writer")
    expect(scripts).to_be_visible()
    expect(page.locator("#model option").first).to_have_text("Agent’s model: Demo")
    page.select_option("#model", label="GPT")
    expect(scripts).to_be_hidden()


def test_a_reload_keeps_the_options_of_a_run(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    page.select_option("#agent", label="Support")
    page.locator("#options summary").click()
    page.get_by_label("Budget of the run").fill("20")
    page.get_by_label("Ask before a call over").fill("0.05")
    page.get_by_label(re.compile("Ask the user")).uncheck()
    body = sent_by(page, "Hello")
    numbers = {"maxCredits": 20, "creditApprovalThreshold": 0.05}
    assert body == {"message": "Hello", "agent": "support", "tools": ["calculate"], **numbers}
    wait_for(page, "completed")
    page.reload()
    regenerate = page.get_by_role("button", name="Regenerate", exact=True)
    expect(regenerate).to_be_visible()
    open_tab(page, "Code")
    expect(page.locator("#sample")).to_contain_text('"creditApprovalThreshold":0.05')
    again = regenerated(page, regenerate)
    assert again == body | {"replaces": again["replaces"]}
    # Another tab does not know them, and says so.
    page.evaluate("sessionStorage.removeItem('options')")
    page.reload()
    regenerate = page.get_by_role("button", name="Regenerate with the current options").last
    expect(regenerate).to_be_visible()
    expect(page.locator("#show-code")).to_be_hidden()
    open_tab(page, "Code")
    expect(page.locator("#show-code")).to_contain_text("budget and threshold are missing")
    page.locator("#options summary").click()
    page.get_by_label("Budget of the run").fill("30")
    again = regenerated(page, regenerate)
    assert again == {"message": "Hello", "maxCredits": 30, "replaces": again["replaces"]}


def test_the_kept_options_are_bounded_and_end_with_the_sign_out(service: Stack, page: Page) -> None:
    fill = """async () => {
      const {remember} = await import('/static/playground/sent.js');
      for (let at = 0; at < 150; at += 1) remember(`run_${at}`, {message: "not kept", maxCredits: at});
      return sessionStorage.getItem("options");
    }"""
    sign_in(page, service.token("ada"))
    kept = page.evaluate(fill)
    assert kept.count("run_") == 100
    assert "run_149" in kept
    assert "not kept" not in kept
    page.get_by_role("button", name="Sign out").click()
    assert page.evaluate("sessionStorage.getItem('options')") is None


def test_a_wrong_number_is_not_sent(service: Stack, page: Page) -> None:
    sign_in(page, service.token("ada"))
    started: list[str] = []
    page.on("request", lambda asked: started.append(asked.url) if asked.method == "POST" else None)
    page.locator("#options summary").click()
    budget = page.get_by_label("Budget of the run")
    ways = {
        "Send": lambda: page.locator("#send").click(),
        "Enter": lambda: page.press("#message", "Enter"),
        "example": lambda: page.get_by_text("Say hello").click(),
    }
    for way, send in ways.items():
        # What a browser can't read as a number is an empty value to a script.
        budget.fill("")
        budget.press_sequentially("1e")
        page.keyboard.press("Escape")
        expect(budget).to_be_hidden()
        page.fill("#message", way)
        send()
        expect(budget).to_be_focused()
        expect(page.locator("#message")).to_have_value(way)
        assert started == []
    budget.fill("10")
    said(page, "Hello")
