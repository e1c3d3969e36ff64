"""Tests of the offline demo model, which derives each turn of a script from the transcript alone."""

import asyncio
import json
from typing import Any

import pytest

from config.outbound.transport import close_sessions
from runs.catalogue.definitions import Server
from runs.llm import demo
from runs.llm.base import AssistantMessage, Message, ModelError, ToolMessage, Usage, UserMessage
from runs.llm.registry import client_for
from runs.models import OUTPUT_TOOL
from tests.llm.helpers import Heard, hear, request_of


@pytest.fixture(autouse=True)
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the model's sleep, and return the list of requested durations."""
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        if seconds:
            slept.append(seconds)

    monkeypatch.setattr(demo.asyncio, "sleep", sleep)
    return slept


DEMO = Server("demo", "demo")


def turn(*messages: Message | str) -> Heard:
    async def main() -> Heard:
        try:
            return await hear(client_for(DEMO), request_of(*messages))
        finally:
            await close_sessions()

    return asyncio.run(main())


def play(script: str, *results: str) -> list[Heard]:
    """Execute every turn of a script in a separate event loop, as if each turn ran in another process."""
    transcript: list[Message] = [UserMessage(script)]
    left = list(results)
    turns: list[Heard] = []
    while not turns or turns[-1].calls:
        turns.append(turn(*transcript))
        transcript.append(turns[-1].turn)
        for call in turns[-1].calls:
            transcript.append(ToolMessage(call.id, left.pop(0), False))
    assert not left
    return turns


def failure(*messages: Message | str) -> ModelError:
    with pytest.raises(ModelError) as caught:
        turn(*messages)
    return caught.value


def test_plain_text_gets_a_short_reply_that_mentions_scripts():
    heard = turn("Hi there, what's 1/2?")

    assert len(heard.deltas) > 5
    assert "/say" in heard.text
    assert len(heard.text) < 200
    assert not heard.calls


def test_a_turn_that_is_cut_makes_no_calls():
    heard = turn("/say Half\n/length\n/call calculate {}")

    assert (heard.text, heard.calls, heard.end.finish_reason) == ("Half", [], "length")


def test_say_streams_exactly_its_text_word_by_word():
    heard = turn("/say  Grüße,   liebe 🦊 Welt!  ")

    assert heard.deltas == ["Grüße,   ", "liebe ", "🦊 ", "Welt!"]


def test_say_lines_of_a_turn_are_joined_by_line_breaks():
    (only,) = play("  /say one \r\n\n/say two\n/stream 2 0\nplain words\n/say three")

    assert only.text == "one\ntwo\nthe quick\nplain words\nthree"


def test_result_is_replaced_by_the_last_tool_result():
    turns = play(
        "/call a\n/call b\n/say got {result} and {result}\n/call c\n/say {result}", "x", '"say \\"y\\""', '{"z": 1}'
    )

    assert [heard.text for heard in turns] == ["", 'got say "y" and say "y"', '{"z": 1}']


def test_result_is_unchanged_without_a_tool_result():
    assert turn("/call a {}\n/say {result}", AssistantMessage("", ())).text == "{result}"


def test_tool_result_is_not_parsed_as_placeholder_or_script():
    assert play("/call a\n/say {result}", "{result}\n/fail no")[-1].text == "{result}\n/fail no"


def test_consecutive_calls_share_a_turn_and_later_calls_start_a_new_one():
    turns = play('/say first\n/call a {"n": 1}\n\n/ask Which "one"?\n/say then\n/call b\n/wait 0\n/call a', *"1234")

    assert [[call.name for call in heard.calls] for heard in turns] == [["a", "ask_user"], ["b"], ["a"], []]
    assert [heard.text for heard in turns] == ["first", "then", "", ""]
    assert turns[0].calls[0].arguments == '{"n": 1}'
    assert json.loads(turns[0].calls[1].arguments) == {"question": 'Which "one"?'}
    ids = [call.id for heard in turns for call in heard.calls]
    assert len(set(ids)) == 4


def test_a_line_that_gives_the_output_is_a_turn_of_its_own():
    turns = play(f"/call a\n/call {OUTPUT_TOOL} {{}}\n/call b", *"123")

    assert [[call.name for call in heard.calls] for heard in turns] == [["a"], [OUTPUT_TOOL], ["b"], []]


@pytest.mark.parametrize(
    ("line", "arguments"),
    [("/call t", "{}"), ('/call\tt  {"a":  1} ', '{"a":  1}'), ("/call t {broken", "{broken"), ("/call t [1]", "[1]")],
)
def test_call_arguments_are_passed_on_unchanged(line: str, arguments: str):
    (call,) = turn(line).calls

    assert (call.name, call.arguments) == ("t", arguments)


def test_only_messages_after_the_last_user_message_count():
    earlier: list[Any] = ["/call a\n/say old", AssistantMessage("old", ()), ToolMessage("x", "old result", False)]

    assert [call.name for call in turn(*earlier, "/call b\n/say {result}").calls] == ["b"]


def test_turn_after_the_end_of_the_script_is_empty():
    heard = turn("/say done", AssistantMessage("done", ()))

    assert (heard.text, heard.calls) == ("", [])


