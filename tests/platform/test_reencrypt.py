"""``manage.py reencrypt_secrets``: it changes the encryption key of every stored secret."""

from io import StringIO

import pytest
from cryptography.fernet import Fernet
from django.core.management import CommandError, call_command
from django.db import transaction

from config.kernel.encryption import DecryptionFailed
from runs.models import Tool
from tests import factories
from webhooks.models import Endpoint

pytestmark = pytest.mark.django_db


def reencrypt() -> str:
    said, progress = StringIO(), StringIO()
    call_command("reencrypt_secrets", stdout=said, stderr=progress)
    assert "1 of 1 checked: secret of webhooks.Endpoint" in progress.getvalue()
    return said.getvalue()


@pytest.fixture
def keys(settings) -> tuple[str, str]:
    """The current key and the next key."""
    settings.ENCRYPTION_KEYS = [Fernet.generate_key().decode()]
    return settings.ENCRYPTION_KEYS[0], Fernet.generate_key().decode()


def test_the_old_key_is_not_needed_afterwards(settings, keys):
    old, new = keys
    endpoint = factories.EndpointFactory(secondary_secret="cd" * 32)
    tool = Tool.objects.order_by("name").first()
    Tool.objects.filter(pk=tool.pk).update(secret_headers='{"X-Key": "hush"}')
    settings.ENCRYPTION_KEYS = [new, old]
    assert Endpoint.objects.get().secret == endpoint.secret
    assert reencrypt() == "3 re-encrypted.\n"
    assert reencrypt() == "0 re-encrypted.\n"
    settings.ENCRYPTION_KEYS = [new]
    found = Endpoint.objects.get()
    assert (found.secret, found.secondary_secret) == (endpoint.secret, "cd" * 32)
    assert Tool.objects.get(pk=tool.pk).secret_headers == '{"X-Key": "hush"}'


def test_undecryptable_secrets_are_reported_and_unchanged(settings, keys):
    old, new = keys
    lost = factories.EndpointFactory()
    settings.ENCRYPTION_KEYS = [new]
    kept = factories.EndpointFactory()
    said = StringIO()
    with pytest.raises(CommandError, match="1 not decrypted"):
        call_command("reencrypt_secrets", stdout=said)
    assert f"secret of webhooks.Endpoint {lost.pk}" in said.getvalue()
    assert Endpoint.objects.get(pk=kept.pk).secret == kept.secret
    settings.ENCRYPTION_KEYS = [new, old]
    assert Endpoint.objects.get(pk=lost.pk).secret == lost.secret


def test_a_secret_that_no_key_decrypts_is_never_overwritten(settings, keys):
    old, new = keys
    tool = Tool.objects.order_by("name").first()
    Tool.objects.filter(pk=tool.pk).update(secret_headers='{"X-Key": "hush"}')
    settings.ENCRYPTION_KEYS = [new]
    with pytest.raises(DecryptionFailed), transaction.atomic():
        Tool.objects.get(pk=tool.pk).save()
    settings.ENCRYPTION_KEYS = [old]
    assert Tool.objects.get(pk=tool.pk).secret_headers == '{"X-Key": "hush"}'
