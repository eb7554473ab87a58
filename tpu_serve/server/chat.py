"""Chat completions."""

from __future__ import annotations

import functools
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tpu_serve.parsing.counter import ReasoningCounter
from tpu_serve.request import InvalidRequest, TokenLogprobs
from tpu_serve.server import answer as answers
from tpu_serve.server.answer import start_generations, stream_usage
from tpu_serve.server.chat_choice import ChatChoiceReader, MessagePart
from tpu_serve.server.chat_chunks import ChatChunks
from tpu_serve.server.chat_constraint import chat_constraint
from tpu_serve.server.chat_prompt import ChatPrompt, chat_prompt
from tpu_serve.server.fanout import Fanout, Piece, Source
from tpu_serve.server.logprobs import chat_logprobs, prompt_logprobs
from tpu_serve.server.protocol import ChatCompletionRequest, parse
from tpu_serve.server.replies import (
    ChatChoice,
    ChatLogprobs,
    ChatReply,
    Counts,
    Usage,
    whole,
)
from tpu_serve.server.sampling import (
    check_cache_salt,
    check_logprobs,
    read_length,
    sampling_params,
    script_of,
    truncate,
)
from tpu_serve.server.service import Service, check_model, make_id
from tpu_serve.server.tools import ToolUse, read_tools


