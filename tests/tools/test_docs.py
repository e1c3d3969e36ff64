"""The tools of docs/tools.md, each as a process, called as runs call them."""

import json
import re
import shutil
import socket
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
import requests

from tests.http_server import serving
from tests.stack.process import Process, free_port, wait_for
from tests.tools.conftest import http_tool

PAGE = (Path(__file__).resolve().parents[2] / "docs/tools.md").read_text()
PLAIN, FASTAPI, NODE, FILMS = re.findall(r"^```(?:python|js)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def node(folder: Path, port: int) -> list[str]:
    found = shutil.which("node")
    if found is None:
        pytest.skip("Node.js is not installed")
    (folder / "weather.mjs").write_text(NODE.replace("9001", str(port)))
    return [found, "weather.mjs"]


def plain(folder: Path, port: int) -> list[str]:
    (folder / "weather.py").write_text(PLAIN.replace("9001", str(port)))
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


def test_the_tool_that_takes_long_calls_back(tmp_path: Path) -> None:
    port, bodies = free_port(), Queue[Any]()

    class Callback(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    (tmp_path / "films.py").write_text(FILMS.replace("9001", str(port)).replace("time.sleep(5)", "time.sleep(0)"))
    process = Process("films", [sys.executable, "films.py"], log=tmp_path / "log", directory=tmp_path)
    process.start()
    try:
        wait_for(lambda: process.check() or listens(port), what="the tool's start")
        with serving(Callback) as url:
            body = {"input": {"title": "Metropolis"}, "callback": {"url": url}}
            assert requests.post(f"http://127.0.0.1:{port}/", json=body, timeout=10).status_code == 202
            assert bodies.get(timeout=20) == {"progress": {"fraction": 0.5, "message": "cutting"}}
            assert bodies.get(timeout=20) == {"result": "The film Metropolis is ready."}
    finally:
        process.kill()
