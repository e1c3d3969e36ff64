"""The metadata of a run: pairs of text of the caller's own."""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers

from config.api.serializers import StrictCharField
from runs.models import METADATA_KEY_MAX_CHARS, METADATA_PAIRS_MAX, METADATA_VALUE_MAX_CHARS

METADATA_KEY = re.compile(rf"[A-Za-z0-9_.-]{{1,{METADATA_KEY_MAX_CHARS}}}")
METADATA_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": f"^{METADATA_KEY.pattern}$"},
    "additionalProperties": {"type": "string", "maxLength": METADATA_VALUE_MAX_CHARS},
    "maxProperties": METADATA_PAIRS_MAX,
}


@extend_schema_field(METADATA_SCHEMA)
class MetadataField(serializers.DictField):
    """Pairs of text that belong to the caller."""

    json_schema: ClassVar[dict[str, Any]] = METADATA_SCHEMA
    default_error_messages: ClassVar = {"not_a_dict": "An object is required."}
    child = StrictCharField(max_length=METADATA_VALUE_MAX_CHARS, allow_blank=True, trim_whitespace=False)

    def run_child_validation(self, data: Mapping[str, Any]) -> dict[str, str]:
        if len(data) > METADATA_PAIRS_MAX:
            raise serializers.ValidationError(f"At most {METADATA_PAIRS_MAX} pairs.")
        if wrong := [key[:METADATA_KEY_MAX_CHARS] for key in data if not METADATA_KEY.fullmatch(key)]:
            message = f"A key has 1 to {METADATA_KEY_MAX_CHARS} of the characters A-Z, a-z, 0-9, _, . and -."
            raise serializers.ValidationError({key: [message] for key in wrong})
        pairs: dict[str, str] = super().run_child_validation(data)
        return pairs
