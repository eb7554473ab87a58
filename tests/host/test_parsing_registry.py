"""Which formats are taken for which model."""

from __future__ import annotations

import time

import pytest

from tpu_serve.option import ConfigError
from tpu_serve.parsing.formats import CALL_FORMATS, REASONING_FORMATS
from tpu_serve.parsing.registry import Formats, name_of


@pytest.mark.parametrize(
    ("architecture", "template", "reasoning", "calls"),
    [
        ("Qwen3MoeForCausalLM", "{% if x %}<tool_call>{% endif %}</think>", "qwen3", "hermes"),
        ("Qwen3MoeForCausalLM", "<tool_call>\n<function=example>", "qwen3", "qwen3_coder"),
        ("Qwen3MoeForCausalLM", None, "qwen3", "hermes"),
        ("Qwen3NextForCausalLM", "", "qwen3", "hermes"),
        ("Qwen3_5MoeForConditionalGeneration", "", "qwen3", "qwen3_coder"),
        ("Qwen2MoeForCausalLM", "", None, "hermes"),
        ("Gemma4ForConditionalGeneration", "", "gemma4", "gemma4"),
        ("AnyForCausalLM", "<|channel>thought <|tool_call>", "gemma4", "gemma4"),
        ("GptOssForCausalLM", "", "harmony", "harmony"),
        ("AnyForCausalLM", {"default": "<think>", "tool_use": "<tool_call>"}, "qwen3", "hermes"),
        ("MixtralForCausalLM", "[INST]", None, None),
        ("Gemma3ForCausalLM", "<start_of_turn>", None, None),
    ],
)
def test_the_template_decides_and_then_the_architecture(
    architecture: str, template: str | None, reasoning: str | None, calls: str | None
):
    formats = Formats.choose(architecture=architecture, template=template)
    assert (name_of(formats.reasoning), name_of(formats.calls)) == (reasoning, calls)


def test_a_name_wins_and_none_turns_it_off():
    formats = Formats.choose(reasoning="none", calls="qwen3_xml", architecture="Qwen3MoeForCausalLM")
    assert (name_of(formats.reasoning), name_of(formats.calls)) == (None, "qwen3_coder")
    assert name_of(Formats.choose(reasoning="openai_gptoss", calls="openai").calls) == "harmony"
    assert Formats.choose(reasoning="", calls="").calls is None


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(
        ConfigError, match=r"--tool-call-parser .*hermes, .*qwen3_coder.*'hermez'\. Did you mean hermes\?"
    ):
        Formats.choose(calls="hermez")
    with pytest.raises(ConfigError, match=r"--reasoning-parser .*qwen3, .*gemma4"):
        Formats.choose(reasoning="zzz")


def test_names_are_unique():
    for formats in (CALL_FORMATS, REASONING_FORMATS):
        names = [name for item in formats for name in (item.name, *item.aliases)]
        assert len(set(names)) == len(names)


def test_markers_are_those_of_what_is_read():
    formats = Formats.choose(reasoning="gemma4", calls="gemma4")
    assert formats.markers(reads_calls=False) == {"<|channel>", "<channel|>"}
    assert formats.markers(reads_calls=True) >= {"<|tool_call>", '<|"|>'}
    assert Formats().markers(reads_calls=True) == frozenset()


@pytest.mark.parametrize("length", [0, 100, 4080, 4096, 10_000])
def test_what_a_prompt_has_written_of_the_answer(length: int):
    formats = Formats.choose(reasoning="qwen3")
    words = "a" * length
    assert formats.prompt_end(f"<|im_start|>user\n{words}<|im_start|>assistant\n<think>") == "<think>"
    assert formats.prompt_end(f"<|im_start|>user\n<|im_start|>assistant\n{words} b") == f"{words} b"
    assert formats.prompt_end(f"{words}<think>") == "<think>"
    assert formats.prompt_end(words) == ""


def test_a_long_prompt_is_not_searched_for_every_choice():
    formats = Formats.choose(reasoning="qwen3")
    prompt = "<|im_start|>user\n" + "words [ < " * 200_000 + "<|im_end|>\n<|im_start|>assistant\n"
    start = time.perf_counter()
    for _ in range(256):
        formats.parser(prompt=prompt)
    assert time.perf_counter() - start < 2, "it takes ten times as long when all of it is searched"
