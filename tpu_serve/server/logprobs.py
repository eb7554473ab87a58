"""Log-probabilities of tokens as the two completion endpoints show them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tpu_serve.request import TokenLogprobs
from tpu_serve.server.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob
from tpu_serve.text.tokenizer import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry."""
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> ChatLogprobs:
    def top(token_id: int, logprob: float) -> TopLogprob:
        return TopLogprob(
            token=tokenizer.token_text(token_id), logprob=finite(logprob), bytes=list(tokenizer.token_bytes(token_id))
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


def completion_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], offset: int) -> CompletionLogprobs:
    """
    Args:
      offset: characters of the choice's text before the first of these tokens, as `end_offset` counts them.
    """
    tokens, offsets, tops = [], [], []
    for entry in entries:
        text = tokenizer.token_text(entry.token_id)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
        # The sampled token first, then the alternatives; of two that look the same the first one stays.
        top = {text: finite(entry.logprob)}
        for token_id, logprob in entry.top:
            top.setdefault(tokenizer.token_text(token_id), finite(logprob))
        tops.append(top)
    logprobs = [finite(entry.logprob) for entry in entries]
    return CompletionLogprobs(tokens=tokens, token_logprobs=logprobs, top_logprobs=tops, text_offset=offsets)


def end_offset(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], offset: int) -> int:
    """The offset of the token after these."""
    return offset + sum(len(tokenizer.token_text(entry.token_id)) for entry in entries)
