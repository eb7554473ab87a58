"""The forms in which model families write reasoning and calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpu_serve.parsing import gemma4, harmony, hermes, qwen_xml
from tpu_serve.parsing.json_list import JsonCalls
from tpu_serve.parsing.parser import CallParser, Parser
from tpu_serve.parsing.think import TagReasoning

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family writes calls.

    Attributes:
      name, aliases: what --tool-call-parser calls it.
      markers: texts that the parser looks for; they reach it although some are special tokens.
      start: the text that a call begins with; "" when calls have none of their own.
      make: a parser for one answer; None for Harmony, where one parser reads everything.
      ends_thought: texts that begin a call in the middle of reasoning that was not closed.
    """

    name: str
    markers: tuple[str, ...]
    start: str = ""
    make: Callable[[Tools], CallParser] | None = None
    aliases: tuple[str, ...] = ()
    ends_thought: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family writes reasoning.

    Attributes:
      name, aliases: what --reasoning-parser calls it.
      markers: see `CallFormat`.
      start, end: what reasoning begins with, and what the answer's own words come after.
      make: a parser for one answer, given texts that end a thought too; None for Harmony.
      is_always_open: answers begin inside of reasoning whatever the prompt says.
      thought_end: what a thought ends with.
    """

    name: str
    markers: tuple[str, ...]
    start: str
    end: str
    make: Callable[[Sequence[str]], Parser] | None = None
    aliases: tuple[str, ...] = ()
    is_always_open: bool = False
    thought_end: str = ""


HARMONY_MARKERS = (
    harmony.START,
    harmony.CHANNEL,
    harmony.MESSAGE,
    harmony.CONSTRAIN,
    harmony.END,
    harmony.CALL,
    harmony.RETURN,
)
HARMONY = "harmony"
_XML_STARTS = tuple(f"{qwen_xml.START}{space}{qwen_xml.FUNCTION}" for space in ("\n", ""))
_JSON_STARTS = tuple(f"{hermes.START}{space}{{" for space in ("\n", ""))

CALL_FORMATS = (
    CallFormat(
        "hermes",
        (hermes.START, hermes.END),
        hermes.START,
        lambda tools: hermes.HermesCalls(),
        ("qwen", "qwen2_5", "qwen3"),
        _JSON_STARTS,
    ),
    CallFormat(
        "qwen3_coder",
        (qwen_xml.START, qwen_xml.END),
        qwen_xml.START,
        qwen_xml.QwenXmlCalls,
        ("qwen3_xml",),
        _XML_STARTS,
    ),
    CallFormat(
        "gemma4",
        (gemma4.START, gemma4.END, gemma4.QUOTE, gemma4.RESPONSE),
        gemma4.START,
        lambda tools: gemma4.Gemma4Calls(),
    ),
    CallFormat(HARMONY, HARMONY_MARKERS, aliases=("openai", "gpt_oss")),
    CallFormat("json", (), "", lambda tools: JsonCalls()),
)
JSON_CALLS = CALL_FORMATS[-1]
"""What a forced call looks like where the model's own form is not known."""

REASONING_FORMATS = (
    ReasoningFormat(
        "qwen3",
        ("<think>", "</think>"),
        "<think>",
        "</think>",
        lambda ends: TagReasoning("<think>", "</think>", ends=ends),
        thought_end="</think>",
    ),
    ReasoningFormat(
        "deepseek_r1",
        ("<think>", "</think>"),
        "<think>",
        "</think>",
        lambda ends: TagReasoning("<think>", "</think>", is_open=True, ends=ends),
        is_always_open=True,
        thought_end="</think>",
    ),
    ReasoningFormat(
        "gemma4",
        ("<|channel>", "<channel|>"),
        "<|channel>",
        "<channel|>",
        lambda ends: TagReasoning(
            "<|channel>", "<channel|>", label="thought", anywhere=True, ends=(*ends, gemma4.START)
        ),
        thought_end="<channel|>",
    ),
    ReasoningFormat(
        HARMONY,
        HARMONY_MARKERS,
        f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",
        f"{harmony.CHANNEL}final{harmony.MESSAGE}",
        aliases=("openai_gptoss", "gpt_oss"),
        thought_end=harmony.END,
    ),
)
