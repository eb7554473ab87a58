"""The answer of GPT-OSS: messages with a channel each, and tools as recipients (the Harmony format)."""

from __future__ import annotations

import re

from tpu_serve.parsing.events import Event
from tpu_serve.parsing.parser import Parser
from tpu_serve.parsing.reader import Steps

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
MAX_CUT_HEADER = 200
"""Characters of a header that the end of the answer cut, at most; it has no words in it, so it is left out."""
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*([a-z]+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class Harmony(Parser):
    """`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…`, from behind `<|start|>assistant` on.

    The channel `analysis` is reasoning, `final` and `commentary` are content, and what goes to `functions.NAME` on any channel is a call.
    Several messages of one kind are separated by a line break. Text without a header is content.

    Args:
      with_calls: messages to a function are calls; otherwise content.
    """

    def __init__(self, *, with_calls: bool = True):
        super().__init__()
        self._with_calls = with_calls
        self._said: set[str] = set()

    def begin(self, prompt_end: str) -> list[Event]:
        events = super().begin(prompt_end)
        self._said.clear()
        return events

    def _program(self) -> Steps[None]:
        reader = self._reader
        marker = yield from reader.is_next(CHANNEL, " to=", MESSAGE, CONSTRAIN, START)
        if marker == START:
            reader.take(len(START))
        while True:
            kind = "content"
            if marker is not None:
                kind = yield from self._header()
            if not kind:
                if not (yield from reader.peek()):
                    return
                marker = START
                continue
            marker = yield from self._body(kind)
            if marker is None:
                return
            if marker == CHANNEL:  # the start of a message is missing
                reader.put_back(CHANNEL)
            elif marker != START:
                yield from reader.spaces()
                marker = yield from reader.is_next(START, CHANNEL)
                if marker == START:
                    reader.take(len(START))

    def _header(self) -> Steps[str]:
        """Reads a header and returns what kind of text follows; "" when a header comes once more, or nothing."""
        pieces: list[str] = []
        marker = yield from self._reader.until((MESSAGE, START, END, CALL, RETURN), pieces.append)
        header = "".join(pieces)
        if marker != MESSAGE:
            is_cut_short = marker is None and self._is_cut and len(header) <= MAX_CUT_HEADER
            if header.strip() not in ("", "assistant") and not is_cut_short:
                self._content(header)
            return "" if marker in (START, None) else "content"
        recipient = _RECIPIENT.search(header)
        if recipient and recipient[1].startswith(FUNCTIONS) and self._with_calls:
            self._call(recipient[1].removeprefix(FUNCTIONS))
            return "call"
        channel = _CHANNEL.search(header)
        return "reasoning" if channel and channel[1] == "analysis" else "content"

    def _body(self, kind: str) -> Steps[str | None]:
        """The text of one message; returns what ended it."""
        emit = {"reasoning": self._reasoning, "content": self._content, "call": self._arguments}[kind]
        is_first = True

        def separated(text: str) -> None:
            nonlocal is_first
            if is_first and kind in self._said and kind != "call":
                emit("\n")
            is_first = False
            self._said.add(kind)
            emit(text)

        self.is_reasoning = kind == "reasoning"
        marker = yield from self._reader.until((END, CALL, RETURN, START, CHANNEL), separated)
        self.is_reasoning = False
        if kind == "call" and is_first and not (marker is None and self._is_cut):
            emit("{}")
        return marker
