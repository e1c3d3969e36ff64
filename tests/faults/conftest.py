"""Fixtures of the fault tests: an engine in the test process, and a running service."""

from tests.lifecycle.conftest import bench, engines, events

__all__ = ["bench", "engines", "events"]
