"""What every endpoint needs to answer: the engine, its tokenizer and chat template, and the names of the model."""

from __future__ import annotations

import asyncio
import difflib
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from tpu_serve.config import ServerConfig
from tpu_serve.engine.engine import Engine
from tpu_serve.engine.frontend import Frontend, Observer
from tpu_serve.engine.intake import ModelInfo
from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import show
from tpu_serve.text.chat_template import ChatTemplate
from tpu_serve.text.tokenizer import Tokenizer

LONG_TEXT = 20_000
"""Characters from which on a text is tokenised in a thread, so that other requests' streams go on."""
MAX_ID_LENGTH = 128


@dataclass(frozen=True, slots=True)
class Service:
    """A running engine and what its endpoints share. Belongs to one event loop; needs no HTTP.

    Attributes:
      names: names of the model that requests may use; the first one is echoed.
      chat_template: None when the model has none, so that chat is refused.
      strict_fields: refuse unknown request fields.
      log_requests: log one line per finished request.
    """

    frontend: Frontend
    names: tuple[str, ...]
    chat_template: ChatTemplate | None
    strict_fields: bool = False
    log_requests: bool = False

    @classmethod
    def start(
        cls,
        engine: Engine,
        config: ServerConfig,
        names: tuple[str, ...],
        observer: Observer | None = None,
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> Service:
        """Starts the engine's thread. Call it in the event loop that will use the service; `frontend.close` ends it.

        Raises:
          ConfigError: the chat template cannot be used.
        """
        template = ChatTemplate.load(engine.tokenizer, config.chat_template)
        frontend = Frontend(engine, observer, on_failure)
        return cls(frontend, names, template, config.strict_fields, config.enable_log_requests)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.frontend.engine.tokenizer

    @property
    def info(self) -> ModelInfo:
        return self.frontend.engine.info

    async def encode(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Token ids of a text.

        Args:
          param: name of the field that held it, for messages.
        """
        try:
            if len(text) < LONG_TEXT:
                return self.tokenizer.encode(text, add_special_tokens)
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)
        except InvalidRequest as error:
            raise InvalidRequest(error.param or param, error.message, error.reason, error.status) from None


def check_model(name: str | None, names: tuple[str, ...]) -> None:
    """Refuses a name that is not served, with status 404; none at all means the served model."""
    if name is None or name in names:
        return
    near = difflib.get_close_matches(name[:MAX_ID_LENGTH], names, n=1)
    guess = f" Did you mean `{near[0]}`?" if near else ""
    raise InvalidRequest(
        "model",
        f"The model `{show(name).strip(chr(39))}` does not exist. Valid aliases: {', '.join(names)}.{guess}",
        "model_not_found",
        404,
    )


def make_id(given: str | None) -> str:
    """An id for an answer: the given one, or a fresh one.

    Raises:
      InvalidRequest: the given one is too long or not printable.
    """
    if given is None:
        return uuid.uuid4().hex
    if not given or clean_id(given) != given:
        raise InvalidRequest(
            "request_id", f"request_id must be 1 to {MAX_ID_LENGTH} printable ASCII characters without spaces."
        )
    return given


def clean_id(text: str) -> str:
    """The printable ASCII part of an id that a client chose, cut to a sane length: it is repeated in every chunk and log line."""
    return "".join(character for character in text if "!" <= character <= "~")[:MAX_ID_LENGTH]
