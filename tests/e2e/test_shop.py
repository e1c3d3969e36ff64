"""The shop of docs/examples: it sells credits, an empty account pauses a run, and a payment resumes it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.driver import until
from tests.e2e.conftest import NOT_NEEDED
from tests.stack.plugin import given_services
from tests.stack.process import ROOT, free_port
from tests.stack.stack import Stack

pytestmark = pytest.mark.stack

SHOP = ROOT / "docs" / "examples" / "shop.py"
PREPARE = """
from pathlib import Path
from apikeys.keys import create_server_key
Path({path!r}).write_text(create_server_key("shop", ["credits", "session-tokens"])[1])
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    key: Path = tmp_path_factory.mktemp("shop") / "key"
    environment = {"SIGNUP_CREDITS": "0.1", "SESSION_TOKENS": "1"}
    prepare = PREPARE.format(path=str(key))
    with Stack(**given_services(), environment=environment, prepare=prepare, without=NOT_NEEDED) as stack:
        port = str(free_port())
        given = {"API": f"{stack.url}/api/v1", "SERVER_KEY": key.read_text(), "SHOP_PORT": port}
        with subprocess.Popen([sys.executable, str(SHOP)], env=given, stderr=subprocess.DEVNULL) as process:
            try:
                url = f"http://127.0.0.1:{port}"
                until(lambda: process.poll() is not None or answers(url))
                yield url
            finally:
                process.kill()


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.ConnectionError:
        return False


def test_it_is_short() -> None:
    assert len(SHOP.read_text().splitlines()) <= 60


def test_a_payment_resumes_a_run_that_waits(shop: str) -> None:
    page = requests.post(f"{shop}/ask", {"message": "/say <b>sold</b>"}, timeout=10).text
    page = until(lambda: "waits for credits" in (text := requests.get(shop, timeout=10).text) and text)
    assert "<h1>0.1 credits</h1>" in page
    payment = re.findall('name="payment" value="([^"]+)"', page)[0]
    for _ in range(2):  # payment providers repeat their webhooks
        requests.post(f"{shop}/pay", {"payment": payment}, timeout=10)
    page = until(lambda: "completed" in (text := requests.get(shop, timeout=10).text) and text)
    assert "<li>completed: &lt;b&gt;sold&lt;/b&gt; (" in page
    # The page shows the balance as it was just before the run's state, so once more.
    (available,) = re.findall("<h1>([0-9.]+) credits", requests.get(shop, timeout=10).text)
    assert 25 < float(available) < 25.1
