"""What the clients need: packages of npm, and a Python environment of its own. Both are pinned in this folder,
installed under var/check at first use, and removed by ``make clean``.

A test is skipped, with a message, where npm is not installed or a registry cannot be reached.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import node
from tests.pinned import UNREACHABLE, installed

HERE = Path(__file__).resolve().parent


def run(*command: str, folder: Path | None = None, **environment: str) -> str:
    """What a program printed. It must succeed and report nothing as an error."""
    variables = os.environ | {"NO_PROXY": "*", "NO_COLOR": "1"} | environment
    options = {"cwd": folder, "env": variables, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(command, check=False, **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


class NpmFolder:
    """A folder with the sources of this one, in which the packages can be imported."""

    def __init__(self, path: Path, packages: Path) -> None:
        self.path = path
        (path / "node_modules").symlink_to(packages)
        for source in [*HERE.glob("*.ts"), *HERE.glob("*.mjs")]:
            shutil.copy(source, path)

    def run(self, *command: str, **environment: str) -> str:
        return node.run(*command, folder=self.path, packages=HERE, **environment)


@pytest.fixture(scope="session")
def packages() -> Path:
    try:
        return node.modules(HERE)
    except subprocess.TimeoutExpired as error:
        pytest.skip(f"npm's registry: {error}")
    except AssertionError as error:
        if shutil.which("npm") and not any(sign in str(error) for sign in UNREACHABLE):
            raise
        pytest.skip(f"npm or its registry: {error}")


@pytest.fixture
def npm(packages: Path, tmp_path: Path) -> NpmFolder:
    return NpmFolder(tmp_path, packages)


@pytest.fixture(scope="session")
def old_python() -> Path:
    """The interpreter of an environment with requirements.txt of this folder."""
    return installed("check", HERE / "requirements.txt", "--require-hashes") / "python"
