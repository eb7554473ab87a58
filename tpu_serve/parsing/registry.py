"""Which formats a model's answers are read in: the ones that were asked for, or what its chat template and architecture say."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tpu_serve.option import ConfigError
from tpu_serve.parsing.answer import AnswerParser
from tpu_serve.parsing.formats import (
    CALL_FORMATS,
    HARMONY,
    JSON_CALLS,
    REASONING_FORMATS,
    CallFormat,
    ReasoningFormat,
    Tools,
)
from tpu_serve.parsing.harmony import Harmony

AUTO, NONE = "auto", "none"
T = TypeVar("T")

_CALL_NAMES = {name: item for item in CALL_FORMATS for name in (item.name, *item.aliases)}
_REASONING_NAMES = {name: item for item in REASONING_FORMATS for name in (item.name, *item.aliases)}
# What a template mentions decides first, the likeliest mark of a format first; then the architecture's name.
_CALL_MARKS = (
    ("<|tool_call>", "gemma4"),
    ("<|channel|>", HARMONY),
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
)
_REASONING_MARKS = (("<|channel>", "gemma4"), ("<|channel|>", HARMONY), ("<think>", "qwen3"), ("</think>", "qwen3"))
_CALL_FAMILIES = (("GptOss", HARMONY), ("Gemma4", "gemma4"), ("Qwen3_5", "qwen3_coder"), ("Qwen", "hermes"))
_REASONING_FAMILIES = (("GptOss", HARMONY), ("Gemma4", "gemma4"), ("Qwen3", "qwen3"))
_TURN = re.compile(r"(?:<\|im_start\|>|<\|turn>|<\|start\|>|<start_of_turn>)[A-Za-z]+\n?|\[/INST\]|<｜Assistant｜>")

_USUAL_END = 4096
"""Characters in which the last turn of a prompt mostly begins: a long prompt is not searched for every choice of its answer."""


@dataclass(frozen=True, slots=True)
class Formats:
    """How the answers of one model are read.

    Attributes:
      reasoning, calls: None for text that is taken as it is.
    """

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None

    @classmethod
    def choose(
        cls,
        *,
        reasoning: str = AUTO,
        calls: str = AUTO,
        architecture: str = "",
        template: str | Mapping[str, str] | None = None,
    ) -> Formats:
        """
        Args:
          reasoning, calls: the name of a format, "auto" or "none".
          architecture: class name from config.json.
          template: the chat template's source, or several by name.

        Raises:
          ConfigError: there is no format of that name.
        """
        text = template or "" if isinstance(template, str | None) else "\n".join(template.values())
        return cls(
            _choose(
                "--reasoning-parser",
                reasoning,
                _REASONING_NAMES,
                text,
                _REASONING_MARKS,
                architecture,
                _REASONING_FAMILIES,
            ),
            _choose("--tool-call-parser", calls, _CALL_NAMES, text, _CALL_MARKS, architecture, _CALL_FAMILIES),
        )

    def parser(
        self, *, tools: Tools = (), reads_calls: bool = False, is_plain: bool = False, prompt: str = ""
    ) -> AnswerParser:
        """A parser of one answer.

        Args:
          tools: what may be called.
          reads_calls: calls are looked for.
          is_plain: calls come in the plain form, whatever the model's own is.
          prompt: the prompt's text.
        """
        format = JSON_CALLS if is_plain or self.calls is None else self.calls
        prompt_end = self.prompt_end(prompt)
        is_harmony = HARMONY in (name_of(self.reasoning), name_of(self.calls) if reads_calls else None)
        if is_harmony:
            whole = Harmony(with_calls=reads_calls and not is_plain)
            calls = JSON_CALLS.make(tools) if reads_calls and is_plain and JSON_CALLS.make else None
            return AnswerParser(whole, calls, prompt_end=prompt_end, keeps_reasoning=self.reasoning is not None)
        parser = None
        if self.reasoning is not None and self.reasoning.make is not None:
            ends: Sequence[str] = format.ends_thought if reads_calls and format is not None else ()
            parser = self.reasoning.make(ends)
        call_parser = format.make(tools) if reads_calls and format is not None and format.make is not None else None
        return AnswerParser(parser, call_parser, prompt_end=prompt_end)

    def prompt_end(self, prompt: str) -> str:
        """What a prompt has written of the answer: what follows the opening of its last turn."""
        for text in (prompt[-_USUAL_END:], prompt):
            turns = [match.end() for match in _TURN.finditer(text)]
            if turns:
                return text[turns[-1] :]
        end = prompt.rstrip()
        start = self.reasoning.start if self.reasoning is not None else ""
        return start if start and end.endswith(start) else ""

    def markers(self, *, reads_calls: bool) -> frozenset[str]:
        """Texts that must reach a parser even where they are special tokens."""
        found: set[str] = set(self.reasoning.markers if self.reasoning is not None else ())
        if reads_calls and self.calls is not None:
            found.update(self.calls.markers)
        return frozenset(found)


def name_of(format: CallFormat | ReasoningFormat | None) -> str | None:
    return None if format is None else format.name


def _choose(
    flag: str,
    asked: str,
    named: Mapping[str, T],
    template: str,
    marks: Sequence[tuple[str, str]],
    architecture: str,
    families: Sequence[tuple[str, str]],
) -> T | None:
    if asked in ("", NONE):
        return None
    if asked != AUTO:
        if asked not in named:
            near = difflib.get_close_matches(asked, named, n=1)
            guess = f" Did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{flag} must be auto, none or one of {', '.join(named)}, got {asked!r}.{guess}")
        return named[asked]
    for mark, name in marks:
        if mark in template:
            return named[name]
    for prefix, name in families:
        if architecture.startswith(prefix):
            return named[name]
    return None