class ChatAnswer:
    """See `Answer`."""

    def __init__(
        self,
        service: Service,
        request: ChatCompletionRequest,
        source: Source,
        *,
        request_id: str,
        ignored: tuple[str, ...],
        prompt: ChatPrompt,
        use: ToolUse,
    ):
        self.request_id, self.ignored, self.is_stream = request_id, ignored, request.stream
        self._service, self._request, self._source = service, request, source
        self._prompt, self._use = prompt, use
        self._readers: dict[int, ChatChoiceReader] = {}
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()),
            "model": service.names[0],
        }
        self._chunks = ChatChunks(
            self._head,
            service.tokenizer,
            with_logprobs=request.logprobs,
            with_token_ids=request.return_token_ids,
            as_ids=request.return_tokens_as_token_ids,
            repeats_reasoning=service.repeats_reasoning,
        )

    async def complete(self) -> dict[str, Any]:
        pieces: dict[int, list[Piece]] = {}
        async with aclosing(self.parts()) as parts:
            async for piece, _ in parts:
                pieces.setdefault(piece.index, []).append(piece)
        return whole(
            ChatReply(
                **self._head,
                choices=[self._choice(index, pieces[index]) for index in sorted(pieces)],
                usage=self.usage(),
                metrics=self._source.metrics(),
                prompt_logprobs=self._prompt_logprobs(pieces[0][0]),
                **self._prompt_fields(),
            )
        )

    async def parts(self) -> AsyncGenerator[tuple[Piece, list[MessagePart]], None]:
        """The pieces of its choices, each with what it adds to the message of its choice."""
        async with aclosing(self._source.pieces()) as pieces:
            async for piece in pieces:
                yield piece, self._reader(piece.index).read(piece)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        include_usage, on_every_chunk = stream_usage(self._service, self._request)
        waiting: dict[int, Piece] = {}
        async with aclosing(self._source.pieces()) as pieces:
            async for piece in pieces:
                index = piece.index
                if piece.is_first:
                    counts = self._counts()
                    # The role comes before the piece's tokens do.
                    before = counts._replace(completion=counts.completion - len(piece.token_ids))
                    usage = before.usage() if on_every_chunk else None
                    yield self._chunks.opening(index, usage=usage, **self._prompt_fields())
                reader = self._reader(index)
                parts = reader.read(piece)
                if waiting and (held := waiting.pop(index, None)) is not None:
                    held.token_ids += piece.token_ids  # in place, for reasoning that is not shown is long
                    held.logprobs += piece.logprobs
                    piece.token_ids, piece.logprobs = held.token_ids, held.logprobs
                if not parts and piece.finish_reason is None:
                    waiting[index] = piece  # its text may be part of a tag
                    continue
                told = f',"usage":{self._counts().text()}' if on_every_chunk else ""
                for chunk in self._chunks.of(piece, parts, reader.finish_reason, told):
                    yield chunk
        if include_usage:
            yield self._chunks.rare([], usage=self.usage(), metrics=self._source.metrics())

    def usage(self) -> Usage:
        return self._counts().usage()

    def close(self) -> None:
        self._source.close()

    def _counts(self) -> Counts:
        counts = self._source.counts()
        if self._service.formats.reasoning is None:
            return counts
        return counts._replace(reasoning=sum(reader.num_reasoning_tokens for reader in self._readers.values()))

    def _prompt_fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = self._prompt.token_ids
        if self._request.return_prompt_text:
            fields["prompt_text"] = self._prompt.text
        return fields

    def _reader(self, index: int) -> ChatChoiceReader:
        reader = self._readers.get(index)
        if reader is None:
            service, use, prompt = self._service, self._use, self._prompt.text
            new_parser = functools.partial(
                service.formats.parser,
                tools=use.tools,
                reads_calls=use.reads_calls,
                is_plain=use.is_forced and service.formats.calls is None,
                prompt=prompt,
            )
            counter = None
            if service.formats.reasoning is not None:
                counter = ReasoningCounter(new_parser(), service.tokenizer.token_bytes)
            reader = self._readers[index] = ChatChoiceReader(
                new_parser(),
                counter,
                use,
                shows_reasoning=self._request.include_reasoning,
                repeats_reasoning=service.repeats_reasoning,
                opening=_echo(self._request),
            )
        return reader

    def _choice(self, index: int, pieces: list[Piece]) -> ChatChoice:
        last, reader = pieces[-1], self._readers[index]
        return ChatChoice(
            index=index,
            message=reader.message(),
            logprobs=self._logprobs([entry for piece in pieces for entry in piece.logprobs]),
            finish_reason=reader.finish_reason,
            stop_reason=last.stop_reason,
            token_ids=[token_id for piece in pieces for token_id in piece.token_ids]
            if self._request.return_token_ids
            else None,
        )

    def _logprobs(self, entries: list[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return chat_logprobs(self._service.tokenizer, entries, as_ids=self._request.return_tokens_as_token_ids)

    def _prompt_logprobs(self, piece: Piece) -> Any:
        num_top = self._request.prompt_logprobs
        if num_top is None:
            return None
        return prompt_logprobs(self._service.tokenizer, piece.prompt_logprobs or (), num_top=num_top)


async def start_chat(body: Any, service: Service, request_id: str | None = None) -> ChatAnswer:
    """Checks a chat request and starts generating.

    Args:
      request_id: wins over the body's.

    Raises:
      InvalidRequest: the request cannot be served as asked.
    """
    request, ignored = parse(ChatCompletionRequest, body, strict_fields=service.strict_fields)
    check_model(request.model, service.names)
    request_id = request_id or make_id(request.request_id)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs", "top_logprobs needs logprobs = true.")
    top_logprobs = check_logprobs(service, "top_logprobs", request.top_logprobs) or 0
    max_tokens = read_length("max_tokens", request.max_tokens)
    if request.max_completion_tokens is not None:
        max_tokens = read_length("max_completion_tokens", request.max_completion_tokens)
    params = sampling_params(
        service, request, max_tokens=max_tokens, logprobs=top_logprobs if request.logprobs else None
    )
    salt, script = check_cache_salt(request.cache_salt), script_of(service, request)
    use = read_tools(request, knows_calls=service.formats.calls is not None, allows_auto=service.allows_auto_tools)
    prompt = await chat_prompt(service, request, with_tools=use.reads_calls)
    token_ids = list(truncate(request, prompt.token_ids, service.info.max_model_len))
    constraint = await chat_constraint(service, request, use, prompt.text)
    generations = start_generations(
        service,
        request_id,
        [token_ids],
        params,
        cache_salt=salt,
        param="messages",
        priority=request.priority or 0,
        constraint=None if script else constraint,  # a script says what comes, whatever is allowed
        forced_token_ids=script,
        shown_token_ids=_shown_token_ids(service, use),
    )
    return ChatAnswer(
        service,
        request,
        Fanout(generations, params.n, interval=service.stream_interval),
        request_id=request_id,
        ignored=ignored + prompt.ignored,
        prompt=prompt._replace(token_ids=token_ids),
        use=use,
    )


async def create_chat_completion(body: Any, service: Service, request_id: str | None = None) -> dict[str, Any]:
    """The whole answer to a chat request, without HTTP.

    Raises:
      InvalidRequest, EngineDead, HttpError: see `errors.error_body`.
    """
    return await answers.complete(start_chat, body, service, request_id)


def stream_chat_completion(
    body: Any, service: Service, request_id: str | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """The chunks of a chat answer, without HTTP; raises as `create_chat_completion` does, at any point."""
    return answers.stream(start_chat, body, service, request_id)


def _shown_token_ids(service: Service, use: ToolUse) -> frozenset[int]:
    """Special tokens that the parsers of the answer look for."""
    texts = service.formats.markers(reads_calls=use.reads_calls)
    found = (service.tokenizer.token_id(text) for text in texts)
    return frozenset(token_id for token_id in found if token_id is not None)


def _echo(request: ChatCompletionRequest) -> str:
    """With `echo`, an answer that speaks for the same role as the last message begins with that message."""
    last = request.messages[-1]
    if not request.echo or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(str(part.get("text", "")) for part in last.content)
