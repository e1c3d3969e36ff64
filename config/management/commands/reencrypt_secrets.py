"""Encrypts every stored secret with the first of ENCRYPTION_KEYS, so that the keys behind it can be dropped."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError
from django.db import models
from django.db.models.functions import Cast

from config.kernel.encryption import DecryptionFailed, EncryptedField, decrypt, is_current

TELL_EVERY = 10_000


class Command(BaseCommand):
    help = "Encrypt every stored secret anew with the first of ENCRYPTION_KEYS; exit 1 if no key opens one of them."

    def handle(self, *args: Any, **options: Any) -> None:
        renewed = lost = seen = 0
        for model, field in encrypted_fields():
            rows = model._default_manager.annotate(cipher=Cast(field.name, models.TextField()))
            for key, cipher in rows.exclude(cipher=None).values_list("pk", "cipher").iterator():
                seen += 1
                if seen % TELL_EVERY == 0:
                    self.stderr.write(f"{seen} looked at")
                if is_current(cipher):
                    continue
                try:
                    plain = decrypt(cipher)
                except DecryptionFailed:
                    lost += 1
                    self.stdout.write(
                        f"No key of ENCRYPTION_KEYS opens {field.verbose_name} of {model._meta.label} {key}."
                    )
                    continue
                # The old ciphertext again: a secret that was changed meanwhile is left alone.
                renewed += rows.filter(pk=key, cipher=cipher).update(**{field.name: plain})
        self.stdout.write(f"{renewed} encrypted anew.")
        if lost:
            raise CommandError(f"{lost} not readable: put the key back that they were encrypted with, or replace them.")


def encrypted_fields() -> Iterator[tuple[type[models.Model], EncryptedField]]:
    for model in apps.get_models():
        for field in model._meta.concrete_fields:
            if isinstance(field, EncryptedField):
                yield model, field
