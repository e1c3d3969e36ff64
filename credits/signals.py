"""What credits tell the apps above them."""

from django.dispatch import Signal

# Sent in the transaction that adds credits to an account by a grant, a refund or an adjustment. Argument: user_id.
credits_added = Signal()
