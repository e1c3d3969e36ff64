"""What the fault tests share: an engine in the test's own process, and a service at work."""

from tests.lifecycle.conftest import bench, engines, events

__all__ = ["bench", "engines", "events"]
