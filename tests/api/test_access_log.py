"""gunicorn's access log: lines are formatted only if an operator enables the log."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from gunicorn import glogging

from config.serve.web import Logger


@pytest.mark.parametrize(
    ("accesslog", "syslog", "lines"), [(None, False, 0), ("-", False, 1), ("access.log", False, 1), (None, True, 1)]
)
def test_a_line_is_formatted_only_if_the_log_is_enabled(monkeypatch, accesslog, syslog, lines):
    made = []
    monkeypatch.setattr(glogging.Logger, "access", lambda self, *args: made.append(args))
    logger = Logger.__new__(Logger)  # gunicorn's own __init__ sets up the loggers of the whole process
    logger.cfg = SimpleNamespace(accesslog=accesslog, syslog=syslog, logconfig_dict={"version": 1})
    logger.access("response", "request", {}, "time")
    assert len(made) == lines