def test_stream_emits_the_given_number_of_words_at_the_given_interval(naps):
    heard = turn("/stream 20 250")

    assert len(heard.text.split()) == len(heard.deltas) == 20
    assert naps == [0.25] * 19


def test_wait_pauses_between_the_text_before_and_after_it(naps):
    heard = turn("/say before\n/wait 1.5\n/say after\n/wait 500")

    assert (heard.text, naps) == ("before\nafter", [1.5, 500])


def test_sleep_counts_towards_the_time_limit_of_the_turn(settings, naps):
    settings.MODEL_TIMEOUT_SECONDS = 10

    assert turn("/wait 10").usage
    assert failure("/wait 6\n/wait 6").reason.code == "MODEL_TIMEOUT"
    assert naps == [10, 6, 4]


def test_fail_raises_its_text_after_the_earlier_text():
    heard = Heard()
    with pytest.raises(ModelError, match=r"^out of luck$"):
        asyncio.run(hear(demo.DemoModel(DEMO), request_of("/say so far\n/fail out of luck"), heard))
    assert heard.text == "so far"


def test_fail_after_a_call_fails_the_next_turn():
    assert [call.name for call in turn("/call a\n/fail late").calls] == ["a"]
    assert failure("/call a\n/fail late", AssistantMessage("", ()), ToolMessage("1", "r", False)).message == "late"


def test_usage_line_sets_the_usage_of_its_turn():
    turns = play("/usage 1000 50\n/call a\n/usage 7 0", "ok")

    assert [heard.usage for heard in turns] == [Usage(1000, 50), Usage(7, 0)]
    assert turn("/length\n/usage 7 0").usage == Usage(7, 0)


def test_usage_is_estimated_from_the_text_without_a_usage_line():
    assert turn("/say 12345678").usage == Usage(4, 2)
    assert turn("/call a", AssistantMessage("", ())).usage == Usage(2, 1)
    assert turn("/call a", AssistantMessage("", ()), ToolMessage("1", "r" * 401, False)).usage.input_tokens == 102


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("/shout hi", "/ask, /call"),
        ("/", "/ask, /call"),
        ("/SAY hi", "/ask, /call"),
        ("/sayhi", "/ask, /call"),
        ("/say", "/say TEXT"),
        ("/call", "/call TOOL"),
        ("/call " + "t" * 201, "200 characters"),
        ("/ask", "/ask QUESTION"),
        ("/fail", "/fail TEXT"),
        ("/wait", "0 to 600"),
        ("/wait 601", "0 to 600"),
        ("/wait -1", "0 to 600"),
        ("/wait nan", "0 to 600"),
        ("/wait 1e2", "0 to 600"),
        ("/wait ٣", "0 to 600"),
        ("/stream 5", "/stream N MS"),
        ("/stream 0 1", "/stream N MS"),
        ("/stream 5 1.5", "/stream N MS"),
        ("/stream 999999999 1", "/stream N MS"),
        ("/usage 1", "/usage IN OUT"),
        ("/usage 1 -1", "/usage IN OUT"),
        ("/usage 1 99999999999", "/usage IN OUT"),
    ],
)
def test_invalid_line_fails_the_turn_and_names_the_remedy(line: str, remedy: str):
    error = failure(f"/say never said\n\n{line}")

    assert error.reason.code == "MODEL_ERROR"
    assert "Line 3" in error.message
    assert remedy in error.message


def test_output_limit_is_checked_before_the_text_is_built(monkeypatch):
    monkeypatch.setattr("runs.llm.base.MODEL_OUTPUT_MAX_CHARS", 1000)

    assert failure("/stream 300 0").reason == "answer_too_long"
    assert failure("/say " + "a " * 501).reason == "answer_too_long"
    transcript = [
        "/call a\n/say " + "{result}" * 10_000,
        AssistantMessage("", ()),
        ToolMessage("1", "r" * 10**5, False),
    ]
    assert failure(*transcript).reason == "answer_too_long"


def test_other_runs_continue_during_a_long_script(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []

    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await real(seconds)

    monkeypatch.setattr(demo.asyncio, "sleep", sleep)
    turn("/say a\n" * 1000)
    assert pauses.count(0) == 1000 // demo.WORDS_AT_ONCE


def test_number_of_calls_in_a_turn_is_limited(monkeypatch):
    monkeypatch.setattr("runs.llm.base.TOOL_CALLS_PER_TURN_MAX", 2)

    assert len(turn("/call a\n/call a").calls) == 2
    assert "at most 2 tools" in failure("/call a\n/call a\n/ask me").message


def test_a_message_of_any_length_and_shape_is_answered():
    assert turn("\n/say é\x0b\u2028ü " * 10_000).text
    assert turn("").text


def test_an_unknown_provider_is_a_clear_error():
    async def main() -> None:
        client_for(Server("acme", "acme"))

    with pytest.raises(ModelError) as caught:
        asyncio.run(main())
    assert "acme" in caught.value.detail


def test_each_provider_has_one_client():
    assert client_for(DEMO) is client_for(DEMO)
