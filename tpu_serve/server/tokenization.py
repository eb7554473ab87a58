"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from tpu_serve.request import InvalidRequest
from tpu_serve.server.chat_prompt import chat_prompt
from tpu_serve.server.errors import show
from tpu_serve.server.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, given_fields, parse
from tpu_serve.server.replies import DetokenizeReply, TokenizeReply, whole
from tpu_serve.server.service import LONG_TEXT, Service, check_model

T = TypeVar("T")


async def tokenize(body: Any, service: Service) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Token ids of a text or of a chat, whatever their number, and the names of fields that are ignored.

    Raises:
      InvalidRequest: the body is neither.
    """
    given = given_fields(body)
    if ("prompt" in given) == ("messages" in given):
        raise InvalidRequest("prompt", "Exactly one of prompt and messages must be given.", "missing_field")
    if "prompt" in given:
        text, ignored = parse(TokenizeTextRequest, body, strict_fields=service.strict_fields)
        check_model(text.model, service.names)
        token_ids = await service.encode(text.prompt, text.add_special_tokens, "prompt")
    else:
        chat, ignored = parse(TokenizeChatRequest, body, strict_fields=service.strict_fields)
        check_model(chat.model, service.names)
        token_ids, _, unknown = await chat_prompt(service, chat)
        ignored += unknown
    wants_spellings = given.get("return_token_strs", False)
    spellings = await in_thread(_token_spellings, service, token_ids) if wants_spellings else None
    reply = TokenizeReply(
        count=len(token_ids), max_model_len=service.info.max_model_len, tokens=token_ids, token_strs=spellings
    )
    return whole(reply), ignored


async def detokenize(body: Any, service: Service) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The text of token ids, special tokens shown, and the names of fields that are ignored.

    Raises:
      InvalidRequest: an id is out of the vocabulary.
    """
    request, ignored = parse(DetokenizeRequest, body, strict_fields=service.strict_fields)
    check_model(request.model, service.names)
    size = service.tokenizer.vocab_size
    for token_id in request.tokens:
        if not 0 <= token_id < size:
            raise InvalidRequest(
                "tokens",
                f"Token id {show(token_id)} is out of vocabulary: ids must be in [0, {size}).",
                "out_of_vocabulary",
            )
    text = await in_thread(_text, service, request.tokens)
    return whole(DetokenizeReply(prompt=text)), ignored


async def in_thread(work: Callable[[Service, list[int]], T], service: Service, token_ids: list[int]) -> T:
    """Does work on tokens; in a thread when they are many, so that other requests' streams go on."""
    if len(token_ids) < LONG_TEXT:
        return work(service, token_ids)
    return await asyncio.to_thread(work, service, token_ids)


def _token_spellings(service: Service, token_ids: list[int]) -> list[str]:
    return [service.tokenizer.token_spelling(token_id) for token_id in token_ids]


def _text(service: Service, token_ids: list[int]) -> str:
    return service.tokenizer.decode(token_ids, skip_special_tokens=False)
