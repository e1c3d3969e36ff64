"""Re-encrypts each stored secret with the first key of ENCRYPTION_KEYS, so that the other keys can be removed."""

from typing import Any

from django.apps import apps
from django.core.management.base import BaseCommand, CommandError
from django.db import models
from django.db.models.functions import Cast

from config.kernel.encryption import DecryptionFailed, EncryptedField, decrypt, is_current
from config.management import progress


class Command(BaseCommand):
    help = "Re-encrypt each stored secret with the first key of ENCRYPTION_KEYS. Exit 1 if no key decrypts one of them."

    def handle(self, *args: Any, **options: Any) -> None:
        renewed, lost = 0, []
        show = progress(self.stderr)
        fields = [(model, field) for model in apps.get_models() for field in model._meta.concrete_fields]
        for model, field in [(model, field) for model, field in fields if isinstance(field, EncryptedField)]:
            name = f"{field.verbose_name} of {model._meta.label}"
            rows = model._default_manager.annotate(cipher=Cast(field.name, models.TextField())).exclude(cipher=None)
            total = rows.count()
            for done, (key, cipher) in enumerate(rows.values_list("pk", "cipher").iterator(), 1):
                show(f"checked: {name}", done, max(done, total))
                if is_current(cipher):
                    continue
                try:
                    plain = decrypt(cipher)
                except DecryptionFailed:
                    lost.append(f"{name} {key}")
                    continue
                # Filtered by the old ciphertext, so that a secret that changed in the meantime is kept.
                renewed += rows.filter(pk=key, cipher=cipher).update(**{field.name: plain})
        for secret in lost:
            self.stdout.write(f"No key of ENCRYPTION_KEYS decrypts {secret}.")
        self.stdout.write(f"{renewed} re-encrypted.")
        if lost:
            hint = "Add the old key to ENCRYPTION_KEYS again, or replace these secrets."
            raise CommandError(f"{len(lost)} not decrypted. {hint}")
