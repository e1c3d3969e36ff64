"""Tests of attachments in model requests: their size limits and the format of each provider."""

import asyncio
import base64
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from django.core.files.storage import default_storage

from config.kernel.errors import Unavailable
from config.limits.share import Share, Threads
from credits.models import LedgerEntry
from runs import catalogue
from runs.catalogue.definitions import Dialect
from runs.engine import history
from runs.llm import anthropic, measure, openai_chat
from runs.llm.base import (
    AssistantMessage,
    AttachedFile,
    ModelRequest,
    ToolCall,
    ToolMessage,
    TurnEnd,
    Usage,
    UserMessage,
)
from runs.llm.files import read_files, with_files
from runs.llm.measure import upper_bound
from runs.models import AgentModel, Provider, Run, Tool, ToolInvocation
from runs.purge import purge_runs_of
from runs.tools.files import stored_image
from tests import factories
from tests.lifecycle import conftest as engine_fixtures
from tests.lifecycle.conftest import Bench
from tests.llm.helpers import at, client_of, model_of, request_of
from tests.tools import conftest as tool_fixtures

PNG = b"\x89PNG\r\n\x1a\n" + b"x" * 100
engines = engine_fixtures.engines
server = tool_fixtures.server
bench = engine_fixtures.bench


def file_of(content: bytes, kind: str = "text/plain", name: str = "a.txt") -> AttachedFile:
    row = factories.AttachmentFactory.build(user=None, content=content, content_type=kind, file_name=name)
    return AttachedFile(row.file_name, row.content_type, row.size_bytes, row.stored_name)


def read(*messages: Any, **dialect: Any) -> tuple[Any, ...]:
    return read_files(messages, Dialect(**dialect))


def test_text_is_read_and_other_files_are_base64():
    (message,) = read(
        UserMessage("Hi", (file_of("Grüße 🦊".encode()), file_of(b"{}", "application/json"), file_of(PNG, "image/png")))
    )
    text, json, image = message.files
    assert (text.text, text.data, text.note) == ("Grüße 🦊", None, "")
    assert json.text == "{}"
    assert (image.text, base64.b64decode(image.data), image.note) == (None, PNG, "")


def test_the_newest_text_comes_first_until_the_limit(monkeypatch):
    monkeypatch.setattr("runs.llm.base.MODEL_ATTACHMENT_TEXT_MAX_CHARS", 8)
    old, _, new = read(
        UserMessage("1", (file_of(b"older", name="old.txt"), file_of(b"not at all"))),
        AssistantMessage("ok", ()),
        UserMessage("2", (file_of("🦊🦊🦊🦊🦊".encode()),)),
    )
    assert new.files[0].text == "🦊🦊🦊🦊🦊"
    assert (old.files[0].text, old.files[0].note) == ("old", "only the first 3 characters")
    assert (old.files[1].text, old.files[1].note) == (None, "there is no more room for its content")


def test_binary_files_have_a_size_limit(monkeypatch):
    monkeypatch.setattr("runs.llm.base.MODEL_ATTACHMENT_MAX_BYTES", len(PNG) * 2)
    old, new = read(
        UserMessage("1", (file_of(PNG, "image/png"), file_of(PNG, "image/png"))),
        UserMessage("2", (file_of(PNG, "image/png"),)),
    )
    assert new.files[0].data
    assert [bool(file.data) for file in old.files] == [True, False]
    assert old.files[1].note == "it is too large to be shown"


def test_missing_file_and_unknown_type_get_a_note():
    lost = file_of(b"x")
    default_storage.delete(lost.stored_name)
    (message,) = read(UserMessage("Hi", (lost, file_of(b"PK", "application/zip"))))
    assert [file.note for file in message.files] == [
        "the file no longer exists",
        "the content of this type cannot be shown",
    ]


