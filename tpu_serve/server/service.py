"""What every endpoint needs to answer: the engine, its tokenizer and chat template, and the names of the model."""

from __future__ import annotations

import asyncio
import difflib
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpu_serve.config import ConfigError, ServerConfig
from tpu_serve.constraint.compiler import GrammarCompiler
from tpu_serve.engine.frontend import Frontend, Observer
from tpu_serve.engine.intake import ModelInfo
from tpu_serve.engine.served import ServedEngine
from tpu_serve.parsing.registry import Formats
from tpu_serve.request import InvalidRequest
from tpu_serve.server.errors import show
from tpu_serve.text.chat_template import RENDER_ARGUMENTS, ChatTemplate
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
      grammars: makes constraints of what requests ask their answers to look like.
      strict_fields: refuse unknown request fields.
      log_requests: log one line per finished request.
      stream_interval: tokens that a chunk of a stream has at least, but for the first and the last one.
      include_usage: streams have their usage at their end and on every chunk, whether they ask for it or not.
      enable_scripted_output: requests may say what the model is to answer.
      formats: how the model writes reasoning and calls of tools.
      allows_auto_tools: requests may leave it to the model whether it calls a tool.
      repeats_reasoning: reasoning is sent under its older name too.
      trusts_templates: requests may bring a chat template.
      template_variables: variables of the chat template that requests may override.
    """

    frontend: Frontend
    names: tuple[str, ...]
    chat_template: ChatTemplate | None
    grammars: GrammarCompiler
    strict_fields: bool = False
    log_requests: bool = False
    stream_interval: int = 1
    include_usage: bool = False
    enable_scripted_output: bool = False
    formats: Formats = field(default_factory=Formats)
    allows_auto_tools: bool = True
    repeats_reasoning: bool = True
    trusts_templates: bool = False
    template_variables: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def start(
        cls,
        engine: ServedEngine,
        config: ServerConfig,
        names: tuple[str, ...],
        observer: Observer | None = None,
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> Service:
        """Starts the engine. Call it in the event loop that will use the service; `close` ends it.

        Raises:
          ConfigError: the chat template cannot be used, or a parser of answers is not known.
        """
        for name in config.default_chat_template_kwargs:
            if name in RENDER_ARGUMENTS or name == "self":
                raise ConfigError(f"--default-chat-template-kwargs cannot set {name}: each request says it for itself.")
        template = ChatTemplate.load(engine.tokenizer, config.chat_template)
        formats = Formats.choose(
            reasoning=config.reasoning_parser,
            calls=config.tool_call_parser,
            architecture=engine.info.architecture,
            template=None if template is None else template.source,
        )
        frontend = Frontend(engine, observer, on_failure)
        return cls(
            frontend,
            names,
            template,
            GrammarCompiler(engine.tokenizer, engine.info.vocab_size, engine.info.eos_token_ids),
            strict_fields=config.strict_fields,
            log_requests=config.enable_log_requests,
            stream_interval=config.stream_interval,
            include_usage=config.enable_force_include_usage,
            enable_scripted_output=config.enable_scripted_output,
            formats=formats,
            allows_auto_tools=config.enable_auto_tool_choice,
            repeats_reasoning=config.reasoning_content,
            trusts_templates=config.trust_request_chat_template,
            template_variables=config.default_chat_template_kwargs,
        )

    def close(self) -> None:
        """Ends the engine and the compiler's workers. Blocks for the step under way."""
        self.grammars.close()
        self.frontend.close()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.frontend.engine.tokenizer

    @property
    def info(self) -> ModelInfo:
        return self.frontend.engine.info

    async def encode(self, text: str, add_special_tokens: bool, param: str, *, is_prompt: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
          param: name of the field that held it, for messages.
          is_prompt: it must fit into the context, so a text that cannot is refused before it is tokenised.
        """
        if is_prompt:
            self._refuse_over_long(text, param)
        try:
            if len(text) < LONG_TEXT:
                return self.tokenizer.encode(text, add_special_tokens)
            return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens)
        except InvalidRequest as error:
            raise InvalidRequest(error.param or param, error.message, error.reason, error.status) from None

    def _refuse_over_long(self, text: str, param: str) -> None:
        most = self.tokenizer.characters_per_token
        limit = self.info.max_model_len
        if most is not None and len(text) > limit * most:
            raise InvalidRequest(
                param,
                f"This model's maximum context length is {limit} tokens. However, your prompt has {len(text)} characters, which are at "
                f"least {-(-len(text) // most)} tokens.",
                "context_length_exceeded",
            )


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
