"""What a JSON schema says of a value, for forms of arguments that are not JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
_MAX_STEPS = 16


def resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """The schema behind references within `root`; one that allows everything for what is none, or leads in a circle."""
    for _ in range(_MAX_STEPS):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if reference is None:
            return dict(schema)
        place: Any = root
        for step in str(reference).removeprefix("#").split("/")[1:]:
            place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
        schema = place
    return {}


def kinds_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that it names; none at all when it does not say."""
    given = schema.get("type")
    kinds = {given} if isinstance(given, str) else set(given or ())
    for name in ("anyOf", "oneOf", "allOf"):
        for part in schema.get(name) or ():
            if isinstance(part, Mapping):
                kinds |= {"string"} if "$ref" in part else kinds_of(part)  # what is not known is text
    if not kinds:
        kinds = {kind_of(value) for value in values_of(schema) or ()}
    return frozenset(kinds)


def values_of(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that it names one by one, or None."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return list(values) if isinstance(values, list) and values else None


def texts_of(schema: Mapping[str, Any]) -> list[str] | None:
    """The texts that it names one by one, when it names nothing else."""
    values = values_of(schema)
    return values if values and all(isinstance(value, str) for value in values) else None


def kind_of(value: Any) -> str:
    return next(
        kind
        for kind, types in KINDS.items()
        if isinstance(value, types) and isinstance(value, bool) == (kind == "boolean")
    )


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Schemas by key, in order; a key that is required and not described may have any value."""
    properties = dict(schema.get("properties") or {})
    return {**properties, **{key: {} for key in schema.get("required") or () if key not in properties}}
