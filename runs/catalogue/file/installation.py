"""The section ``installationEndpoint`` of the catalogue file."""

from __future__ import annotations

import base64
from typing import Any
from urllib.parse import urlsplit

from config.kernel.errors import ValidationFailed
from config.kernel.yamltext import Node
from runs.catalogue.file import fields
from runs.catalogue.file.base import MISSING, Change, FieldChange, Variables, Work
from runs.catalogue.file.fields import KEPT, Entry, Field
from webhooks import services
from webhooks.models import Endpoint, opened

NAME = "installationEndpoint"
SECRET_MIN_CHARS, SECRET_MAX_CHARS = 32, 128


def check_secret(secret: str) -> None:
    """Raises ValueError unless deliveries can be signed with it."""
    try:
        fits = len(secret) >= SECRET_MIN_CHARS and bool(base64.b64decode(secret, validate=True))
    except ValueError:
        fits = False
    if not fits:
        raise ValueError("Use 64 hexadecimal digits, such as openssl rand -hex 32 prints.")


FIELDS = (
    Field("url", "url", fields.address),
    Field("secret", "secret", fields.secret(SECRET_MAX_CHARS, check_secret), KEPT, secret=True),
    Field("enabled", "enabled", fields.flag, True),
)


class Installation:
    name = NAME

    def read(self, node: Node, work: Work) -> Entry | None:
        """None: no endpoint is wanted. Looks a new address up on the network."""
        if node.value is None:
            return None
        entry = fields.read_entry(node, NAME, FIELDS, work)
        if entry is None:
            return None
        endpoint = opened(services.endpoints_of(services.INSTALLATION))
        if not entry.values.get("secret") and (endpoint is None or "secret" in entry.values):
            work.wrong(entry.lines.get("secret", entry.line), f"{NAME}.secret", "This field is required.")
        if endpoint is None or endpoint.url != entry.values["url"]:
            try:
                services.check_url(entry.values["url"])
            except ValidationFailed as error:
                work.wrong(entry.lines["url"], f"{NAME}.url", (error.details or {})["fields"]["url"][0])
        return entry

    def apply(self, found: Entry | None, work: Work) -> None:
        endpoint = opened(services.endpoints_of(services.INSTALLATION))
        if found is None:
            if work.prune and endpoint is not None and endpoint.enabled:
                services.change(services.INSTALLATION, enabled=False)
                work.changes.append(Change(NAME, fields=[FieldChange("enabled", True, False)]))
            return
        change = self._change(endpoint, found.values)
        changed = {one.name for one in change.fields}
        if changed & {"url", "secret"}:
            secret = found.values["secret"] if "secret" in changed else None
            services.register(
                services.INSTALLATION, found.values["url"], rotate=secret is not None, extended=True, secret=secret
            )
        if endpoint is None or "enabled" in changed:
            services.change(services.INSTALLATION, enabled=found.values["enabled"])
        if changed:
            work.changes.append(change)

    def _change(self, endpoint: Endpoint | None, wanted: dict[str, Any]) -> Change:
        """The path and the query of an address are not shown: for many receivers they are the credential."""
        change = Change(NAME, is_new=endpoint is None)
        if endpoint is None or endpoint.url != wanted["url"]:
            change.fields.append(FieldChange("url", endpoint is not None, True, secret=True))
        if "secret" in wanted and (endpoint is None or endpoint.secret != wanted["secret"]):
            change.fields.append(FieldChange("secret", endpoint is not None, True, secret=True))
        if (endpoint is None and not wanted["enabled"]) or (endpoint and endpoint.enabled != wanted["enabled"]):
            before = MISSING if endpoint is None else endpoint.enabled
            change.fields.append(FieldChange("enabled", before, wanted["enabled"]))
        return change

    def export(self, variables: Variables) -> dict[str, Any] | None:
        """The path and the query are one variable, for the reason that ``_change`` gives."""
        endpoint = opened(services.endpoints_of(services.INSTALLATION))
        if endpoint is None:
            return None
        parts = urlsplit(endpoint.url)
        url = fields.without_variables(f"{parts.scheme}://{parts.netloc}")
        if parts.path not in ("", "/") or parts.query:
            url += "/" + variables.placeholder("INSTALLATION", "ENDPOINT", "PATH")
        else:
            url += parts.path
        written: dict[str, Any] = {
            "url": url,
            "secret": variables.placeholder("INSTALLATION", "ENDPOINT", "SECRET"),
        }
        return written if endpoint.enabled else written | {"enabled": False}
