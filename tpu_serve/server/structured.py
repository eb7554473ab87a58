"""The form that an answer is asked to have: `structured_outputs` and `response_format` as what a grammar is compiled from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from tpu_serve.constraint.spec import GrammarSpec, Kind
from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import show
from tpu_serve.server.parameters import unsupported
from tpu_serve.server.protocol import GenerationFields, ResponseFormat, StructuredOutputs

_NEUTRAL_OPTIONS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_FORMATS = ("text", "json_object", "json_schema", "structural_tag")


class Form(NamedTuple):
    """
    Attributes:
      param: the field that asked for it.
    """

    spec: GrammarSpec
    param: str


def form_of(request: GenerationFields) -> Form | None:
    """The form that a request asks for, or None for free text.

    Raises:
      InvalidRequest: it asks for none or for several where it must be one, or for a form that is not known.
    """
    given = request.response_format
    asked = None if given is None else _response_format(given)
    if request.structured_outputs is None:
        return asked
    if asked is not None:
        raise InvalidRequest(
            "structured_outputs", "structured_outputs and response_format must not be given both: one says it all."
        )
    return _structured_outputs(request.structured_outputs)


def _structured_outputs(given: StructuredOutputs) -> Form:
    param = "structured_outputs"
    for name, value in (given.model_extra or {}).items():
        if value is None or (value is False and name in _NEUTRAL_OPTIONS):
            continue
        raise unsupported(f"{param}.{name}", value, "leave it out", param=param)
    values: dict[Kind, object] = {
        "json_schema": given.json_,
        "regex": given.regex,
        "choice": given.choice,
        "grammar": given.grammar,
        "json_object": True if given.json_object else None,
        "structural_tag": given.structural_tag,
    }
    asked = [(kind, value) for kind, value in values.items() if value is not None]
    if len(asked) != 1:
        raise InvalidRequest(
            param,
            "structured_outputs must hold exactly one of json, regex, choice, grammar, json_object = true and structural_tag, got "
            f"{len(asked)}.",
        )
    kind, value = asked[0]
    if kind == "choice" and not value:
        raise InvalidRequest(param, "structured_outputs.choice must hold at least one text.")
    return Form(GrammarSpec(kind, None if kind == "json_object" else value), param)


def _response_format(given: ResponseFormat) -> Form | None:
    param = "response_format"
    if given.type == "text":
        return None
    if given.type == "json_object":
        _refuse_others(param, given.model_dump(), ("type",))
        return Form(GrammarSpec("json_object"), param)
    if given.type == "structural_tag":
        tag = given.model_dump(exclude_unset=True)
        return Form(GrammarSpec("structural_tag", tag), param)
    if given.type != "json_schema":
        raise InvalidRequest(
            param, f"response_format.type must be one of {', '.join(_FORMATS)}, got {show(given.type)}."
        )
    if given.json_schema is None:
        raise InvalidRequest(param, "response_format.json_schema is required for the type json_schema.")
    _refuse_others(param, given.model_dump(), ("type", "json_schema"))
    _refuse_others(f"{param}.json_schema", given.json_schema, ("name", "description", "schema", "strict"))
    schema = given.json_schema.get("schema")
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(
            param, f"response_format.json_schema.schema must be a JSON schema, an object, got {show(schema)}."
        )
    return Form(GrammarSpec("json_schema", schema), param)


def _refuse_others(place: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """A key that nobody reads may be what the answer was to look like."""
    for name, value in given.items():
        if name not in known and value is not None:
            hint = "a schema goes into response_format.json_schema.schema, with the type json_schema"
            raise unsupported(f"{place}.{name}", value, hint, param="response_format")
