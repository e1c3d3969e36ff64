"""Text from outside never costs much time. The inputs and their limits are in ``worst_inputs``."""

import ast
import contextlib
import gc
import time
from collections.abc import Callable, Iterator

import pytest
from django.conf import settings
from rest_framework.exceptions import APIException

from apikeys.serializers import ApiKeyInputSerializer
from chats.serializers import AttachmentInput, ChatChanges, ChatInput
from config.api.errors import envelope, to_domain_error
from config.api.serializers import CamelSerializer
from config.kernel import garbage
from config.kernel.errors import DomainError
from config.kernel.jsontext import dumps
from config.outbound.addresses import RequestFailed
from runs.calls import ANSWERS, AnswerKind, CallResultInput, ClientToolInput
from runs.llm import wire
from runs.llm.base import ModelError
from runs.mcp.tools import TOOLS
from runs.mcp.views import RpcError
from runs.serializers import RunInput
from runs.tools.base import ToolFailure
from runs.tools.mcp import tasks
from tests.architecture.test_rules import ROOT, sources
from webhooks.serializers import EndpointChanges, EndpointInput

Work = Callable[[], object]
BODY = settings.API_MAX_BODY_BYTES
SECONDS = 0.5
REFERENCE_SECONDS = 0.03
# All others wait for an event loop: about 20 ms, and a margin for a busy machine.
LOOP_SECONDS = 0.25
ANSWER_MAX_BYTES = 64 * 1024
# What the readers raise for text that they do not accept, all with a message for the sender.
REFUSALS = (DomainError, APIException, ToolFailure, ModelError, RpcError, ValueError)
REFUSALS += (RequestFailed, RecursionError, tasks.Away, tasks.Refused)
SEARCHES = {"compile", "match", "fullmatch", "search", "findall", "finditer", "sub", "subn", "split", "template"}
WITH_PATTERNS = {"RegexValidator", "RegexField", "re_path"}


@pytest.fixture(autouse=True, scope="module")
def garbage_is_collected_as_in_a_process() -> Iterator[None]:
    thresholds = gc.get_threshold()
    garbage.freeze_loaded_objects()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def cpu_seconds(work: Work) -> float:
    begun = time.process_time()
    with contextlib.suppress(*REFUSALS):
        work()
    return time.process_time() - begun


def reference() -> None:
    found = {}
    for number in range(200_000):
        found[number % 1000] = str(number)


def too_slow(work: Work, limit: float) -> bool:
    """The limit is for a machine on which the reference takes REFERENCE_SECONDS. A shared one can be slower, from one
    moment to the next: so it is measured beside each of three attempts that exceed the limit.
    """
    return all(
        (spent := cpu_seconds(work)) > limit and spent > limit * cpu_seconds(reference) / REFERENCE_SECONDS
        for _ in range(3)
    )


# The entries hold a gigabyte of text. Imported by a test, they are in the memory of one of the processes alone.
def slow(entries: dict[str, str | list[Work]], limit: float) -> list[tuple[str, int]]:
    """The names of the entries, with the index of each call, that took longer."""
    works = [(name, given) for name, given in sorted(entries.items()) if not isinstance(given, str)]
    return [(name, index) for name, given in works for index, work in enumerate(given) if too_slow(work, limit)]


@pytest.mark.timeout(300)
def test_a_pattern_is_searched_in_linear_time() -> None:
    from tests.architecture.worst_inputs import PATTERNS

    assert slow(PATTERNS, SECONDS) == []


@pytest.mark.timeout(300)
def test_a_scanner_needs_linear_time(settings) -> None:
    from tests.architecture.worst_scanner_inputs import SCANNERS

    settings.TRUSTED_PROXIES = 1
    assert slow(SCANNERS, SECONDS) == []


@pytest.mark.timeout(300)
def test_an_event_loop_is_not_held_up() -> None:
    from tests.architecture.worst_loop_inputs import ON_EVENT_LOOPS

    assert slow(ON_EVENT_LOOPS, LOOP_SECONDS) == []


