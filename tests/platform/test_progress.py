"""Long commands show their progress on the standard error."""

import io
import re

import pytest
from django.core.management import call_command
from django.core.management.base import OutputWrapper

from config.management import progress
from tests import factories


def test_lines_are_few():
    file = io.StringIO()
    file.isatty = lambda: True
    out = OutputWrapper(file)
    out.style_func = "red {}".format  # at a terminal, Django shows the standard error as an error
    show = progress(out)
    for done in range(1, 1001):
        show("rows", done, 1000)
    assert file.getvalue() == "1000 of 1000 rows\n"


@pytest.mark.django_db
def test_results_and_progress_are_apart(user):
    for _ in range(3):
        factories.ChatFactory(user=user)
    out, err = io.StringIO(), io.StringIO()
    call_command("export_user", user.username, stdout=out, stderr=err)
    assert "3 of 3 chats" in err.getvalue().splitlines()
    assert all(line.startswith("{") for line in out.getvalue().splitlines())


@pytest.mark.django_db
@pytest.mark.parametrize("name", ["check_invariants", "reconcile_credits"])
def test_each_step_of_a_long_command_is_shown(name):
    out, err = io.StringIO(), io.StringIO()
    call_command(name, stdout=out, stderr=err)
    assert re.match(r"1 of (\d+) \w+\n2 of \1 ", err.getvalue())
    assert " of " not in out.getvalue().partition("\n")[0]
