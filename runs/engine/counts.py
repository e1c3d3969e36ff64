"""What providers have counted of requests that begin with the same instructions and tools, of any run of a model, so
that the bound of the next one is close. ``spending`` uses it.
"""

from __future__ import annotations

from runs.llm.measure import Size
from runs.models import CountedBeginning

# Beginnings that a process remembers.
KEPT = 10_000
# A count that is hardly lower than the known one is not worth a write.
WORTH = 0.95

# The lowest count of a request by the digest of its beginning.
_known: dict[str, int] = {}


def known(size: Size) -> dict[str, int]:
    """What a request of this size begins with, and the lowest count of a request that began so. At most one query."""
    if not size.beginnings:
        return {}
    digest = size.beginnings[0][0]
    if digest not in _known:
        tokens = CountedBeginning.objects.filter(pk=digest).values_list("tokens", flat=True).first()
        if tokens is None:
            return {}
        _remember(digest, tokens)
    return {digest: _known[digest]}


def is_news(size: Size, tokens: int) -> bool:
    """Whether the provider's count makes later bounds closer."""
    return bool(size.beginnings) and tokens < WORTH * _known.get(size.beginnings[0][0], float("inf"))


def learn(size: Size, tokens: int) -> None:
    """Store the provider's count of a request."""
    digest = size.beginnings[0][0]
    CountedBeginning.objects.bulk_create([CountedBeginning(digest=digest, tokens=tokens)], ignore_conflicts=True)
    CountedBeginning.objects.filter(pk=digest, tokens__gt=tokens).update(tokens=tokens)
    _remember(digest, tokens)


def _remember(digest: str, tokens: int) -> None:
    if len(_known) >= KEPT:
        _known.clear()
    _known[digest] = tokens


def forget() -> None:
    """Drop what this process remembers."""
    _known.clear()
