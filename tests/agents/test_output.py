"""Tests of ``outputSchema``: the model answers by a call, which is checked, and told what does not fit."""

from collections.abc import Callable
from typing import Any

import pytest

from runs import catalogue
from runs.admin.runs import content_of
from runs.catalogue import agents
from runs.llm.base import AssistantMessage, ModelRequest, ToolCall, ToolMessage, TurnEnd, Usage, UserMessage
from runs.llm.demo import DemoModel
from runs.models import OUTPUT_TOOL, Run, ToolInvocation, Turn
from tests.lifecycle.conftest import Bench, joined

pytestmark = pytest.mark.django_db(transaction=True)

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "number", "minimum": -273.5}},
    "required": ["city"],
    "additionalProperties": False,
}
FITS, MISFIT = f'/call {OUTPUT_TOOL} {{"city": "Oslo", "degrees": 3.5}}', f'/call {OUTPUT_TOOL} {{"degrees": "cold"}}'


def lines(*script: str) -> str:
    return "\n".join(script)


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[ModelRequest]]:
    """Give the model's next answers, each a number of calls in one turn. Returns the list of its requests."""

    def give(*turns: list[tuple[str, str]]) -> list[ModelRequest]:
        left, seen = iter(turns), list[ModelRequest]()

        async def stream(self: DemoModel, request: ModelRequest) -> Any:
            seen.append(request)
            for number, (name, arguments) in enumerate(next(left)):
                yield ToolCall(f"call_{request.turn_index}_{number}", name, arguments)
            yield TurnEnd(Usage(1, 1), "tool_calls")

        monkeypatch.setattr(DemoModel, "stream", stream)
        return seen

    return give


def contents(request: ModelRequest) -> list[str]:
    """The transcript after the message that the run answers."""
    (start,) = (at for at, part in enumerate(request.messages) if isinstance(part, UserMessage) and not part.is_note)
    rest = request.messages[start + 1 :]
    return [message.content if isinstance(message, ToolMessage) else message.text for message in rest]


def test_the_input_of_the_call_is_the_output(bench: Bench, requests, events):
    run = bench.finish(f"/say It is\n{FITS}", outputSchema=SCHEMA)
    assert (run["status"], run["finishReason"], run["errorCode"]) == ("completed", "stop", None)
    assert run["output"] == {"city": "Oslo", "degrees": 3.5}
    assert (run["answer"], run["toolInvocations"], run["usage"]["turns"]) == ("It is", [], 1)
    assert not ToolInvocation.objects.exists()
    assert joined(events(run["id"])) == "It is"
    assert not [kind for kind, _ in events(run["id"]) if kind.startswith("tool.")]
    (asked,) = requests
    assert (asked.tools[-1].name, asked.tools[-1].input_schema) == (OUTPUT_TOOL, SCHEMA)
    summary = bench.http.get("/runs").json()["items"][0]
    assert "output" not in summary
    assert summary["toolInvocationCount"] == 0


def test_a_misfit_is_told_to_the_model_which_tries_again(bench: Bench, requests):
    run = bench.finish(lines(MISFIT, f"/call {OUTPUT_TOOL} {{", FITS), outputSchema=SCHEMA)
    assert (run["status"], run["output"]) == ("completed", {"city": "Oslo", "degrees": 3.5})
    assert (run["usage"]["turns"], run["toolInvocations"]) == (3, [])
    told = contents(requests[-1])
    assert "degrees" in told[1]
    assert "not valid JSON" in told[3]
    assert all(message.is_error for message in requests[-1].messages if isinstance(message, ToolMessage))


def test_three_misfits_fail_the_run(bench: Bench, requests, events):
    run = bench.finish(lines(MISFIT, MISFIT, MISFIT, FITS), outputSchema=SCHEMA)
    assert (run["status"], run["errorCode"], run["output"]) == ("failed", "OUTPUT_INVALID", None)
    assert len(requests) == run["usage"]["turns"] == Turn.objects.count() == 3
    assert events(run["id"])[-1][1]["errorCode"] == "OUTPUT_INVALID"


def test_staff_read_what_was_not_accepted(bench: Bench):
    run = bench.finish(lines(MISFIT, FITS), outputSchema=SCHEMA, instructions="Rhyme.")
    shown = {title: [*texts.values()][-1] for title, texts in content_of(Run.objects.get(pk=run["id"]))}
    assert shown["Instructions of the run"] == "Rhyme."
    assert '"city": "Oslo"' in shown["Output"]
    assert '{"degrees": "cold"}' in shown["Turn 1"]
    assert "Not accepted: INVALID_INPUT" in shown["Turn 1"]


