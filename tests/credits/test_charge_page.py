"""The code of docs/charge.md, against a real server."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from apikeys.keys import create_server_key
from credits.models import Account

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "charge.md").read_text()
pytestmark = pytest.mark.django_db(transaction=True)


def snippet(language: str) -> str:
    (found,) = re.findall(rf"^```{language} charge\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    return found


def test_the_python_of_the_page_sells_and_takes_back(live_server):
    scope: dict = {}
    exec(snippet("python"), scope)
    call = live_server.url, create_server_key("shop", ["credits"])[1], "auth0|4711"
    grant = scope["paid"](*call, "pay_1", "25")
    assert scope["paid"](*call, "pay_1", "25") == grant
    assert Account.objects.get().balance == 125_000_000
    assert scope["refunded"](*call, grant, "re_1", "unspent") == {"revoked": "25", "balance": "100"}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_the_javascript_of_the_page_sells_and_takes_back(live_server):
    call = json.dumps([live_server.url, create_server_key("shop", ["credits"])[1], "auth0|4711"])
    script = (
        snippet("javascript")
        + f"""
        const grant = await paid(...{call}, "pay_1", "25");
        if (await paid(...{call}, "pay_1", "25") !== grant) throw new Error("granted twice");
        console.log(JSON.stringify(await refunded(...{call}, grant, "re_1", "all")));
    """
    )
    command = ["node", "--input-type=module", "--eval", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"revoked": "25", "balance": "100"}
