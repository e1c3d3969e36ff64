"""The options of a run in the playground, in a browser: what is sent, what agents change, what a reload keeps."""

import re
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.playground import open_tab, said, say, sign_in, wait_for
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack


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


@pytest.mark.parametrize("way", ["Send", "Enter", "example"])
def test_a_wrong_number_is_not_sent(service: Stack, page: Page, way: str) -> None:
    sign_in(page, service.token("ada"))
    started: list[str] = []
    page.on("request", lambda asked: started.append(asked.url) if asked.method == "POST" else None)
    page.locator("#options summary").click()
    budget = page.get_by_label("Budget of the run")
    # What a browser can't read as a number is an empty value to a script.
    budget.press_sequentially("1e")
    page.keyboard.press("Escape")
    expect(budget).to_be_hidden()
    page.fill("#message", "Hello")
    if way == "Send":
        page.locator("#send").click()
    elif way == "Enter":
        page.press("#message", "Enter")
    else:
        page.get_by_text("Say hello").click()
    expect(budget).to_be_focused()
    expect(page.locator("#message")).to_have_value("Hello")
    assert started == []
    budget.fill("10")
    said(page, "Hello")
