"""Prompts of completions, of every form."""

from __future__ import annotations

from typing import Any

from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import show

MAX_PROMPTS = 1024


def split_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request: one text, several, one list of token ids, or several such lists.

    Raises:
      InvalidRequest: it is none of these, or empty.
    """
    prompts = prompt if isinstance(prompt, list) and not _are_token_ids(prompt) else [prompt]
    if prompt is None or not prompts or any(item == "" or item == [] for item in prompts):
        raise InvalidRequest("prompt", "The prompt must be provided and non-empty.", "empty_prompt")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidRequest("prompt", f"prompt holds {len(prompts)} prompts; at most {MAX_PROMPTS} are allowed.")
    for place, item in enumerate(prompts):
        if type(item) is not type(prompts[0]) or not (isinstance(item, str) or _are_token_ids(item)):
            where = f"prompt[{place}]" if prompts is prompt else "prompt"
            raise InvalidRequest(
                "prompt",
                f"prompt must be a string, a list of strings, a list of token ids or a list of such lists; {where} is {show(item)}.",
                "invalid_type",
            )
    return list(prompts)


def _are_token_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) == {int}
