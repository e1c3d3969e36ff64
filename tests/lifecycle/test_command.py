"""Tests of ``manage.py run``, with a real engine."""

import io
import re
import sys
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from credits import ledger
from runs import services
from runs.catalogue import agents
from runs.models import Run, ToolInvocation, Waitpoint
from tests import factories
from tests.driver import until
from tests.threads import side_by_side

pytestmark = pytest.mark.django_db(transaction=True)


class Terminal(io.StringIO):
    """Records the status of the run at the first text."""

    status = ""

    def write(self, text: str) -> int:
        if text.strip() and not self.status:
            self.status = Run.objects.get().status
        return super().write(text)


def run(message: str, monkeypatch: Any, typed: str = "", **options: Any) -> tuple[str, str]:
    """Returns what it wrote to the standard output and to the standard error output."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    out, errors = io.StringIO(), io.StringIO()
    try:
        call_command("run", message, stdout=out, stderr=errors, **options)
    except CommandError as error:
        errors.write(str(error))
        raise
    finally:
        run.last = out.getvalue(), errors.getvalue()
    return run.last


def test_an_answer_is_streamed(bench, monkeypatch):
    terminal = Terminal()
    call_command("run", "/stream 20 30", stdout=terminal, stderr=io.StringIO())
    assert terminal.status == "running"
    assert len(terminal.getvalue().split()) == 20
    assert Run.objects.get().user.username == "console"


def test_calls_and_the_answer_have_separate_outputs(bench, user, monkeypatch):
    script = '/call calculate {"expression": "6*7"}\n/say It is {result}.'
    out, errors = run(script, monkeypatch, user=user.username, model="demo")
    assert out.strip() == "It is 42."
    assert re.search(r'calculate \{"expression": "6\*7"\}\ncalculate COMPLETED, 0.1 credits', errors)
    assert Run.objects.get().user == user
    assert Run.objects.get().requested_model == "demo"


def test_a_run_has_the_agent(bench, user, monkeypatch):
    agents.save("support", display_name="Support", tools=["calculate"])
    run("/say hi", monkeypatch, user=user.username, agent="support")
    run("/say hi", monkeypatch, user=user.username, agent="support@1")
    assert list(Run.objects.values_list("agent", "tools")) == [("support@1", ["calculate"])] * 2


@pytest.mark.parametrize(("typed", "status"), [("maybe\ny\n", "COMPLETED"), ("\n", "REFUSED")])
def test_an_approval_is_asked(bench, user, monkeypatch, typed, status):
    script = '/call draw_chart {"title": "T", "series": [1, 2]}\n/say done'
    out, errors = run(script, monkeypatch, typed, user=user.username)
    assert out.strip() == "done"
    assert 'draw_chart {"title": "T", "series": [1, 2]} costs up to 12 credits' in errors
    assert f"draw_chart {status}" in errors


def test_a_question_is_asked(bench, user, monkeypatch):
    out, errors = run("/ask Which colour?\n/say {result}", monkeypatch, "\nblue\n", user=user.username)
    assert "Which colour?" in errors
    assert "blue" in out
    assert Waitpoint.objects.get().resolved_payload["answer"] == "blue"


def test_a_question_without_input_leaves_the_run_waiting(bench, user, monkeypatch):
    with pytest.raises(CommandError, match="waits for an answer to wp_"):
        run("/ask Which colour?", monkeypatch, user=user.username)
    assert Run.objects.get().status == "waiting"


def test_a_failed_run_fails_the_command(bench, user, monkeypatch):
    with pytest.raises(CommandError, match=r"The run failed: MODEL_ERROR"):
        run("/fail broken", monkeypatch, user=user.username)


def test_a_run_that_is_cancelled_elsewhere_fails_the_command(bench, user, monkeypatch):
    real = services.start_run

    def start(*arguments: Any, **options: Any) -> Run:
        started = real(*arguments, **options)
        services.cancel_run(started)
        return started

    monkeypatch.setattr(services, "start_run", start)
    with pytest.raises(CommandError, match=r"The run was cancelled\."):
        run("/wait 60", monkeypatch, user=user.username)


def test_an_interrupt_cancels_the_run(bench, user, monkeypatch):
    def interrupt() -> str:
        raise KeyboardInterrupt

    stdin = io.StringIO()
    stdin.readline = interrupt
    monkeypatch.setattr(sys, "stdin", stdin)
    with pytest.raises(CommandError, match="cancelled"):
        call_command("run", "/ask Which?", user=user.username, stdout=io.StringIO(), stderr=io.StringIO())
    assert Run.objects.get().status == "cancelled"


def test_wrong_arguments_are_named(user, monkeypatch, settings):
    with pytest.raises(CommandError, match="no user"):
        run("Hi", monkeypatch, user="nobody")
    with pytest.raises(CommandError, match="no model named x"):
        run("Hi", monkeypatch, user=user.username, model="x")
    with pytest.raises(CommandError, match="no agent named x"):
        run("Hi", monkeypatch, user=user.username, agent="x")
    with pytest.raises(CommandError, match=r"^message: "):
        run("", monkeypatch, user=user.username)
    poor = factories.UserFactory(is_active=False)
    with pytest.raises(CommandError, match="not active"):
        run("Hi", monkeypatch, user=poor.username)
    assert not Run.objects.exists()


def test_a_model_does_not_control_the_terminal(bench, user, monkeypatch):
    out, _ = run("/say \x1b[2Jgone \x9b31m", monkeypatch, user=user.username)
    assert "\x1b" not in out
    assert "\x9b" not in out
    assert "gone" in out


def test_a_call_that_takes_long_says_how_to_end_it(bench, user, monkeypatch):
    def end() -> None:
        call = until(lambda: ToolInvocation.objects.filter(awaiting="tool").first())
        call_command("callback", call.id, result="Ulm", stdout=io.StringIO())

    def ask() -> tuple[str, str]:
        return run('/call long_job {"seconds": 300}\n/say {result}', monkeypatch, user=user.username)

    (out, errors), _ = side_by_side(2, lambda index: (ask, end)[index]())
    assert out.strip() == "Ulm"
    assert f"manage.py callback {ToolInvocation.objects.get().id} --result TEXT" in errors


def test_a_run_that_waits_for_credits_asks_nobody(bench, user, monkeypatch):
    agents.save("patient", display_name="Patient", on_credits_exhausted="wait")
    ledger.adjust(
        user.pk,
        -ledger.account_for(user.pk).available + 100_000,
        reason="almost all",
        staff=factories.UserFactory(is_staff=True),
    )

    def pay() -> None:
        until(lambda: Waitpoint.objects.filter(status="PENDING").exists())
        ledger.grant(user.pk, 5_000_000, cause="paid")

    def ask() -> tuple[str, str]:
        return run("/say ok", monkeypatch, user=user.username, agent="patient")

    (out, errors), _ = side_by_side(2, lambda index: (ask, pay)[index]())
    assert out.strip() == "ok"
    assert "Approve?" not in errors
