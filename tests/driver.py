"""A client's actions on runs over any HTTP client: real requests to a stack, or an in-process test client."""

import time
from collections.abc import Callable
from typing import Any, Protocol

FINAL = ("completed", "failed", "cancelled")


class Http(Protocol):
    """Paths are relative to a surface; answers have ``status_code`` and ``json()``."""

    def get(self, path: str) -> Any: ...

    def post(self, path: str, json: Any = None) -> Any: ...


class InProcess:
    """A DRF test client with the interface of ``Http``."""

    def __init__(self, client: Any, base: str = "/api/v1") -> None:
        self.client, self.base = client, base

    def get(self, path: str) -> Any:
        return self.client.get(self.base + path)

    def post(self, path: str, json: Any = None) -> Any:
        return self.client.post(self.base + path, {} if json is None else json, format="json")


class Driver:
    """Starts runs, answers them and waits for their end."""

    def __init__(self, http: Http) -> None:
        self.http = http

    def chat(self) -> str:
        return self.http.post("/chats").json()["id"]

    def start(self, message: str, chat: str | None = None, **body: Any) -> dict[str, Any]:
        answer = self.http.post(f"/chats/{chat or self.chat()}/runs", {"message": message} | body)
        assert answer.status_code == 201, answer.content
        return answer.json()

    def get(self, run_id: str) -> dict[str, Any]:
        answer = self.http.get(f"/runs/{run_id}")
        assert answer.status_code == 200, answer.content
        return answer.json()

    def wait(self, run_id: str, *statuses: str, timeout: float = 60) -> dict[str, Any]:
        """Wait until the run has one of ``statuses`` (default: any final status) and return it."""
        wanted = statuses or FINAL
        return until(lambda: (run := self.get(run_id))["status"] in wanted and run, timeout, lambda: self.get(run_id))

    def finish(self, message: str, **body: Any) -> dict[str, Any]:
        return self.wait(self.start(message, **body)["id"])

    def ask(self, message: str, **body: Any) -> dict[str, Any]:
        """Start a run and wait until it waits for an answer."""
        return self.wait(self.start(message, **body)["id"], "waiting")

    def content(self, run: dict[str, Any]) -> str:
        messages = self.http.get(f"/chats/{run['chatId']}/messages?limit=100").json()["items"]
        return next(message["content"] for message in messages if message["id"] == run["assistantMessageId"])

    def respond(self, run: dict[str, Any], **body: Any) -> dict[str, Any]:
        answer = self.http.post(f"/waitpoints/{run['pendingWaitpoint']['id']}/respond", body)
        assert answer.status_code == 200, answer.content
        return answer.json()

    def cancel(self, run_id: str) -> dict[str, Any]:
        answer = self.http.post(f"/runs/{run_id}/cancel")
        assert answer.status_code == 200, answer.content
        return answer.json()

    def credits(self) -> dict[str, str]:
        return self.http.get("/me/credits").json()


def until(predicate: Callable[[], Any], timeout: float = 60, describe: Callable[[], Any] = lambda: "") -> Any:
    """The first true value of the predicate. Fails after ``timeout`` seconds. It looks less and less often, because
    each look at a running service takes time from what is waited for.
    """
    begun = time.monotonic()
    while (waited := time.monotonic() - begun) < timeout:
        if value := predicate():
            return value
        time.sleep(max(0.01, min(waited / 10, 0.25)))
    raise AssertionError(f"it did not come to pass in {timeout} s: {describe()}")
