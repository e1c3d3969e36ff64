"""What is declared in one table is read from it, by the code and by the documents."""

from __future__ import annotations

import pickle

import pytest

from config.kernel.choices import StatusChoices

# The names that unfold colours the labels of a column by.
TONES = {"default", "info", "success", "warning", "danger"}


@pytest.mark.parametrize("statuses", StatusChoices.__subclasses__(), ids=lambda statuses: statuses.__qualname__)
def test_a_status_is_its_value_with_a_tone(statuses: type[StatusChoices]) -> None:
    assert {status.tone for status in statuses} <= TONES
    assert statuses.all_final()
    assert statuses.all_live()
    for status in statuses:
        assert status == status.value
        assert statuses(status.value) is pickle.loads(pickle.dumps(status)) is status
        assert status.live is not status.final
