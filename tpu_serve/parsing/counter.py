"""How many tokens of an answer are reasoning."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tpu_serve.parsing.answer import AnswerParser


class ReasoningCounter:
    """Counts tokens whose text is reasoning or a tag of it, whatever pieces of text they are sent in.

    Args:
      parser: an unused one, the same as the answer's, since a call may end a thought.
      token_bytes: of a token id.
    """

    def __init__(self, parser: AnswerParser, token_bytes: Callable[[int], bytes]):
        self._parser, self._token_bytes = parser, token_bytes
        self.num_tokens = 0

    def see(self, token_ids: Iterable[int]) -> None:
        if self._parser.is_past_reasoning:
            return
        for token_id in token_ids:
            was_reasoning = self._parser.is_reasoning
            # Tags are ASCII, so a token that is only part of a character may be read as any other ones.
            self._parser.feed(self._token_bytes(token_id).decode("latin-1"))
            self.num_tokens += was_reasoning or self._parser.is_reasoning
