"""From the parts of a chat's message to the items of a response's output, and the events that tell of them."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from tpu_serve.parsing.events import ContentText
from tpu_serve.request import TokenLogprobs
from tpu_serve.server.body import json_text
from tpu_serve.server.chat_choice import CallPart, MessagePart
from tpu_serve.server.fanout import Piece
from tpu_serve.server.logprobs import chat_logprobs, logprobs_text
from tpu_serve.server.replies import whole
from tpu_serve.server.responses_logprobs import TextLogprobs
from tpu_serve.server.responses_replies import (
    FunctionCallItem,
    Item,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)
from tpu_serve.text.tokenizer import Tokenizer

Event = dict[str, Any] | bytes
"""See `ResponseEvent`. Those that come with every token are JSON already."""


class Events:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def make(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def made(self, kind: str, fields: str) -> bytes:
        """One whose further fields are given as JSON text."""
        return f'{{"type":"{kind}","sequence_number":{next(self._numbers)},{fields}}}'.encode("ascii")


class OutputReader:
    """Reads the parts of one answer, in order. What a whole response holds is what its events told, which is why both say the same.

    Args:
      with_logprobs: show those of the text's tokens.

    Attributes:
      items: the output so far; the last one is still open while parts come.
    """

    def __init__(self, events: Events, tokenizer: Tokenizer, *, with_logprobs: bool):
        self._events, self._tokenizer = events, tokenizer
        self._logprobs = TextLogprobs(tokenizer.token_bytes) if with_logprobs else None
        self._texts: list[str] = []
        self._text_logprobs: list[TokenLogprobs] = []
        self.items: list[Item] = []

    def read(self, piece: Piece, parts: Sequence[MessagePart]) -> Iterator[Event]:
        """The events of a piece, whose parts these are."""
        if self._logprobs is not None:
            self._logprobs.see(piece.logprobs)
        for part in parts:
            if isinstance(part, CallPart):
                if part.id is not None:
                    yield from self._close()
                    yield from self._open(FunctionCallItem(id=_new_id("fc"), call_id=part.id, name=part.name or ""))
                if part.arguments:
                    yield from self._write(FunctionCallItem, part.arguments)
            elif part.text:
                kind = MessageItem if isinstance(part, ContentText) else ReasoningItem
                yield from self._write(kind, part.text)

    def finish(self, status: Status) -> Iterator[Event]:
        """The end of the last item. Without any item there is an empty message."""
        if not self.items:
            yield from self._open(MessageItem(id=_new_id("msg")))
        yield from self._close(status)

    def so_far(self) -> list[Item]:
        """The items of an answer that failed: the last one is incomplete."""
        if self.items and self.items[-1].status == "in_progress":
            self._fill(self.items[-1])
            self.items[-1].status = "incomplete"
        return self.items

    def _write(self, kind: type[Item], text: str) -> Iterator[Event]:
        if not self.items or type(self.items[-1]) is not kind:
            yield from self._close()
            yield from self._open(
                ReasoningItem(id=_new_id("rs")) if kind is ReasoningItem else MessageItem(id=_new_id("msg"))
            )
        self._texts.append(text)
        taken = [] if self._logprobs is None else self._logprobs.take(text)
        place = f'"item_id":{json_text(self.items[-1].id)},"output_index":{len(self.items) - 1}'
        delta = f'"delta":{json_text(text)}'
        if kind is FunctionCallItem:
            yield self._events.made("response.function_call_arguments.delta", f"{place},{delta}")
        elif kind is ReasoningItem:
            yield self._events.made("response.reasoning_text.delta", f'{place},"content_index":0,{delta}')
        else:
            self._text_logprobs += taken
            logprobs = logprobs_text(self._tokenizer, taken) if taken else "[]"
            fields = f'{place},"content_index":0,{delta},"logprobs":{logprobs}'
            yield self._events.made("response.output_text.delta", fields)

    def _open(self, item: Item) -> Iterator[Event]:
        self._texts, self._text_logprobs = [], []
        self.items.append(item)
        yield self._events.make("response.output_item.added", output_index=len(self.items) - 1, item=whole(item))
        if not isinstance(item, FunctionCallItem):
            part = ReasoningText(text="") if isinstance(item, ReasoningItem) else OutputText(text="")
            yield self._event("response.content_part.added", content_index=0, part=whole(part))

    def _close(self, status: Status = "completed") -> Iterator[Event]:
        if not self.items or self.items[-1].status != "in_progress":
            return
        item = self.items[-1]
        self._fill(item)
        item.status = status
        if isinstance(item, FunctionCallItem):
            yield self._event("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        else:
            (part,) = item.content
            done: dict[str, Any] = {"content_index": 0, "text": part.text}
            if isinstance(part, OutputText):
                yield self._event("response.output_text.done", **done, logprobs=whole(part)["logprobs"])
            else:
                yield self._event("response.reasoning_text.done", **done)
            yield self._event("response.content_part.done", content_index=0, part=whole(part))
        yield self._events.make("response.output_item.done", output_index=len(self.items) - 1, item=whole(item))

    def _fill(self, item: Item) -> None:
        text = "".join(self._texts)
        if isinstance(item, FunctionCallItem):
            item.arguments = text
        elif isinstance(item, ReasoningItem):
            item.content = [ReasoningText(text=text)]
        else:
            logprobs = chat_logprobs(self._tokenizer, self._text_logprobs).content
            item.content = [OutputText(text=text, logprobs=logprobs)]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event of the item that is open."""
        return self._events.make(kind, item_id=self.items[-1].id, output_index=len(self.items) - 1, **fields)


def _new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
