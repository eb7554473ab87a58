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


_STRUCTURED = "structured output is not available in this version; leave it out and ask for the format in the prompt"


def _renamed(name: str) -> Unsupported:
    return Unsupported(hint=f"it was renamed structured_outputs.{name}, and {_STRUCTURED}")


UNSUPPORTED: Mapping[str, Unsupported] = {
    # sampling
    "presence_penalty": Unsupported((0,), "penalties are not available in this version; leave it out"),
    "frequency_penalty": Unsupported((0,), "penalties are not available in this version; leave it out"),
    "repetition_penalty": Unsupported((1,), "penalties are not available in this version; leave it out"),
    "logit_bias": Unsupported(({},), "biases are not available in this version; leave it out"),
    "min_tokens": Unsupported((0,), "use ignore_eos with max_tokens for an exact number of tokens"),
    "bad_words": Unsupported(([],)),
    "allowed_token_ids": Unsupported(),
    "logprob_token_ids": Unsupported(([],), "use logprobs for the most probable tokens"),
    "prompt_logprobs": Unsupported((), "only generated tokens have log-probabilities in this version"),
    "repetition_detection": Unsupported(),
    "watermarking": Unsupported(),
    "use_beam_search": Unsupported((False,), "use n for several choices"),
    "length_penalty": Unsupported((1,), "it belongs to beam search"),
    "early_stopping": Unsupported((False,), "it belongs to beam search"),
    "detokenize": Unsupported((True,), "use return_token_ids for the ids next to the text"),
    "spaces_between_special_tokens": Unsupported((True,), "no spaces are put between special tokens"),
    "return_tokens_as_token_ids": Unsupported((False,), "use return_token_ids"),
    # structured output
    "structured_outputs": Unsupported(({},), _STRUCTURED),
    "guided_json": _renamed("json"),
    "guided_regex": _renamed("regex"),
    "guided_choice": _renamed("choice"),
    "guided_grammar": _renamed("grammar"),
    "guided_decoding_backend": Unsupported(hint="it was removed; leave it out"),
    "guided_whitespace_pattern": Unsupported(hint="it was removed; leave it out"),
    # tools: an empty list is an error of its own, as elsewhere
    "tools": Unsupported(hint="tools are not available in this version; describe them in the system message"),
    "tool_choice": Unsupported(("none",), "tools are not available in this version"),
    "parallel_tool_calls": Unsupported((True, False)),  # without tools both mean nothing
    "functions": Unsupported(hint="tools are not available in this version; describe them in the system message"),
    "function_call": Unsupported(("none",), "tools are not available in this version"),
    "web_search_options": Unsupported(hint="this server has no tools of its own"),
    # reasoning
    "reasoning_effort": Unsupported(hint="use chat_template_kwargs, for example {'enable_thinking': false}"),
    "include_reasoning": Unsupported((True,), "reasoning is part of the content in this version"),
    "thinking_token_budget": Unsupported((-1,), "use max_tokens"),
    # the rest
    "suffix": Unsupported(("",), "put the text to be completed in the prompt"),
    "priority": Unsupported((0,), "requests are served first come, first served"),
    "chat_template": Unsupported(hint="the server's template is used; it is chosen with --chat-template at the start"),
    "mm_processor_kwargs": Unsupported(({},), "this server reads text only"),
    "modalities": Unsupported((["text"],), "this server writes text only"),
    "audio": Unsupported(hint="this server writes text only"),
    "prompt_embeds": Unsupported(hint="send text or token ids as prompt"),
    "return_prompt_text": Unsupported((False,), "use /tokenize with the messages, then /detokenize"),
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
        elif not any(_same(value, neutral) for neutral in entry.neutral):
            raise unsupported(name, value, entry.hint)
    if ignored and strict:
        raise InvalidRequest(
            _clean(ignored[0]),
            f"Unknown field {show(ignored[0])}. The server was started with --strict-fields.",
            "unknown_field",
        )
    return tuple(ignored)


def unsupported(name: str, value: object, hint: str) -> InvalidRequest:
    return InvalidRequest(name, f"{name} = {show(value)} is not supported: {hint}.", "unsupported_parameter")


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