class Names(ast.NodeVisitor):
    """The names of the functions and values of a module that hold a regular expression."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.within: list[str] = []

    def visit(self, node: ast.AST) -> None:
        name = None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            name = node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if isinstance(node, ast.Call) and self.is_pattern(node.func):
            # A value of a module or a class by its own name; what a function uses by the function's name.
            self.found.add(self.within[0] if self.within else "(module)")
        if name is not None:
            self.within.append(name)
        self.generic_visit(node)
        if name is not None:
            self.within.pop()

    @staticmethod
    def is_pattern(called: ast.expr) -> bool:
        if isinstance(called, ast.Attribute):
            of_re = isinstance(called.value, ast.Name) and called.value.id == "re" and called.attr in SEARCHES
            return of_re or called.attr in WITH_PATTERNS
        return isinstance(called, ast.Name) and called.id in WITH_PATTERNS


def test_each_pattern_of_the_product_has_an_entry() -> None:
    """A new regular expression needs its worst inputs in ``PATTERNS``, or the reason why it reads no outside text."""
    from tests.architecture.worst_inputs import PATTERNS

    found = set()
    for path in sources():
        names = Names()
        tree = ast.parse(path.read_text())
        names.visit(tree)
        found |= {f"{path.relative_to(ROOT)}: {name}" for name in names.found}
        imports = [
            node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module in ("re", "regex")
        ]
        assert imports == [], f"{path}: import the module, so that this test finds its calls"
    assert found - PATTERNS.keys() == set(), "without an entry"
    assert PATTERNS.keys() - found == set(), "no longer in the product"


INPUTS: list[type[CamelSerializer]] = [ChatInput, ChatChanges, AttachmentInput, RunInput, AnswerKind, *ANSWERS.values()]
INPUTS += [ApiKeyInputSerializer, EndpointInput, EndpointChanges, CallResultInput, ClientToolInput]
INPUTS += [part for tool in TOOLS.values() for part in (tool.own, *tool.body)]
# As many items or characters as a body can have.
VALUES: dict[str, Callable[[], object]] = {
    "numbers": lambda: [1] * (BODY // 2),
    "lists": lambda: [[]] * (BODY // 3),
    "texts": lambda: ["a"] * (BODY // 4),
    "object": lambda: {str(number): 1 for number in range(BODY // 10)},
    "text": lambda: "a" * BODY,
    "number": lambda: 2**63 - 1,
}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("kind", dict.fromkeys(INPUTS), ids=lambda kind: kind.__name__)
def test_a_wrong_body_has_a_short_answer_at_little_cost(kind: type[CamelSerializer], value: str) -> None:
    worst = VALUES[value]()
    body = dict.fromkeys(kind().fields, worst) | {"unknown": worst}
    refused: list[APIException] = []

    def validate() -> None:
        try:
            kind.validated(body)
        except APIException as error:
            refused.append(error)

    assert not too_slow(validate, SECONDS)
    answer = to_domain_error(refused[-1])
    assert len(dumps(envelope(answer.code, answer.message, answer.details))) < ANSWER_MAX_BYTES


def test_lines_without_a_value_count_for_the_size_of_an_event() -> None:
    decoder = wire.SseDecoder()
    chunk = b"data:\n" * 1000
    for _ in range(wire.MODEL_EVENT_MAX_BYTES // len(chunk)):
        decoder.feed(chunk)
    with pytest.raises(ModelError):
        decoder.feed(chunk)


def test_many_chunks_of_one_event_need_linear_time() -> None:
    def read() -> None:
        decoder = wire.SseDecoder()
        for _ in range(50_000):
            decoder.feed(b"data:x\n")

    assert not too_slow(read, SECONDS)


def test_cookies_cost_little(client) -> None:
    worst = 'a="' + "\\" * 60_000 + '"'
    begun = time.process_time()
    page = client.get("/admin/login/", headers={"Cookie": worst})
    assert page.status_code == 431
    answer = client.get("/api/v1/me", headers={"Cookie": worst})
    assert answer.status_code == 401
    assert time.process_time() - begun < SECONDS
