"""``POST /api/callbacks/{token}``: the outcome or the progress of a parked call, from its tool. The address is the
credential.
"""

from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.views.decorators.csrf import csrf_exempt

from config.api import ratelimit
from config.api.errors import answers_errors
from config.kernel import clock
from config.kernel.encryption import DecryptionFailed
from config.kernel.errors import MethodNotAllowed, NotFound, PayloadTooLarge, Unauthorized, Unavailable
from config.kernel.jsontext import dumps
from config.limits.window import Bucket
from config.telemetry import logs
from runs import services
from runs.models import Tool, ToolInvocation
from runs.tools import callbacks
from runs.tools.base import parse_signing_secret

# Of one call, a minute.
CALLBACKS_PER_MINUTE = 60


@csrf_exempt
@answers_errors("a callback failed")
def receive(request: HttpRequest, token: str) -> HttpResponse:
    """200 says what became of the callback, after the commit."""
    # Django logs the path of a failed request, and this one is a credential.
    request.path = request.path_info = callbacks.PATH
    if request.method != "POST":
        raise MethodNotAllowed(headers={"Allow": "POST"})
    try:
        call = _call_of(token)
    except NotFound:
        ratelimit.refuse_if_over(ratelimit.charge_address(request))
        raise
    ratelimit.charge_caller(request, Bucket(f"callback:{call.pk}", CALLBACKS_PER_MINUTE))
    return HttpResponse(dumps(_take(request, call)), content_type="application/json")


def _call_of(token: str) -> ToolInvocation:
    call_id = callbacks.call_of(token)
    call = ToolInvocation.objects.filter(pk=call_id).defer("result", "input").first() if call_id else None
    if call is None:
        raise NotFound
    return call


def _secret_of(call: ToolInvocation) -> str:
    """What the callbacks of the call's tool are signed with; empty if they need no signature."""
    try:
        tool = Tool.objects.only("signing_secret", "unsigned_callbacks").filter(name=call.name).first()
    except DecryptionFailed:
        raise Unavailable from None
    return "" if tool is None or tool.unsigned_callbacks else parse_signing_secret(tool.signing_secret)


def _take(request: HttpRequest, call: ToolInvocation) -> dict[str, Any]:
    logs.run_id.set(call.run_id)
    size = int(request.META.get("CONTENT_LENGTH") or 0)
    if size > settings.TOOL_ANSWER_MAX_BYTES:
        raise PayloadTooLarge(f"A callback has at most {settings.TOOL_ANSWER_MAX_BYTES} bytes.")
    body = request.read(size)
    secret, now = _secret_of(call), clock.now().timestamp()
    if secret and not callbacks.is_signed(request.headers, body, secret, now):
        raise Unauthorized("The callback has no valid signature, or one that is too old.")
    said = callbacks.read(body, request.headers.get("Content-Type", ""), name=call.name, price=call.credit_estimate)
    recorded = services.record_callback(call, said)
    return {"toolInvocationId": call.pk, "status": recorded.call.status, "accepted": recorded.accepted}
