"""Only the transitions may change a status. Every other write fails at run time."""

from collections.abc import Callable
from typing import Any

import pytest
from django.apps import apps
from django.db import models, transaction

from chats.models import Attachment
from config.database.protected import FieldIsProtected, Key, ProtectedModel, take_key
from config.database.writes import Writes
from runs.models import Run, ToolInvocation, Waitpoint
from tests import factories
from webhooks.models import Delivery

pytestmark = pytest.mark.django_db

FACTORIES: dict[type[ProtectedModel], Any] = {
    Attachment: factories.AttachmentFactory,
    Delivery: factories.DeliveryFactory,
    Run: factories.RunFactory,
    ToolInvocation: factories.ToolInvocationFactory,
    Waitpoint: factories.WaitpointFactory,
}


def save_with(row: Any, **options: Any) -> None:
    row.status = "X"
    row.save(**options)


def bulk_update(row: Any) -> None:
    row.status = "X"
    type(row).objects.bulk_update([row], ["status"])


def upsert(row: Any) -> None:
    type(row).objects.bulk_create([row], update_conflicts=True, update_fields=["status"], unique_fields=["id"])


PATHS: dict[str, Callable[[Any], Any]] = {
    "Writes.update": lambda row: Writes().update(type(row), {"id": row.pk}, {"status": "X"}),
    "Writes.update with another key": lambda row: Writes().update(type(row), {"id": row.pk}, {"status": "X"}, Key()),
    "QuerySet.update": lambda row: type(row).objects.filter(pk=row.pk).update(status="X"),
    "QuerySet.change": lambda row: type(row).objects.filter(pk=row.pk).change(Key(), status="X"),
    "QuerySet.update of the default manager": lambda row: type(row)._default_manager.update(status="X"),
    "QuerySet.update_or_create": lambda row: type(row).objects.update_or_create({"status": "X"}, pk=row.pk),
    "QuerySet.bulk_update": bulk_update,
    "QuerySet.bulk_create": upsert,
    "save": save_with,
    "save of the field": lambda row: save_with(row, update_fields=["status"]),
    "save of another object": lambda row: save_with(type(row)(pk=row.pk), update_fields=["status"]),
    "save by force": lambda row: save_with(type(row)(pk=row.pk), force_update=True),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", FACTORIES)
def test_no_write_changes_a_status_without_the_key(model, path):
    row = FACTORIES[model]()
    status = row.status
    with pytest.raises(FieldIsProtected, match="status"), transaction.atomic():
        PATHS[path](row)
    assert model.objects.get(pk=row.pk).status == status


def test_related_rows_are_protected_too(user):
    run = factories.RunFactory(chat__user=user)
    with pytest.raises(FieldIsProtected):
        run.chat.runs.update(status="failed")
    with pytest.raises(FieldIsProtected):
        user.runs.update(worker_id=None)


def test_a_lease_is_protected():
    for field in ("worker_id", "lease_token"):
        with pytest.raises(FieldIsProtected):
            Writes().update(Run, {"id": "run_1"}, {field: 1})


def test_other_fields_of_a_stored_row_may_change():
    run = factories.RunFactory()
    run.unrecorded_text = True
    run.save(update_fields=["unrecorded_text"])
    assert Run.objects.filter(unrecorded_text=True).update(unrecorded_text=False) == 1


@pytest.mark.parametrize("model", FACTORIES)
def test_each_models_key_can_be_obtained_once(model):
    with pytest.raises(RuntimeError, match=model.__name__):
        take_key(model)


def test_every_model_with_a_status_is_protected():
    with_status = {
        model
        for model in apps.get_models()
        if model.__module__.partition(".")[0] in ("config", "chats", "runs", "credits", "apikeys", "webhooks")
        and any(isinstance(field, models.Field) and field.name == "status" for field in model._meta.get_fields())
    }
    assert {model for model in with_status if not issubclass(model, ProtectedModel)} == set()
    assert with_status == set(FACTORIES)
