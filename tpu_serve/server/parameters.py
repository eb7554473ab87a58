"""What becomes of request fields that have no effect on the answer: one table for every endpoint.

A field of a request is *supported* (declared in `protocol`), *harmless* (it describes the caller, not the answer), *unsupported* (known, but
not served: only values that ask for nothing are accepted) or *unknown* (named in a response header, or refused with --strict-fields).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import MAX_VALUE_SHOWN, show

IGNORED_HEADER = "x-tpu-serve-ignored"
MAX_NAMES_SHOWN = 20

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "session_id",
        "prediction",
    }
)
"""Accepted with any value: they say who asks and how answers are kept or sped up, and never change an answer."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A known field that is not served.

    Attributes:
      neutral: values that ask for nothing; null always does.
      hint: what to do instead.
    """

    neutral: tuple[Any, ...] = ()
    hint: str = "leave it out"


_BEAM = "it belongs to beam search"
_CHAT = "it belongs to chat: use /v1/chat/completions"
_TEXT_ONLY = "this server reads and writes text only"


def _renamed(name: str) -> Unsupported:
    return Unsupported(hint=f"it was renamed structured_outputs.{name}")


UNSUPPORTED: Mapping[str, Unsupported] = {
    # sampling
    "logprob_token_ids": Unsupported(([],), "use logprobs for the most probable tokens"),
    "repetition_detection": Unsupported(hint="use frequency_penalty or repetition_penalty"),
    "watermarking": Unsupported(),
    "use_beam_search": Unsupported((False,), "use n for several choices"),
    "length_penalty": Unsupported((1,), _BEAM),
    "early_stopping": Unsupported((False,), _BEAM),
    "detokenize": Unsupported((True,), "use return_token_ids for the ids next to the text"),
    # structured output, by its former names
    "guided_json": _renamed("json"),
    "guided_regex": _renamed("regex"),
    "guided_choice": _renamed("choice"),
    "guided_grammar": _renamed("grammar"),
    "guided_json_object": _renamed("json_object"),
    "guided_decoding_backend": Unsupported(hint="it was removed; leave it out"),
    "guided_whitespace_pattern": Unsupported(hint="it was removed; leave it out"),
    # what chat has and completions have not
    "tools": Unsupported(hint=_CHAT),
    "tool_choice": Unsupported(("none",), _CHAT),
    "parallel_tool_calls": Unsupported((True, False), _CHAT),  # without tools both mean nothing
    "reasoning_effort": Unsupported(hint=_CHAT),
    "include_reasoning": Unsupported((True,), _CHAT),
    "thinking_token_budget": Unsupported((-1,), _CHAT),
    "chat_template": Unsupported(hint=_CHAT),
    "return_prompt_text": Unsupported((False,), "use /tokenize with the prompt, then /detokenize"),
    # the rest
    "functions": Unsupported(hint="it was renamed tools"),
    "function_call": Unsupported(("none",), "it was renamed tool_choice"),
    "web_search_options": Unsupported(hint="this server has no tools of its own"),
    "suffix": Unsupported(("",), "put the text to be completed in the prompt"),
    "mm_processor_kwargs": Unsupported(({},), _TEXT_ONLY),
    "modalities": Unsupported((["text"],), _TEXT_ONLY),
    "audio": Unsupported(hint=_TEXT_ONLY),
    "prompt_embeds": Unsupported(hint="send text or token ids as prompt"),
    "vllm_xargs": Unsupported(({},)),
    "kv_transfer_params": Unsupported(),
}


def check_fields(given: Mapping[str, Any], supported: Collection[str], *, strict: bool) -> tuple[str, ...]:
    """Refuses what is not served and returns the names that are ignored.

    Args:
      given: fields of the request that are not null.
      supported: fields that the endpoint declares.
      strict: refuse unknown names too.

    Raises:
      InvalidRequest: a field asks for what is not served (`unsupported_parameter`), or is unknown and `strict` (`unknown_field`).
    """
    ignored = []
    for name, value in given.items():
        if name in supported or name in HARMLESS:
            continue
        entry = UNSUPPORTED.get(name)
        if entry is None:
            ignored.append(name)
        elif not is_neutral(entry, value):
            raise unsupported(name, value, entry.hint)
    if ignored and strict:
        raise InvalidRequest(
            _clean(ignored[0]),
            f"Unknown field {show(ignored[0])}. The server was started with --strict-fields.",
            "unknown_field",
        )
    return tuple(ignored)


def unsupported(name: str, value: object, hint: str, *, param: str | None = None) -> InvalidRequest:
    """
    Args:
      param: the field, when `name` is a part of it.
    """
    return InvalidRequest(param or name, f"{name} = {show(value)} is not supported: {hint}.", "unsupported_parameter")


def is_neutral(entry: Unsupported, value: object) -> bool:
    """The value asks for nothing."""
    return any(_same(value, neutral) for neutral in entry.neutral)


def _same(value: object, neutral: object) -> bool:
    """Equality as JSON has it: 0 is 0.0 and is not false."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def ignored_header(names: Collection[str]) -> dict[str, str]:
    """The response header that names ignored fields; nothing when there are none."""
    shown = [_clean(name) for name in list(names)[:MAX_NAMES_SHOWN]]
    return {IGNORED_HEADER: ",".join(shown)} if shown else {}


def _clean(name: str) -> str:
    """A field name, which is any text at all, as a header may carry it."""
    return re.sub(r"[^A-Za-z0-9_.\-]", "?", name[:MAX_VALUE_SHOWN])
