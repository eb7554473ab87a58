"""Messages of a chat to the text of a prompt, by the model's own jinja2 template."""

from __future__ import annotations

import datetime
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from tpu_serve.config import ConfigError
from tpu_serve.request import InvalidRequest
from tpu_serve.text.tokenizer import Tokenizer

RENDER_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Names that a request's template variables may not take, because `ChatTemplate.render` has arguments of these names."""


class ChatTemplate:
    """A chat template, or a family of them by name. Never changes once made, so threads may share it.

    Attributes:
      variables: names that the template looks up, to tell a request's unknown template variables from known ones.
      source: the text of the template, of all of them if there are several.
    """

    def __init__(self, source: str | Mapping[str, str], special_tokens: Mapping[str, str]):
        """Compiles the template. Of several, `tool_use` serves requests with tools and `default` the others.

        Raises `ConfigError` for a template that is not jinja2.
        """
        named = {"default": source} if isinstance(source, str) else source
        if "default" not in named:
            raise ConfigError(f"None of the chat templates ({', '.join(named) or 'there are none'}) is named default.")
        environment = _make_environment()
        self.source = "\n".join(named.values())
        self._special_tokens = dict(special_tokens)
        try:
            trees = {name: environment.parse(text) for name, text in named.items()}
            self._templates = {name: environment.from_string(text) for name, text in named.items()}
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"The chat template is wrong at line {error.lineno}: {error.message}") from error
        self.variables = frozenset().union(*(jinja2.meta.find_undeclared_variables(tree) for tree in trees.values()))

    @classmethod
    def load(cls, tokenizer: Tokenizer, override_file: str | Path | None = None) -> ChatTemplate | None:
        """The template of `override_file`, else the tokenizer's own, else None: a server then refuses chat requests."""
        source = tokenizer.chat_template_source
        if override_file is not None:
            try:
                source = Path(override_file).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"The chat template {override_file} cannot be read: {error}") from error
        return None if source is None else cls(source, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """The prompt's text, special tokens written out, so it is to be encoded without adding more.

        Args:
          messages: as in the chat API. The role developer reads system where the template does not mention it. Text parts are joined by newlines; `arguments` of tool calls that are JSON objects in a string
            become mappings, which many templates iterate over; `reasoning` is also shown as `reasoning_content` and the other way.
          add_generation_prompt: end with the opening of the assistant's turn.
          continue_final_message: end exactly with the final message's content instead, so that the model continues it.
          template_kwargs: further variables; those that the template does not look up do nothing.

        Raises `InvalidRequest` when the template refuses the messages (in its own words) or cannot render them.
        """
        shown = [_plain_message(index, message) for index, message in enumerate(messages)]
        if "developer" not in self.source:
            # Most templates leave out turns of a role that they do not know.
            for message in shown:
                if message.get("role") == "developer":
                    message["role"] = "system"
        end_mark = ""
        if continue_final_message:
            # Templates decide what follows a message, and some trim it. A mark glued to its end survives both; the cut is there.
            end_mark = uuid.uuid4().hex
            if not shown or not isinstance(shown[-1].get("content"), str):
                raise InvalidRequest("messages", "continue_final_message needs a final message with text to continue.")
            shown[-1]["content"] += end_mark
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        variables = {
            **self._special_tokens,
            **template_kwargs,
            "messages": shown,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
        }
        try:
            text = self._templates[name].render(variables)
        except _RaisedByTemplate as error:
            raise InvalidRequest("messages", str(error)) from error
        except Exception as error:  # a template is a program: it can fail in any way, and only its request may suffer
            raise InvalidRequest("messages", f"The chat template cannot render these messages: {error}") from error
        if not continue_final_message:
            return text
        if end_mark not in text:
            raise InvalidRequest(
                "messages", "The chat template does not show the final message, so it cannot be continued."
            )
        return text[: text.rindex(end_mark)]


class _RaisedByTemplate(jinja2.TemplateError):
    """What a template says through raise_exception."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; a prompt just shows them."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The environment that Hugging Face's transformers gives to chat templates, which are written and tested against it."""

    def raise_exception(message: object) -> NoReturn:
        raise _RaisedByTemplate(str(message))

    def strftime_now(format: str) -> str:
        return datetime.datetime.now().strftime(format)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a message in the shape that templates of text models expect."""
    if not isinstance(message, Mapping):
        raise InvalidRequest("messages", f"messages[{index}] must be an object, got {type(message).__name__}.")
    # An absent field is what templates test for; many write "None" for one that is null.
    plain = {name: value for name, value in message.items() if value is not None}
    if isinstance(plain.get("content"), list | tuple):
        plain["content"] = "\n".join(
            _text_of_part(f"messages[{index}].content[{i}]", part) for i, part in enumerate(plain["content"])
        )
    for name, other in (("reasoning_content", "reasoning"), ("reasoning", "reasoning_content")):
        if name not in plain and other in plain:
            plain[name] = plain[other]
    if plain.get("tool_calls"):
        if not isinstance(plain["tool_calls"], list | tuple):
            raise InvalidRequest("messages", f"messages[{index}].tool_calls must be an array.", "invalid_type")
        plain["tool_calls"] = [_plain_tool_call(call) for call in plain["tool_calls"]]
    return plain


def _text_of_part(where: str, part: object) -> str:
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "text"}:
            raise InvalidRequest("messages", f"{where} must have its text in a string named text.")
        case {"type": kind}:
            raise InvalidRequest("messages", f"{where} has type {kind!r}; only text is supported.")
    raise InvalidRequest("messages", f"{where} must be an object with type and text.")


def _plain_tool_call(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            try:
                value = json.loads(arguments)
            except (ValueError, RecursionError):
                return call
            return {**call, "function": {**function, "arguments": value}} if isinstance(value, dict) else call
    return call
