"""Checks a request's body against the types of a provider's official SDK, which are typed dictionaries."""

import collections.abc
import functools
import types
import typing
from typing import Any, Literal, Union

import typing_extensions

REQUIRED = typing_extensions.Required


def problems(value: Any, wanted: Any, place: str = "body") -> list[str]:
    """Where ``value`` does not fit the type ``wanted``: also unknown and missing keys."""
    origin, arguments = typing_extensions.get_origin(wanted), typing_extensions.get_args(wanted)
    if typing_extensions.is_typeddict(wanted):
        return _of_object(value, wanted, place)
    if origin in (REQUIRED, typing_extensions.NotRequired, typing.Annotated):
        return problems(value, arguments[0], place)
    if origin in (Union, types.UnionType):
        return _of_union(value, arguments, place)
    if origin in (Literal, typing_extensions.Literal):
        return [] if value in arguments else [f"{place}: {value!r} is not one of {arguments}"]
    if _is_array(origin):
        if not isinstance(value, list):
            return [f"{place}: not an array"]
        return [found for at, item in enumerate(value) for found in problems(item, arguments[0], f"{place}[{at}]")]
    if origin is dict or wanted is dict:
        return [] if isinstance(value, dict) else [f"{place}: not an object"]
    if wanted in (Any, object):
        return []
    kind = (int, float) if wanted is float else wanted
    fits = isinstance(value, kind) and (wanted is bool or not isinstance(value, bool))
    return [] if fits else [f"{place}: {value!r} is not {wanted}"]


def _is_array(origin: Any) -> bool:
    """A list, an iterable, or the SDK's own sequence that is not a string."""
    arrays = (list, collections.abc.Iterable, collections.abc.Sequence)
    return origin in arrays or getattr(origin, "__name__", "") == "SequenceNotStr"


@functools.cache
def _hints(wanted: Any) -> dict[str, Any]:
    return typing_extensions.get_type_hints(wanted, include_extras=True)


def _of_object(value: Any, wanted: Any, place: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{place}: not an object"]
    hints = _hints(wanted)
    required = {name for name, hint in hints.items() if typing_extensions.get_origin(hint) is REQUIRED}
    found = [f"{place}: {name} is missing" for name in required - value.keys()]
    for name, item in value.items():
        found += problems(item, hints[name], f"{place}.{name}") if name in hints else [f"{place}: unknown {name}"]
    return found


def _of_union(value: Any, members: tuple[Any, ...], place: str) -> list[str]:
    """The problems with the member that was meant: with the one that has the fewest."""
    if isinstance(value, dict) and "type" in value:
        members = tuple(member for member in members if value["type"] in _types(member)) or members
    shortest: list[str] | None = None
    for member in members:
        found = problems(value, member, place)
        if not found:
            return []
        shortest = found if shortest is None or len(found) < len(shortest) else shortest
    return shortest or []


@functools.cache
def _types(member: Any) -> tuple[Any, ...]:
    """The values of ``type`` that a member of a union has."""
    if not typing_extensions.is_typeddict(member):
        return tuple(value for part in typing_extensions.get_args(member) for value in _types(part))
    hint = _hints(member).get("type")
    while typing_extensions.get_origin(hint) in (REQUIRED, typing_extensions.NotRequired, Union):
        hint = typing_extensions.get_args(hint)[0]
    return typing_extensions.get_args(hint)
