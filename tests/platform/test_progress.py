"""Long commands show their progress on the standard error: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import OutputWrapper

from config.management.progress import Progress
from tests import factories
from tests.stack.process import ROOT, python


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_on_a_terminal_is_drawn_in_place():
    screen = Terminal()
    progress = Progress(OutputWrapper(screen))
    for done in (1, 3):
        progress.show("rows", done, 3)
    progress.show("files", 0, 0)
    progress.close()
    assert screen.getvalue() == (
        f"\r[{'#' * 10}{'.' * 20}] 1 of 3 rows\x1b[K\r[{'#' * 30}] 3 of 3 rows\x1b[K\n"
        f"\r[{'.' * 30}] 0 of 0 files\x1b[K\n"
    )


def test_lines_elsewhere_are_few():
    file = io.StringIO()
    progress = Progress(OutputWrapper(file))
    for done in range(1, 1001):
        progress.show("rows", done, 1000)
    progress.close()
    assert file.getvalue() == "1000 of 1000 rows\n"


@pytest.mark.django_db
def test_results_and_progress_are_apart(user):
    for _ in range(3):
        factories.ChatFactory(user=user)
    out, err = io.StringIO(), io.StringIO()
    call_command("export_user", user.username, stdout=out, stderr=err)
    assert "3 of 3 chats" in err.getvalue().splitlines()
    assert all(line.startswith("{") for line in out.getvalue().splitlines())
    call_command("recount_usage", stdout=io.StringIO(), stderr=err)
    assert re.search(r"^(\d+) of \1 accounts counted$", err.getvalue(), re.M)


@pytest.mark.django_db
def test_a_catalogue_that_is_applied_at_once_has_no_lines(tmp_path):
    file = tmp_path / "catalogue.yaml"
    file.write_text("models: []\n")
    screen, log = Terminal(), io.StringIO()
    call_command("catalogue", "apply", str(file), stdout=screen, stderr=screen)
    call_command("catalogue", "apply", str(file), stdout=io.StringIO(), stderr=log)
    assert "0 of 5 parts of the catalogue: providers" in screen.getvalue()
    assert "\nThe catalogue is as " in screen.getvalue()
    assert log.getvalue() == ""


@pytest.mark.slow
def test_a_command_at_a_real_terminal_has_a_bar_and_its_output_in_the_pipe(tmp_path: Path):
    environment = {"PATH": os.environ["PATH"], "VAR_DIR": str(tmp_path), "LOG_LEVEL": "WARNING", "TERM": "xterm"}
    subprocess.run(python("manage.py", "migrate", "-v0"), cwd=ROOT, env=environment, check=True)
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        done = subprocess.run(
            python("manage.py", "check_invariants"),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
            check=True,
        )
        os.close(theirs)
        shown = screen.read(4096).decode()
    assert done.stdout == "All invariants hold.\n"
    assert re.search(r"\r\[#+\.+\] 1 of \d+ states\x1b\[K\r\n\r\[#+\.+\] 2 of ", shown)
