"""Log-probabilities of tokens as the two completion endpoints show them."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tpu_serve.request import TokenLogprobs
from tpu_serve.server.body import json_text
from tpu_serve.server.replies import ChatLogprob, ChatLogprobs, PromptLogprob, TopLogprob
from tpu_serve.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def token_name(token_id: int) -> str:
    """A token as its id, which says more than its text where tokens are parts of characters."""
    return f"token_id:{token_id}"


class TextPlace:
    """Where in the text of one choice each token begins: characters before the one that its first byte belongs to.

    Args:
      skip_special_tokens: special tokens take no room.
      prompt_token_ids: what comes before; it decides whether the first token may lose a leading space, see `Detokenizer`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, prompt_token_ids: Sequence[int] = ()):
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._num_spaces_to_drop = tokenizer.num_leading_spaces_dropped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt_token_ids:
            if not self._num_spaces_to_drop:
                break
            self.next(token_id)
        self._utf8.reset()
        self._offset = 0

    def next(self, token_id: int) -> int:
        """The offset of the next token."""
        return self._pass(b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id))

    def prompt(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Offsets of the tokens of an echoed prompt in its text, which may show special tokens or not. The answer begins behind it."""
        offsets = []
        for token_id in token_ids:
            data = self._tokenizer.token_bytes(token_id)
            is_hidden = token_id in self._tokenizer.special_ids and not text.startswith(
                data.decode("utf-8", "replace"), self._offset
            )
            offsets.append(self._pass(b"" if is_hidden else data))
        # A prompt's text is what was sent. A tokenizer may have normalised it, and bytes that it leaves open are no part of the answer.
        self._utf8.reset()
        self._offset = len(text)
        return [min(offset, len(text)) for offset in offsets]

    def _pass(self, data: bytes) -> int:
        while self._num_spaces_to_drop and data:
            if data[:1] != b" ":
                self._num_spaces_to_drop = 0
            else:
                self._num_spaces_to_drop -= 1
                data = data[1:]
        if data and not 0x80 <= data[0] <= 0xBF:  # it begins a character, so one that was incomplete stays so
            self._offset += len(self._utf8.decode(b"", final=True))
        offset = self._offset
        self._offset += len(self._utf8.decode(data))
        return offset


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], *, as_ids: bool = False) -> ChatLogprobs:
    """
    Args:
      as_ids: tokens read `token_id:N`; their bytes stay what they are.
    """

    def top(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=token_name(token_id) if as_ids else tokenizer.token_text(token_id),
            logprob=finite(logprob),
            bytes=list(tokenizer.token_bytes(token_id)),
        )

    return ChatLogprobs(
        content=[
            ChatLogprob(
                **dict(top(entry.token_id, entry.logprob)),
                top_logprobs=[top(token_id, logprob) for token_id, logprob in entry.top],
            )
            for entry in entries
        ]
    )


def logprobs_text(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], *, as_ids: bool = False) -> str:
    """The JSON text of what `chat_logprobs` holds, which streams have with every token."""

    def one(token_id: int, logprob: float) -> str:
        name, data = _token_text(tokenizer, token_id)
        if as_ids:
            name = f'"{token_name(token_id)}"'
        return f'"token":{name},"logprob":{float(finite(logprob))!r},"bytes":{data}'

    found = []
    for entry in entries:
        top = ",".join([f"{{{one(*pair)}}}" for pair in entry.top])
        found.append(f'{{{one(entry.token_id, entry.logprob)},"top_logprobs":[{top}]}}')
    return f"[{','.join(found)}]"


@lru_cache(maxsize=1 << 15)  # alternatives are mostly the same few thousand tokens
def _token_text(tokenizer: Tokenizer, token_id: int) -> tuple[str, str]:
    """JSON texts of a token's text and of the list of its bytes."""
    data = ",".join(map(str, tokenizer.token_bytes(token_id)))
    return json_text(tokenizer.token_text(token_id)), f"[{data}]"


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs | None],
    offsets: Sequence[int],
    *,
    num_top: int,
    as_ids: bool = False,
) -> dict[str, Any]:
    """The fields of `CompletionLogprobs`.

    Args:
      token_ids: one per entry.
      entries: None for the first token of a prompt, which has no log-probability.
      offsets: where each token begins in the text.
      num_top: alternatives shown, of those that an entry has; -1 for all.
      as_ids: tokens read `token_id:N`.
    """

    def name(token_id: int) -> str:
        return token_name(token_id) if as_ids else tokenizer.token_text(token_id)

    tops: list[dict[str, float] | None] = []
    for _, entry, _ in zip(token_ids, entries, offsets, strict=True):
        if entry is None:
            tops.append(None)
            continue
        # The token itself first, then the alternatives. Parts of characters may look the same: they go by their ids.
        top = {name(entry.token_id): finite(entry.logprob)}
        for token_id, logprob in _first(entry.top, num_top):
            if token_id != entry.token_id:
                text = name(token_id)
                top[token_name(token_id) if text in top else text] = finite(logprob)
        tops.append(top)
    return {
        "tokens": [name(token_id) for token_id in token_ids],
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": list(offsets),
    }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], *, num_top: int
) -> list[dict[str, PromptLogprob] | None]:
    """One object per token of the prompt, by token id; the token itself comes first. None for the first token.

    Args:
      num_top: alternatives shown, of those that an entry has; -1 for all.
    """

    def entry_of(token_id: int, logprob: float, rank: int | None) -> PromptLogprob:
        return PromptLogprob(logprob=finite(logprob), rank=rank, decoded_token=tokenizer.token_text(token_id))

    shown: list[dict[str, PromptLogprob] | None] = []
    for entry in entries:
        if entry is None:
            shown.append(None)
            continue
        ranks = {token_id: place + 1 for place, (token_id, _) in enumerate(entry.top)}
        tokens = {str(entry.token_id): entry_of(entry.token_id, entry.logprob, ranks.get(entry.token_id))}
        for token_id, logprob in _first(entry.top, num_top):
            tokens.setdefault(str(token_id), entry_of(token_id, logprob, ranks[token_id]))
        shown.append(tokens)
    return shown


def _first(top: Sequence[tuple[int, float]], count: int) -> Sequence[tuple[int, float]]:
    return top if count < 0 else top[:count]
