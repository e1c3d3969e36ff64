"""System checks of the settings of this app: a wrong setting must fail at start, not at the first request."""

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, register

from config.kernel import money


@register()
def signup_credits(**kwargs: Any) -> list[CheckMessage]:
    try:
        money.parse(settings.SIGNUP_CREDITS, minimum=0, field="SIGNUP_CREDITS")
    except ValueError as error:
        return [Error(str(error), hint="Use a number of credits, such as 100.", id="credits.E001")]
    return []
