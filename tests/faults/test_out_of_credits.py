"""Runs that wait for credits, while everything is killed and users buy credits at random."""

import random
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.driver import Driver
from tests.faults.load import QUICK, RUNS_ALONE, Careful, require_correct_data
from tests.stack.postgres import PostgresServer
from tests.stack.stack import Client, Stack

pytestmark = [pytest.mark.stack, pytest.mark.faults, pytest.mark.services, pytest.mark.timeout(600)]

PREPARE = """
from pathlib import Path
from apikeys.keys import create_server_key
Path({path!r}).write_text(create_server_key("shop", ["credits", "session-tokens"])[1])
"""
SCRIPT = '/usage 100 100\n/call calculate {"expression": "6*7"}\n/usage 100 100\n/say {result}'
# Two turns and the call.
COST = 2 * 0.2 + 0.1
USERS, RUNS_EACH = 3, 8


def test_no_run_is_lost_and_no_balance_goes_below_zero(postgres_server: PostgresServer, tmp_path: Path) -> None:
    environment = QUICK | {"SIGNUP_CREDITS": "0.05", "config.api.viewsets.SERVER_KEY_REQUESTS": "100000"}
    prepare = PREPARE.format(path=str(tmp_path / "key"))
    url = postgres_server.url()
    with Stack(database_url=url, run_workers=2, environment=environment, prepare=prepare, without=RUNS_ALONE) as stack:
        shop = Careful(Client(f"{stack.url}/api/v1", (tmp_path / "key").read_text(), timeout=5))
        users = [Shopper(stack, shop, f"user-{number}") for number in range(USERS)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(Shopper.start, users))
            stack.wait_for(lambda: all(user.waiting() for user in users), timeout=120, what="runs without credits")
            buying = [threads.submit(user.buy_until_done) for user in users]
            time.sleep(1)
            for _ in range(2):
                for name in ("runs-1", "runs-2"):
                    stack.kill(name)
                    time.sleep(0.5)
                    stack.restart(name)
                postgres_server.kill()
                time.sleep(1)
                postgres_server.start()
                time.sleep(1)
            for user in users:
                user.amounts = ("0.3", "0.7", "2")
            for bought in buying:
                bought.result()
        for user in users:
            user.check()
        require_correct_data(stack)


class Shopper:
    """A user who starts runs without credits, and buys some again and again."""

    def __init__(self, stack: Stack, shop: Careful, name: str) -> None:
        self.shop, self.name = shop, name
        token = shop.post("/session-tokens", {"sub": name}).json()["token"]
        self.driver = Driver(Careful(Client(f"{stack.url}/api/v1", token, timeout=5)))
        self.runs: list[str] = []
        self.bought = 0.05
        # Little, so that runs still wait at the last kill.
        self.amounts: tuple[str, ...] = ("0.1", "0.3")
        self.random = random.Random(name)

    def start(self) -> None:
        self.runs = [self.driver.start(SCRIPT, onCreditsExhausted="wait")["id"] for _ in range(RUNS_EACH)]

    def states(self) -> list[str]:
        items: list[dict[str, Any]] = self.driver.http.get("/runs?limit=100").json()["items"]
        return [item["status"] for item in items]

    def waiting(self) -> bool:
        return self.states() == ["waiting"] * RUNS_EACH

    def buy_until_done(self) -> None:
        end = time.monotonic() + 240
        while set(self.states()) != {"completed"}:
            assert time.monotonic() < end, (self.name, self.states(), self.driver.credits())
            amount = self.random.choice(self.amounts)
            body = {"amount": amount, "reference": f"pay-{uuid.uuid4().hex}", "reason": "credits"}
            # 200 if the answer to the first call was lost: the reference grants once.
            assert self.shop.post(f"/users/{self.name}/credits/grants", body).status_code in (200, 201)
            self.bought += float(amount)
            time.sleep(2 * self.random.random())

    def check(self) -> None:
        """Each step was charged once, and the balance was never below zero."""
        for run_id in self.runs:
            run = self.driver.get(run_id)
            assert (run["status"], run["answer"], run["usage"]["turns"]) == ("completed", "42", 2)
            assert run["totalCreditsUsed"] == pytest.approx(COST)
        path = "/me/credits/ledger?limit=100"
        while path:
            page = self.driver.http.get(path).json()
            assert all(float(row["balanceAfter"]) >= 0 for row in page["items"])
            path = f"/me/credits/ledger?limit=100&cursor={page['nextCursor']}" if page["nextCursor"] else ""
        credits = self.driver.credits()
        assert (credits["held"], float(credits["balance"])) == ("0", pytest.approx(self.bought - RUNS_EACH * COST))