def test_a_storage_that_sends_slowly_without_end_is_given_up(monkeypatch):
    monkeypatch.setattr("runs.llm.files.ATTACHMENT_READ_SECONDS", 0.1)

    def drip(name: str, size: int, part_size: int) -> Any:
        while True:
            time.sleep(0.01)
            yield b"x"

    monkeypatch.setattr(default_storage, "first_parts", drip, raising=False)
    with pytest.raises(Unavailable):
        read(UserMessage("Hi", (file_of(b"abc"),)))


def test_files_are_read_on_a_thread_only_if_there_are_any(monkeypatch):
    where: list[str] = []
    opening = default_storage.open
    monkeypatch.setattr(
        default_storage, "open", lambda name: where.append(threading.current_thread().name) or opening(name)
    )

    async def main() -> tuple[ModelRequest, ModelRequest, ModelRequest]:
        plain, full = request_of("Hi"), request_of(UserMessage("Hi", (file_of(b"abc"),)))
        threads, memory = Threads(1, 1, "reader"), Share(1000)
        async with with_files(plain, 1, threads, memory) as same, with_files(full, 1, threads, memory) as read:
            assert memory.taken == len("abc")
        threads.shutdown()
        assert memory.taken == 0
        return plain, same, read

    plain, same, full = asyncio.run(main())
    assert same is plain
    assert where == ["reader_0"]
    assert upper_bound(plain) + len("abc") < upper_bound(full)


def test_what_the_model_does_not_accept_becomes_a_note():
    image, pdf = file_of(PNG, "image/png"), file_of(b"%PDF-1", "application/pdf")
    user, tool = UserMessage("Look", (image, pdf)), ToolMessage("c1", "", False, (image,))

    def shown(**dialect: bool) -> list[list[bool]]:
        return [[bool(file.data) for file in message.files] for message in read(user, tool, **dialect)]

    assert shown() == [[True, True], [True]]
    assert shown(image_input=False) == [[False, True], [False]]
    assert shown(file_input=False) == [[True, False], [True]]
    assert shown(tool_images=False) == [[True, True], [False]]
    assert read(user, image_input=False)[0].files[0].note == "the content of this type cannot be shown"


def with_image(kind: str, **dialect: Any) -> dict[str, Any]:
    """The request after a call that returned an image and one that did not."""
    server = at("", kind)
    model = model_of(server, dialect=dialect)
    calls = AssistantMessage("", (ToolCall("c1", "t", "{}"), ToolCall("c2", "t", "{}")))
    image = replace(file_of(PNG, "image/png", "image-1.png"), size_bytes=0)
    results = (ToolMessage("c1", "[image-1.png]", False, (image,)), ToolMessage("c2", "ok", False))
    return client_of(server).body(request_of(*read_files((calls, *results), model.dialect), model=model))


ENCODED = base64.b64encode(PNG).decode()


def test_images_of_tools_are_part_of_an_anthropic_result():
    result = with_image("anthropic")["messages"][2]["content"][0]
    assert [block["type"] for block in result["content"]] == ["text", "text", "image"]
    assert result["content"][2]["source"]["data"] == ENCODED


def test_images_of_tools_are_part_of_a_responses_output():
    (output, _) = [item for item in with_image("openai_responses")["input"] if item["type"] == "function_call_output"]
    assert [part["type"] for part in output["output"]] == ["input_text", "input_text", "input_image"]
    assert output["output"][2]["image_url"] == f"data:image/png;base64,{ENCODED}"


def test_images_of_tools_follow_the_last_result_of_chat_completions():
    messages = with_image("openai")["messages"]
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool", "user"]
    assert [part["type"] for part in messages[-1]["content"]] == ["text", "image_url"]


@pytest.mark.parametrize("dialect", [{"imageInput": False}, {"toolImages": False}])
def test_images_of_tools_become_a_note(dialect: dict[str, bool]):
    messages = with_image("openai", **dialect)["messages"]
    note = 'Attachment "image-1.png" (image/png) [the content of this type cannot be shown]'
    assert [message["role"] for message in messages] == ["assistant", "tool", "tool"]
    assert messages[1]["content"] == f"[image-1.png]\n{note}"


