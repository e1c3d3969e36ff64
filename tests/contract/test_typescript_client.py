"""A TypeScript client generated from the committed schema. It is compiled in strict mode and performs a run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import node
from tests.stack.process import ROOT
from tests.stack.stack import Stack

pytestmark = [pytest.mark.services, pytest.mark.stack]

STRICT = {
    "strict": True,
    "exactOptionalPropertyTypes": True,
    "noUncheckedIndexedAccess": True,
    "noEmitOnError": True,
    "module": "commonjs",
    "target": "es2022",
    "lib": ["es2022", "dom"],
    "types": [],
}


def test_the_client_completes_a_run(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "node_modules").symlink_to(node.modules())
    shutil.copy(node.HERE / "client.ts", tmp_path)
    # A global of Node. The packages do not contain its type.
    (tmp_path / "node.d.ts").write_text("declare const process: { argv: string[]; exit(status: number): never };\n")
    (tmp_path / "tsconfig.json").write_text(json.dumps({"compilerOptions": STRICT, "include": ["*.ts"]}))
    # Without this option every field with a default would be required in a request.
    options = ["--default-non-nullable=false", "-o", "schema.ts"]
    node.run("openapi-typescript", str(ROOT / "docs" / "openapi.json"), *options, folder=tmp_path)
    node.run("tsc", "-p", ".", folder=tmp_path)
    said = node.run("node", "client.js", stack.url, stack.token("ada"), stack.api_key("ada"), folder=tmp_path)
    assert json.loads(said) == {
        "status": "completed",
        "calls": [{"name": "draw_chart", "status": "COMPLETED", "used": 12}],
        "code": "NOT_FOUND",
    }
