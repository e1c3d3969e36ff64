"""The tools of docs/tools.md, each as a process, called as runs call them."""

from __future__ import annotations

import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.stack.process import Process, free_port, wait_for
from tests.tools.conftest import http_tool

PAGE = (Path(__file__).resolve().parents[2] / "docs/tools.md").read_text()
PLAIN, FASTAPI, NODE = re.findall(r"^```(?:python|js)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def node(folder: Path, port: int) -> list[str]:
    found = shutil.which("node")
    if found is None:
        pytest.skip("Node.js is not installed")
    (folder / "weather.mjs").write_text(NODE.replace("9000", str(port)))
    return [found, "weather.mjs"]


def plain(folder: Path, port: int) -> list[str]:
    (folder / "weather.py").write_text(PLAIN.replace("9000", str(port)))
    return [sys.executable, "weather.py"]


def fastapi(folder: Path, port: int) -> list[str]:
    (folder / "weather.py").write_text(FASTAPI)
    return [sys.executable, "-m", "uvicorn", "weather:app", "--port", str(port)]


def test_the_plain_tool_has_ten_lines():
    assert sum(bool(line) for line in PLAIN.splitlines()) <= 10


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("example", [plain, fastapi, node])
def test_an_example_is_a_tool(example: Callable[[Path, int], list[str]], tmp_path: Path, call: Any) -> None:
    port = free_port()
    process = Process("weather", example(tmp_path, port), log=tmp_path / "log", directory=tmp_path)
    process.start()
    try:
        wait_for(lambda: process.check() or listens(port), what="the tool's start")
        result = call(http_tool(f"http://127.0.0.1:{port}/"), {"city": "Köln"})
    finally:
        process.kill()
    assert (result.text, result.credit_used) == ("It is sunny in Köln.", 100_000)