NAMED = 'Attachment "say \\"hi\\"\\n.txt" (text/plain, 3 bytes)'


def shown() -> ModelRequest:
    files = (
        file_of(b"abc", name='say "hi"\n.txt'),
        file_of(PNG, "image/png", "p.png"),
        file_of(b"%PDF-1", "application/pdf", "d.pdf"),
        file_of(b"PK", "application/zip", "z.zip"),
    )
    return request_of(*read(UserMessage("Look", files)))


def test_openai_parts():
    (message,) = [m for m in openai_chat.OpenAIModel.body(shown())["messages"] if m["role"] == "user"]
    assert message["content"] == [
        {"type": "text", "text": f"{NAMED}:\n\nabc"},
        {"type": "text", "text": f'Attachment "p.png" (image/png, {len(PNG)} bytes)'},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}},
        {"type": "text", "text": 'Attachment "d.pdf" (application/pdf, 6 bytes)'},
        {"type": "file", "file": {"filename": "d.pdf", "file_data": "data:application/pdf;base64,JVBERi0x"}},
        {
            "type": "text",
            "text": 'Attachment "z.zip" (application/zip, 2 bytes) [the content of this type cannot be shown]',
        },
        {"type": "text", "text": "Look"},
    ]
    assert openai_chat.OpenAIModel.body(request_of("Hi"))["messages"][-1] == {"role": "user", "content": "Hi"}


def test_anthropic_blocks():
    (message,) = anthropic.AnthropicModel.body(shown())["messages"]
    png = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    pdf = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0x"}
    assert [block["type"] for block in message["content"]] == [
        "text", "text", "image", "text", "document", "text", "text"
    ]  # fmt: skip
    assert message["content"][0]["text"] == f"{NAMED}:\n\nabc"
    assert message["content"][2]["source"] == png
    assert message["content"][4]["source"] == pdf
    assert message["content"][-1]["text"] == "Look"


# --- in a run --------------------------------------------------------------------------------------------------------
class Recording:
    """A model that answers "Ok" and records its requests."""

    reads_files = True

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []
        # Of the first turn.
        self.calls: list[ToolCall] = []

    async def stream(self, request: ModelRequest) -> Any:
        self.requests.append(request)
        calls, self.calls = self.calls, []
        for call in calls:
            yield call
        yield "Ok"
        yield TurnEnd(Usage(1, 1), "tool_calls" if calls else "stop")

    async def aclose(self) -> None:
        pass


@pytest.fixture
def model(monkeypatch) -> Recording:
    recording = Recording()
    monkeypatch.setattr("runs.engine.requests.client_for", lambda provider: recording)
    return recording


def test_model_gets_the_attachments_of_all_messages(bench: Bench, model: Recording, user):
    first, second, third = (
        factories.AttachmentFactory(user=user, content=content, file_name=f"{content.decode()}.txt")
        for content in (b"one", b"two", b"three")
    )
    chat = bench.chat()
    for message, ids in (("First", [first.pk]), ("Then", []), ("Last", [third.pk, second.pk])):
        assert bench.wait(bench.start(message, chat, attachmentIds=ids)["id"])["status"] == "completed"
    received = [
        (message.text, [(file.name, file.text) for file in message.files])
        for message in model.requests[-1].messages
        if isinstance(message, UserMessage)
    ]
    assert received == [
        ("First", [("one.txt", "one")]),
        ("Then", []),
        ("Last", [("three.txt", "three"), ("two.txt", "two")]),
    ]


