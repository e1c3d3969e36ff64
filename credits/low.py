"""Reports to the installation endpoint each fall of a balance below a threshold. The statement that changes an account
marks the fall, and a sweep reports the marks, so that no charge waits for an event.
"""

from functools import lru_cache

from django.conf import settings
from django.db import transaction

from config.database.batches import in_order
from config.kernel import money
from config.queue import jobs
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
    marked = Account.objects.exclude(low_due=0)
    return sum(jobs.each("sweep-low-credits", in_order(marked, "pk", SWEEP_BATCH), _report))


@transaction.atomic
def _report(user_id: int) -> bool:
    """False if another sweep was faster."""
    account = Account.objects.select_for_update(no_key=True).get(pk=user_id)
    for bit, threshold in enumerate(thresholds()):
        if account.low_due >> bit & 1:
            fields = {"available": account.available, "threshold": threshold}
            numbers = {name: money.to_number(amount) for name, amount in fields.items()}
            outbox.report_credits(user_id, CreditsEvent.LOW, numbers)
    return bool(Account.objects.filter(pk=user_id).exclude(low_due=0).update(low_due=0))
