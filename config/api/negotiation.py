"""For endpoints that answer with something else than JSON."""

from typing import Any

from rest_framework.negotiation import BaseContentNegotiation


class AnyMediaType(BaseContentNegotiation):
    """Errors are JSON and the content is what it is: there is nothing to choose, whatever Accept says."""

    def select_renderer(self, request: Any, renderers: Any, format_suffix: Any = None) -> tuple[Any, str]:
        return renderers[0], renderers[0].media_type
