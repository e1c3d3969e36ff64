"""A task of an MCP server goes on while every worker is killed, also with its question and the answer."""

from collections.abc import Callable

import pytest

from tests.driver import Driver
from tests.faults.load import QUICK, RUNS_ALONE, require_correct_data
from tests.stack.process import Process, free_port, python, wait_for
from tests.stack.stack import Stack
from tests.tools.test_mcp import accepts

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(240)]

TOOL = """
from runs.models import Tool
Tool.objects.create(
    name="research", display_name="Research", node_type="mcp", url="{url}", price=1_000_000, park_seconds=600
)
"""
# Ten minutes, scaled to the seconds that the kills and restarts need.
SECONDS = 6


def test_a_long_task_survives_the_end_of_every_worker(make_stack: Callable[..., Stack], tmp_path) -> None:
    port = free_port()
    server = Process("mcp", python("-m", "tests.tools.mcp_server", str(port)), log=tmp_path / "mcp.log")
    server.start()
    try:
        wait_for(lambda: server.check() or accepts(port), 30, "the MCP server's start")
        prepare = TOOL.format(url=f"http://127.0.0.1:{port}/mcp")
        stack = make_stack(run_workers=2, environment=QUICK, prepare=prepare, without=RUNS_ALONE)
        driver = Driver(stack.session())
        workers = [name for name in stack.processes if name.startswith("runs")]
        assert len(workers) == 2

        call = f'/call research {{"topic": "bees", "seconds": {SECONDS}, "asks": true}}'
        run = driver.start(f"{call}\n/say It is {{result}}.")
        stack.wait_for(lambda: driver.get(run["id"])["awaiting"] == "tool", what="the parked call")
        for name in workers:
            stack.kill(name)
        stack.restart(*workers)
        waiting = driver.wait(run["id"], "waiting")
        assert waiting["pendingWaitpoint"]["requestPayload"]["question"] == "For whom?"
        for name in workers:
            stack.kill(name)
        driver.respond(waiting, kind="CLARIFICATION", data={"name": "Ada"})
        stack.restart(*workers)
        ended = driver.wait(run["id"])
        assert ended["answer"] == "It is All about bees, for Ada."
        assert [call["creditUsed"] for call in ended["toolInvocations"]] == [1]
        require_correct_data(stack)
    finally:
        server.kill()
