"""An engine in the test process, and the requests that its models get."""

from typing import Any

import pytest

from runs.llm.base import ModelRequest
from runs.llm.demo import DemoModel
from tests.lifecycle.conftest import bench, engines, events  # noqa: F401


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[ModelRequest]:
    seen: list[ModelRequest] = []
    stream = DemoModel.stream

    async def record(self: DemoModel, request: ModelRequest) -> Any:
        seen.append(request)
        async for event in stream(self, request):
            yield event

    monkeypatch.setattr(DemoModel, "stream", record)
    return seen