def test_model_gets_the_images_of_its_tools(bench: Bench, model: Recording, server, settings):
    """Until the chat is purged, with its files."""
    settings.OUTBOUND_ALLOW_PRIVATE = True
    Tool.objects.create(name="paint", display_name="Paint", node_type="http", url=server.url, price=0)
    catalogue.refresh()
    server.answers(PNG)
    server.headers = {"Content-Type": "image/png"}
    model.calls = [ToolCall("c1", "paint", "{}")]

    run = bench.finish("Paint it")
    (image,) = [file for message in model.requests[-1].messages for file in getattr(message, "files", ())]
    assert (image.name, image.data) == ("image-1.png", base64.b64encode(PNG).decode())
    (invocation,) = ToolInvocation.objects.filter(run=run["id"])
    assert invocation.result_urls[0].endswith("/image-1.png")
    stored_name, _, _ = stored_image(invocation.pk, invocation.result_urls[0])
    assert default_storage.exists(stored_name)
    assert not purge_runs_of(None, run["chatId"])
    assert not default_storage.exists(stored_name)


def test_credits_are_held_for_what_is_sent_of_a_file(bench: Bench, model: Recording, user, monkeypatch):
    """By a server that takes no PDF files, and of a long text; also in the chat's next run."""
    monkeypatch.setattr("runs.llm.base.MODEL_ATTACHMENT_TEXT_MAX_CHARS", 1000)
    provider = Provider.objects.create(name="plain", kind="openai", base_url="http://127.0.0.1:9/v1")
    prices = {"price_in": 500_000, "price_out": 0, "context_tokens": 1_000_000}
    AgentModel.objects.create(
        name="plain", display_name="Plain", provider=provider, provider_model="m", parameters={}, **prices
    )
    catalogue.refresh()
    kinds = {"application/pdf": b"%PDF-1.7 " * 20, "text/plain": b"x" * 1_000_000, "image/png": PNG}
    files = [factories.AttachmentFactory(user=user, content=kinds[kind], content_type=kind).pk for kind in kinds]
    chat = bench.chat()
    for added in ([], files, []):
        run = bench.start("Look", chat, model="plain", attachmentIds=added)
        assert bench.wait(run["id"])["status"] == "completed"
    plain, with_files, after = LedgerEntry.objects.filter(type="HOLD").order_by("created_at", "id")
    added = 1000 + measure.MODEL_IMAGE_TOKENS_MAX
    assert added < with_files.price["inputTokens"] < plain.price["inputTokens"] + added + 2000
    assert after.price["inputTokens"] < plain.price["inputTokens"] + added + 3000


def test_storage_failure_fails_the_run(bench: Bench, model: Recording, user, monkeypatch):
    attachment = factories.AttachmentFactory(user=user)
    monkeypatch.setattr("runs.llm.files.read_file", lambda *args: (_ for _ in ()).throw(Unavailable("s3cret")))
    run = bench.finish("Look", attachmentIds=[attachment.pk])
    assert (run["status"], run["errorCode"]) == ("failed", "INTERNAL_ERROR")
    assert run["errorMessage"] == "The message's attachments could not be read."
    assert model.requests == []


def test_demo_model_ignores_attachments(bench: Bench, user, monkeypatch):
    monkeypatch.setattr("runs.llm.files.read_file", lambda *args: pytest.fail("it was read"))
    attachment = factories.AttachmentFactory(user=user, content=b"x" * 10_000)
    plain, with_file = bench.finish("Hello"), bench.finish("Hello", attachmentIds=[attachment.pk])
    assert with_file["status"] == "completed"
    assert bench.content(with_file) == bench.content(plain)
    assert with_file["totalCreditsUsed"] == plain["totalCreditsUsed"]


@pytest.mark.django_db
def test_history_without_attachments_takes_no_extra_query(user, django_assert_num_queries):
    run = factories.RunFactory(chat__user=user)
    message = factories.MessageFactory(chat=run.chat, run_id=run.pk)
    Run.objects.filter(pk=run.pk).update(user_message_id=message.pk)
    run.refresh_from_db()
    with django_assert_num_queries(1):
        history.load(run, 128_000)
    factories.AttachmentFactory(user=user, message=message)
    with django_assert_num_queries(2):
        shown = history.load(run, 128_000).message
    assert [file.text for file in shown.files] == [None]
