"""The catalogue that a process keeps in memory."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from runs import catalogue
from runs.models import Tool

SECONDS = 10


@pytest.mark.parametrize(("age", "waits"), [(1.5, False), (2.5, True)])
def test_one_thread_reads_an_old_catalogue_and_only_then_do_others_wait(
    monkeypatch: Any, age: float, waits: bool
) -> None:
    """``age`` is in units of the age at which a catalogue is read again."""
    monkeypatch.setattr(catalogue, "MAX_AGE_SECONDS", 600.0)
    old = catalogue.Catalogue({}, {}, read_at=time.monotonic() - age * 600)
    new = catalogue.Catalogue({}, {}, read_at=time.monotonic())
    reads, begun, done = [], threading.Event(), threading.Event()

    def slow_refresh() -> catalogue.Catalogue:
        reads.append(threading.get_ident())
        begun.set()
        assert done.wait(SECONDS)
        return new

    monkeypatch.setattr(catalogue, "_current", old)
    monkeypatch.setattr(catalogue, "refresh", slow_refresh)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(catalogue.read)
        assert begun.wait(SECONDS)
        second = threads.submit(catalogue.read)
        try:
            if not waits:
                assert second.result(SECONDS) is old
        finally:
            done.set()
        assert first.result() is new
        assert second.result() is (new if waits else old)
    assert len(reads) == (2 if waits else 1)


@pytest.mark.django_db
def test_what_was_read_before_a_change_is_not_kept(monkeypatch: Any) -> None:
    """Another thread reads the rows while this one changes one and forgets the cache."""
    read_fallbacks = catalogue._fallbacks

    def change() -> dict[str, list[str]]:
        monkeypatch.setattr(catalogue, "_fallbacks", read_fallbacks)
        Tool.objects.filter(name="calculate").update(price=700_000)
        catalogue.forget()
        return read_fallbacks()

    monkeypatch.setattr(catalogue, "_fallbacks", change)
    catalogue.refresh()
    assert catalogue.read().tools["calculate"].price == 700_000
