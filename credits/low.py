"""Reports to the installation endpoint each fall of a balance below a threshold. The statement that changes an account
marks the fall, and a sweep reports the marks, so that no charge waits for an event.
"""

from functools import lru_cache

from django.conf import settings
from django.db import transaction

from config.kernel import money
from credits.models import Account
from webhooks import outbox
from webhooks.events import CreditsEvent

SWEEP_BATCH = 100
_parsed = lru_cache(maxsize=8)(money.parse_list)


def thresholds() -> tuple[int, ...]:
    """CREDITS_LOW_THRESHOLDS in micro-credits."""
    return _parsed(settings.CREDITS_LOW_THRESHOLDS)


def report() -> int:
    """Report all marks. Returns the number of accounts."""
    marked, done = Account.objects.exclude(low_due=0), 0
    for user_id in list(marked.values_list("pk", flat=True)[:SWEEP_BATCH]):
        with transaction.atomic():
            account = marked.select_for_update(no_key=True).filter(pk=user_id).first()
            if account is None:  # another sweep was faster
                continue
            for bit, threshold in enumerate(thresholds()):
                if account.low_due >> bit & 1:
                    fields = {"available": account.available, "threshold": threshold}
                    numbers = {name: money.to_number(amount) for name, amount in fields.items()}
                    outbox.report_credits(user_id, CreditsEvent.LOW, numbers)
            Account.objects.filter(pk=user_id).update(low_due=0)
            done += 1
    return done
