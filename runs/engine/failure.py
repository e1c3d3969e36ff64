"""What ends a run in its worker, and the record of a failed request."""

from __future__ import annotations

from datetime import datetime, timedelta

from config.kernel import clock
from runs.catalogue.definitions import ModelDefinition
from runs.errors import FailureReason
from runs.llm.base import ModelError
from runs.llm.retry import NextRequest
from runs.models import ModelAttempt, Run


class RunFailed(Exception):
    """The run cannot continue. ``code`` is an ``errorCode`` of docs/api.md, "Runs"; ``message`` is for people;
    ``attempt`` is the failed request, if that is the cause; ``reason`` is for staff.
    """

    def __init__(
        self, code: str, message: str, attempt: ModelAttempt | None = None, reason: FailureReason | None = None
    ) -> None:
        self.code, self.message, self.attempt, self.reason = code, message, attempt, reason
        super().__init__(code, message)


def failed_request(
    run: Run,
    turn_index: int,
    model: ModelDefinition,
    error: ModelError,
    started_at: datetime,
    following: NextRequest | None,
    *,
    number: int,
    compaction: int = 0,
) -> ModelAttempt:
    """The row of a request that failed, and of what follows it."""
    now = clock.now()
    return ModelAttempt(
        run=run,
        turn_index=turn_index,
        compaction=compaction,
        number=number,
        model=model.name,
        provider=model.server.name,
        reason=error.reason,
        http_status=error.status,
        detail=error.detail,
        next_model=following.model if following else "",
        next_at=now + timedelta(seconds=following.delay_seconds) if following else None,
        started_at=started_at,
        finished_at=now,
    )
