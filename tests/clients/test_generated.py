"""Clients that generators make of the service's document. Each is compiled and executes a run."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import HERE, NpmFolder, run
from tests.stack.process import ROOT
from tests.stack.stack import Stack

pytestmark = [pytest.mark.services, pytest.mark.stack, pytest.mark.timeout(600)]

STRICT = {
    "strict": True,
    "noEmitOnError": True,
    # Half the time of a compilation. What the generators make is no library.
    "skipLibCheck": True,
    "module": "commonjs",
    "target": "es2022",
    "lib": ["es2022", "dom", "dom.iterable"],
    "types": [],
}
DOCUMENT = str(ROOT / "docs" / "openapi.json")
EXPECTED = {
    "status": "completed",
    "listed": True,
    "code": "NOT_FOUND",
    "answer": "done",
    "said": "done",
    "finishReason": "stop",
    "turns": 1,
}


def compiled(npm: NpmFolder, script: str, **options: Any) -> None:
    # A global of Node. The packages do not contain its type.
    (npm.path / "node.d.ts").write_text("declare const process: { argv: string[]; exit(status: number): never };\n")
    (npm.path / "tsconfig.json").write_text(
        json.dumps({"compilerOptions": STRICT | options, "files": ["node.d.ts", script]})
    )
    npm.run("tsc", "-p", ".")


def test_openapi_typescript(stack: Stack, npm: NpmFolder) -> None:
    npm.run("openapi-typescript", DOCUMENT, "-o", "schema.ts")
    compiled(npm, "openapi_fetch.ts", exactOptionalPropertyTypes=True, noUncheckedIndexedAccess=True)
    said = npm.run("node", "openapi_fetch.js", stack.url, stack.token("ada"), stack.api_key("ada"))
    refused = {"name": "draw_chart", "status": "REFUSED", "result": None, "creditUsed": 0}
    made = {"name": "calculate", "status": "COMPLETED", "result": "42", "creditUsed": 0.1}
    more = {"calls": [refused, made], "extended": True, "roles": ["assistant", "user"], "turns": 2}
    assert json.loads(said) == EXPECTED | {"metadata": {"order": "A-1"}} | more


def test_hey_api(stack: Stack, npm: NpmFolder) -> None:
    npm.run("openapi-ts", "--input", DOCUMENT, "--output", "generated", "--silent")
    compiled(npm, "hey_api.ts")
    assert json.loads(npm.run("node", "hey_api.js", stack.url, stack.api_key("ada"))) == EXPECTED | {
        "metadata": {"order": "A-2"}
    }


def test_openapi_generator(stack: Stack, old_python: Path, tmp_path: Path) -> None:
    document = tmp_path / "document.json"
    document.write_bytes(stack.session("ada").get(f"{stack.url}/api/schema/without-webhooks?format=json").content)
    generator = str(old_python.with_name("openapi-generator-cli"))
    options = ["-g", "python", "-i", str(document), "-o", str(tmp_path / "made"), "--package-name", "agents"]
    run(generator, "generate", *options)
    script = str(HERE / "openapi_generator_client.py")
    said = run(str(old_python), script, str(tmp_path / "made"), stack.url, stack.api_key("ada"))
    assert json.loads(said) == EXPECTED | {"metadata": {"order": "A-3"}}
