"""The catalogue that a process keeps in memory."""

import dataclasses
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from cryptography.fernet import Fernet

from runs import catalogue
from runs.models import AgentModel, Provider, Tool

SECONDS = 10


@pytest.mark.parametrize(("age", "waits"), [(1.5, False), (2.5, True)])
def test_one_thread_reads_an_old_catalogue_and_only_then_do_others_wait(
    monkeypatch: Any, age: float, waits: bool
) -> None:
    """``age`` is in units of the age at which a catalogue is read again."""
    monkeypatch.setattr(catalogue, "MAX_AGE_SECONDS", 600.0)
    old = dataclasses.replace(catalogue.NOTHING, read_at=time.monotonic() - age * 600)
    new = dataclasses.replace(catalogue.NOTHING, read_at=time.monotonic())
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


@pytest.mark.django_db
def test_a_secret_that_no_key_decrypts_takes_only_its_own_models_and_tools_away(session, settings, caplog) -> None:
    keys = settings.ENCRYPTION_KEYS
    columns = {"provider_model": "m", "price_in": 0, "price_out": 0}
    for name, kept in (("good", keys), ("lost", [Fernet.generate_key().decode()])):
        settings.ENCRYPTION_KEYS = kept
        provider = Provider.objects.create(
            name=name, kind="openai", base_url="http://127.0.0.1:9", api_key="sk-made-up"
        )
        AgentModel.objects.create(name=name, display_name=name, provider=provider, **columns)
        address = {"node_type": "http", "url": "http://127.0.0.1:9", "secret_headers": '{"A": "b"}'}
        Tool.objects.create(name=f"{name}_tool", display_name=name, price=0, **address)
    settings.ENCRYPTION_KEYS = keys
    catalogue.refresh()
    models, tools = (
        [item["name"] for item in session.get(f"/api/v1/{what}").json()["items"]] for what in ("models", "tools")
    )
    assert ("good" in models, "lost" in models) == (True, False)
    assert ("good_tool" in tools, "lost_tool" in tools) == (True, False)
    assert "the model lost is left out" in caplog.text
    assert "the tool lost_tool is left out" in caplog.text