def test_an_answer_in_plain_words_is_a_try(bench: Bench, requests):
    run = bench.finish("Hello", outputSchema=SCHEMA)
    assert (run["status"], run["errorCode"]) == ("failed", "OUTPUT_INVALID")
    assert run["answer"]
    assert len(requests) == 3
    notes = [message for message in requests[-1].messages if isinstance(message, UserMessage) and message.is_note]
    assert len(notes) == 2
    assert OUTPUT_TOOL in notes[0].text


def test_the_number_of_tries_is_a_setting(bench: Bench, requests, monkeypatch):
    monkeypatch.setattr("runs.engine.loop.OUTPUT_ATTEMPTS", 1)
    assert bench.finish(lines(MISFIT, FITS), outputSchema=SCHEMA)["errorCode"] == "OUTPUT_INVALID"
    assert len(requests) == 1


def test_tools_are_called_before_the_output(bench: Bench):
    calculate = '/call calculate {"expression": "1 + 1"}\n/say It is {result}.'
    run = bench.finish(lines(calculate, calculate, calculate, calculate, FITS), outputSchema=SCHEMA)
    assert (run["status"], len(run["toolInvocations"])) == ("completed", 4)
    assert run["output"] == {"city": "Oslo", "degrees": 3.5}


def test_the_output_is_given_alone(bench: Bench, answer):
    """The other calls are made, and the model can answer with their results. This is no try."""
    output, calculate = (OUTPUT_TOOL, '{"city": "Oslo"}'), ("calculate", '{"expression": "1 + 1"}')
    requests = answer(*[[output, calculate, output]] * 4, [output])
    run = bench.finish("Hello", outputSchema=SCHEMA)
    assert (run["status"], run["output"], run["usage"]["turns"]) == ("completed", {"city": "Oslo"}, 5)
    assert [(call["name"], call["result"]) for call in run["toolInvocations"]] == [("calculate", "2")] * 4
    told = contents(requests[-1])[1:4]
    assert told[1] == "2"
    assert told[0] == told[2] != "2"


def test_the_first_of_several_outputs_that_fits_counts(bench: Bench, answer):
    answer([(OUTPUT_TOOL, "{}"), (OUTPUT_TOOL, '{"city": "Oslo"}'), (OUTPUT_TOOL, '{"city": "Rome"}')])
    run = bench.finish("Hello", outputSchema=SCHEMA)
    assert (run["status"], run["output"], run["usage"]["turns"]) == ("completed", {"city": "Oslo"}, 1)


def test_the_output_costs_and_asks_nothing(bench: Bench):
    run = bench.finish(FITS, outputSchema=SCHEMA, creditApprovalThreshold=0)
    assert run["status"] == "completed"
    assert run["totalCreditsUsed"] == pytest.approx(sum(turn.cost for turn in Turn.objects.all()) / 1_000_000)


def test_without_a_schema_there_is_no_such_tool(bench: Bench, requests):
    run = bench.finish(lines(FITS, "/say {result}"))
    assert (run["status"], run["output"]) == ("completed", None)
    assert run["toolInvocations"][0]["errorCode"] == "UNKNOWN_TOOL"
    assert OUTPUT_TOOL not in [tool.name for tool in requests[0].tools]


def test_the_schema_of_the_request_wins_over_the_agents(bench: Bench, requests):
    agents.save("weather", display_name="Weather", output_schema=SCHEMA)
    catalogue.refresh()
    other = {"type": "object", "required": ["sky"]}
    run = bench.finish(f'/call {OUTPUT_TOOL} {{"sky": "blue"}}', agent="weather", outputSchema=other)
    assert run["output"] == {"sky": "blue"}
    assert bench.finish(FITS, agent="weather")["output"]["city"] == "Oslo"
    assert requests[-1].tools[-1].input_schema == SCHEMA


def test_later_runs_of_the_chat_read_the_output_as_text(bench: Bench, requests):
    chat = bench.chat()
    for script in (lines(MISFIT, FITS), f"/say So\n{FITS}", "Hello", "/say Done"):
        schema = {} if script == "/say Done" else {"outputSchema": SCHEMA}
        bench.wait(bench.start(script, chat, **schema)["id"])
    said = [message for message in requests[-1].messages if isinstance(message, AssistantMessage)]
    output = '{"city": "Oslo", "degrees": 3.5}'
    assert [message.text for message in said if not message.tool_calls][:2] == [output, f"So\n\n{output}"]
    assert [call.name for message in said for call in message.tool_calls] == [OUTPUT_TOOL]
    # After the failed run, whose last answer in plain words ends it.
    roles = [isinstance(message, UserMessage) for message in requests[-1].messages[-8:]]
    assert roles == [True, False, True, False, True, False, False, True]
