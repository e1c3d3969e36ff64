"""A web app of another origin, in a real browser, against the web port and the stream process."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from playwright.sync_api import Browser

from tests.http_server import serving
from tests.stack.plugin import given_services
from tests.streams.conftest import NOT_NEEDED, SHORT, StreamStack

pytestmark = [pytest.mark.stack, pytest.mark.services]

PUBLIC_LIMIT = 10
# What an app does, as functions of JavaScript. ``ask`` answers with what a script can read.
FUNCTIONS = """
async ({what, base, stream, token, options}) => {
  const auth = {Authorization: `Bearer ${token}`, 'Content-Type': 'application/json'};
  const ask = async (path, options = {}) => {
    const url = path.startsWith('http') ? path : base + path;
    try {
      const answer = await fetch(url, {...options, headers: {...auth, ...options.headers}});
      const text = await answer.text();
      const body = text.startsWith('{') ? JSON.parse(text) : text;
      return {status: answer.status, body, headers: Object.fromEntries(answer.headers)};
    } catch (error) {
      return {blocked: error.name};
    }
  };
  const post = (path, body, headers) => ask(path, {method: 'POST', body: JSON.stringify(body), headers});
  const events = async url => {
    try {
      const answer = await fetch(url, {headers: {...auth, 'Last-Event-ID': '0', 'X-Request-Id': 'from-an-app'}});
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = '';
      for (let part = await reader.read(); !part.done; part = await reader.read()) text += part.value;
      return {status: answer.status, text, headers: Object.fromEntries(answer.headers)};
    } catch (error) {
      return {blocked: error.name};
    }
  };
  const run = async script => {
    const chat = (await post('/api/v1/chats', {})).body;
    return (await post(`/api/v1/chats/${chat.id}/runs`, {message: script})).body;
  };
  return await (new Function('ask', 'post', 'events', 'run', 'base', 'stream', 'options',
    `return (async () => { ${what} })()`))(ask, post, events, run, base, stream, options);
}
"""


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>An app</title>")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def app() -> Iterator[str]:
    """The address of the app, whose origin is allowed."""
    with serving(Page) as url:
        yield url


@pytest.fixture(scope="module")
def stack(app: str) -> Iterator[StreamStack]:
    environment = SHORT | {"CORS_ALLOWED_ORIGINS": app, "RATE_LIMIT_PUBLIC": str(PUBLIC_LIMIT)}
    with StreamStack(**given_services(), environment=environment, without=NOT_NEEDED) as running:
        yield running


@pytest.fixture
def script(stack: StreamStack, browser: Browser, app: str):
    def run(what: str, *, origin: str = app, token: str | None = None, **options: Any) -> Any:
        page = browser.new_page()
        try:
            page.goto(origin)
            given = {"base": stack.url, "stream": stack.stream_url, "token": token or stack.token("ada")}
            return page.evaluate(FUNCTIONS, given | {"what": what, "options": options})
        finally:
            page.close()

    return run


def test_an_app_makes_requests(script: Any) -> None:
    first, second = script(
        "const twice = () => post('/api/v1/chats', {title: 'Mine'}, {'Idempotency-Key': 'a key'});"
        "return [await twice(), await twice()]"
    )
    assert first["status"] == second["status"] == 201
    assert first["body"] == second["body"]
    assert second["headers"]["idempotent-replayed"] == "true"
    assert second["headers"]["x-request-id"]


@pytest.mark.parametrize("server", ["base", "stream"])
def test_an_app_reads_a_stream(script: Any, server: str) -> None:
    read = script(
        f"const made = await run('/say hello'); return events(`${{{server}}}/api/v1/runs/${{made.id}}/stream`)"
    )
    assert read["status"] == 200
    assert "event: message.delta" in read["text"]
    assert '"status":"completed"' in read["text"].replace(" ", "")
    assert read["headers"]["x-request-id"] == "from-an-app"


def test_an_app_reads_files_and_uploads_attachments(script: Any) -> None:
    file, uploaded, completed = script(
        """
        const made = await run('/call create_file {"fileName": "a.txt", "content": "from a tool"}');
        await events(`${base}/api/v1/runs/${made.id}/stream`);
        const finished = (await ask(`/api/v1/runs/${made.id}`)).body;
        const file = await ask(finished.toolInvocations[0].resultUrls[0]);
        const attached = (await post('/api/v1/attachments',
          {fileName: 'b.txt', contentType: 'text/plain', sizeBytes: 3})).body;
        const uploaded = await ask(attached.upload.url, {method: 'PUT', body: 'abc', headers: attached.upload.headers});
        return [file, uploaded, await post(`/api/v1/attachments/${attached.id}/complete`, {})];
        """
    )
    assert (file["status"], file["body"]) == (200, "from a tool")
    assert uploaded["status"] == 204
    assert (completed["status"], completed["body"]["status"]) == (200, "READY")


def test_an_app_reads_errors(script: Any, stack: StreamStack) -> None:
    unauthorized, on_stream, unknown, too_large, headers = script(
        """
        const wrong = {headers: {Authorization: 'Bearer wrong'}};
        return [await ask('/api/v1/me', wrong), await ask(`${stream}/api/v1/runs/run_1/stream`, wrong),
          await ask('/api/v1/runs/run_1'), await post('/api/v1/chats', {title: 'x'.repeat(1100000)}),
          await ask('/api/v1/me', {headers: {Authorization: 'Bearer ' + 'x'.repeat(20000)}})];
        """
    )
    assert (headers["status"], headers["body"]["error"]["code"]) == (431, "HEADERS_TOO_LARGE")
    assert [answer["status"] for answer in (unauthorized, on_stream, unknown, too_large)] == [401, 401, 404, 413]
    assert {answer["body"]["error"]["code"] for answer in (unauthorized, on_stream)} == {"UNAUTHORIZED"}
    assert too_large["body"]["error"]["code"] == "PAYLOAD_TOO_LARGE"
    limited = script(
        "let last; for (let at = 0; at <= options.limit; at++) last = await ask('/api/public/v1/key'); return last",
        token=stack.api_key("grace"),
        limit=PUBLIC_LIMIT,
    )
    assert (limited["status"], limited["body"]["error"]["code"]) == (429, "RATE_LIMITED")
    assert int(limited["headers"]["retry-after"]) > 0
    assert limited["headers"]["x-ratelimit-remaining"] == "0"


EVERYTHING = """
return [await ask('/api/v1/me'), await post('/api/v1/chats', {}), await ask(options.file),
  await events(`${base}/api/v1/runs/run_1/stream`), await events(`${stream}/api/v1/runs/run_1/stream`)];
"""


def test_an_app_of_another_origin_is_blocked(script: Any, stack: StreamStack, app: str) -> None:
    other = app.replace("127.0.0.1", "localhost")
    before = stack.session("ada").get("/chats").json()
    answers = script(EVERYTHING, origin=other, file=f"{stack.url}/files/{'0' * 64}/a.txt")
    assert answers == [{"blocked": "TypeError"}] * 5
    assert stack.session("ada").get("/chats").json() == before


def test_mcp_and_pages_are_not_for_apps(script: Any) -> None:
    answers = script("return [await post('/api/mcp', {}), await ask('/api/schema'), await ask('/admin/login/')]")
    assert answers == [{"blocked": "TypeError"}] * 3
