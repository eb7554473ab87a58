"""The chunks of a chat stream as JSON text, made of parts that stay the same: a stream sends one per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tpu_serve.parsing.events import ContentText, ReasoningText
from tpu_serve.request import TokenLogprobs
from tpu_serve.server.body import dump_json, json_text
from tpu_serve.server.chat_choice import MessagePart
from tpu_serve.server.fanout import Piece
from tpu_serve.server.logprobs import logprobs_text
from tpu_serve.server.replies import ChatChunk, ChatChunkChoice, ChatDelta, chunk
from tpu_serve.text.tokenizer import Tokenizer


class ChatChunks:
    """Writes the chunks of one answer. They are what `ChatChunk` with the same fields set would be.

    Args:
      head: `id`, `created` and `model` of every chunk.
      with_logprobs, with_token_ids: chunks have those of their tokens.
      as_ids: tokens read `token_id:N` in log-probabilities.
      repeats_reasoning: reasoning is sent under its older name too.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        tokenizer: Tokenizer,
        *,
        with_logprobs: bool,
        with_token_ids: bool,
        as_ids: bool,
        repeats_reasoning: bool,
    ):
        self._head, self._tokenizer = dict(head), tokenizer
        self._with_logprobs, self._with_token_ids, self._as_ids = with_logprobs, with_token_ids, as_ids
        self._repeats_reasoning = repeats_reasoning
        self._is_plain = not with_logprobs and not with_token_ids
        fields = ",".join(f'"{name}":{json_text(head[name])}' for name in ("created", "model"))
        self._start = f'{{"id":{json_text(head["id"])},"object":"chat.completion.chunk",{fields},"choices":[{{"index":'

    def opening(self, index: int, **fields: Any) -> bytes:
        """The first chunk of a choice, which says the role; `fields` are of the chunk."""
        delta = ChatDelta(role="assistant", content="")
        return self.rare([ChatChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=None)], **fields)

    def rare(self, choices: list[ChatChunkChoice], **fields: Any) -> bytes:
        """A chunk with any fields."""
        return dump_json(
            chunk(ChatChunk(object="chat.completion.chunk", **self._head, choices=choices, **_given(fields)))
        )

    def of(self, piece: Piece, parts: Sequence[MessagePart], finish_reason: str | None, usage: str = "") -> list[bytes]:
        """A chunk for each part: tokens go with the first one, the end of the choice with the last. Without parts it is one chunk.

        Args:
          finish_reason: of the choice, when this is its last piece.
          usage: a field's JSON text with the comma before it, behind the choices.
        """
        start = f'{self._start}{piece.index},"delta":'
        if self._is_plain and piece.finish_reason is None and len(parts) == 1:  # nearly every chunk
            end = f',"logprobs":null,"finish_reason":null}}]{usage}}}'
            return [f"{start}{self._delta(parts[0])}{end}".encode("ascii")]
        deltas = [self._delta(part) for part in parts] or ["{}"]
        chunks = []
        for place, delta in enumerate(deltas):
            is_first, is_last = place == 0, place == len(deltas) - 1
            end = f',"logprobs":{self._logprobs(piece.logprobs if is_first else None)}'
            if is_last and piece.finish_reason is not None:
                end += f',"finish_reason":{json_text(finish_reason)},"stop_reason":{json_text(piece.stop_reason)}'
            else:
                end += ',"finish_reason":null'
            if self._with_token_ids:
                end += f',"token_ids":[{",".join(map(str, piece.token_ids)) if is_first else ""}]'
            chunks.append(f"{start}{delta}{end}}}]{usage}}}".encode("ascii"))
        return chunks

    def _delta(self, part: MessagePart) -> str:
        if isinstance(part, ContentText):
            return f'{{"content":{json_text(part.text)}}}'
        if isinstance(part, ReasoningText):
            text = json_text(part.text)
            again = f',"reasoning_content":{text}' if self._repeats_reasoning else ""
            return f'{{"reasoning":{text}{again}}}'
        call, arguments = part, json_text(part.arguments)
        if call.id is None:
            return f'{{"tool_calls":[{{"index":{call.index},"function":{{"arguments":{arguments}}}}}]}}'
        function = f'{{"name":{json_text(call.name)},"arguments":{arguments}}}'
        return f'{{"tool_calls":[{{"index":{call.index},"id":{json_text(call.id)},"type":"function","function":{function}}}]}}'

    def _logprobs(self, entries: Sequence[TokenLogprobs] | None) -> str:
        if entries is None or not self._with_logprobs:
            return "null"
        return f'{{"content":{logprobs_text(self._tokenizer, entries, as_ids=self._as_ids)}}}'


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
