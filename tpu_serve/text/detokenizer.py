"""Text of one sequence while its tokens arrive: whole characters only, cut at stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import NamedTuple

from tpu_serve.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What one push added.

    Attributes:
      text: new text that is safe to show.
      stop: the stop string that ended the sequence, else None.
      num_tokens: how many of the pushed tokens belong to the sequence: all of them, or up to the one completing the stop string.
    """

    text: str
    stop: str | None
    num_tokens: int


class Detokenizer:
    """Turns the generated tokens of ONE sequence into text, at a cost per token that does not grow with the sequence.

    The law: however the tokens are split over pushes, the joined `text`, `stop` and the summed `num_tokens` are the same. Without
    stop strings the joined text is `Tokenizer.decode` of all tokens: an incomplete or invalid piece of UTF-8 becomes one U+FFFD,
    as soon as the next byte (or the end) shows that it will never be a character, and no sooner.

    Args:
      stop: strings that end the sequence. They match in the text, wherever token boundaries are; the one completed first wins, and of
        those completed by the same character the first in the list. The text ends before the match.
      include_stop_str_in_output: the text ends after the match instead.
      skip_special_tokens: special tokens give no text. A stop string that is the text of a special token still stops at that token.
      shown_token_ids: special tokens that give text all the same.
      prompt_token_ids: what precedes the first generated token. It only decides whether that one starts a text, where
        SentencePiece vocabularies drop a space; bytes of a character left open by the prompt are not joined with the answer.
      min_tokens: a stop string that so many first tokens complete is text like any other; it may begin in them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        shown_token_ids: Collection[int] = (),
        prompt_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
    ):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._skipped = tokenizer.special_ids.difference(shown_token_ids) if skip_special_tokens else frozenset()
        self._stop_of_token: dict[int, str] = {}
        for text in self._stop:
            token_id = tokenizer.token_id(text)
            if token_id is not None and token_id in self._skipped:
                self._stop_of_token[token_id] = text
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._num_passed = 0  # leading characters of the held text at whose ends nothing stops
        self._num_gated = min_tokens if self._stop else 0
        self._is_last_gated = False
        self._matched: str | None = None
        self._ended = False
        self._num_spaces_to_drop = tokenizer.num_leading_spaces_dropped
        self._is_between = False  # characters, so that the next token's text is its own
        for token_id in prompt_token_ids:
            if not self._num_spaces_to_drop:
                break
            self._text_of(token_id)
        self._utf8.reset()
        self._is_between = not self._num_spaces_to_drop

    def push(self, token_ids: Sequence[int], *, finished: bool = False) -> TextDelta:
        """Takes the next tokens; `finished` says that none will follow, and lets everything out that was held back.

        Held back are an incomplete character, and the longest end of the text that a stop string begins with. After a stop string or
        `finished` the sequence is over: later pushes add no text, count no tokens and repeat `stop`.
        """
        if self._ended:
            return TextDelta("", self._matched, 0)
        if (
            not self._stop and self._is_between and not finished and len(token_ids) == 1
        ):  # nearly every push of a stream
            token_id = token_ids[0]
            whole = "" if token_id in self._skipped else self._tokenizer.whole_text(token_id)
            if whole is not None:
                return TextDelta(whole, None, 1)
        shown: list[str] = []
        for index, token_id in enumerate(token_ids):
            is_gated = self._num_gated > 0
            if token_id in self._stop_of_token and not is_gated:
                self._end_at_token(self._stop_of_token[token_id], shown)
            else:
                self._advance(self._text_of(token_id), shown, is_gated)
            if self._ended:
                return TextDelta("".join(shown), self._matched, index + 1)
            self._is_last_gated = is_gated
            self._num_gated -= is_gated
        if finished:
            self._advance(self._utf8.decode(b"", final=True), shown, self._is_last_gated)
            if not self._ended:
                shown.append(self._held)
                self._ended = True
        return TextDelta("".join(shown), self._matched, len(token_ids))

    def _text_of(self, token_id: int) -> str:
        """Characters completed by one more token."""
        if token_id in self._skipped:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        while self._num_spaces_to_drop and data:
            if data[:1] != b" ":
                self._num_spaces_to_drop = 0
            else:
                self._num_spaces_to_drop -= 1
                data = data[1:]
        if self._is_between:
            whole = self._tokenizer.whole_text(token_id)
            if whole is not None:
                return whole
        text = self._utf8.decode(data)
        # Of a surrogate, which is no character, Python's decoder waits for the third byte before it gives up on the first two.
        if data and 0xA0 <= data[-1] <= 0xBF and len(held := self._utf8.getstate()[0]) == 2 and held[0] == 0xED:
            text += self._utf8.decode(b"", final=True)
        self._is_between = not self._num_spaces_to_drop and not self._utf8.getstate()[0]
        return text

    def _advance(self, text: str, shown: list[str], is_gated: bool = False) -> None:
        """Appends to `shown` what `text` makes safe to show, and ends the sequence at the first completed stop string unless it is gated."""
        if not self._stop:
            shown.append(text)
            return
        # Whatever was shown before cannot be part of a match, so the held text and the new one are all there is to search.
        text = self._held + text
        passed = len(text) if is_gated else self._num_passed
        matches = [
            (start + len(stop), start, stop)
            for stop in self._stop
            if (start := text.find(stop, max(0, passed - len(stop) + 1))) >= 0
        ]
        if matches:
            # min keeps the first of equals, which is the list's order
            end, start, stop = min(matches, key=lambda match: match[0])
            shown.append(text[: end if self._include_stop else start])
            self._matched, self._ended = stop, True
            return
        num_held = max(_num_overlapping(text, stop) for stop in self._stop)
        shown.append(text[: len(text) - num_held])
        self._held = text[len(text) - num_held :]
        self._num_passed = max(0, passed - (len(text) - num_held))

    def _end_at_token(self, stop: str, shown: list[str]) -> None:
        """Ends the sequence before a special token, which like any token closes the character that was incomplete."""
        self._advance(self._utf8.decode(b"", final=True), shown)
        if not self._ended:
            shown.append(self._held + (stop if self._include_stop else ""))
            self._matched, self._ended = stop, True


def _num_overlapping(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
