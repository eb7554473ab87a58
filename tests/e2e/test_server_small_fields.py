"""Fields that do little: special tokens around a prompt, and choices that are alike."""

from __future__ import annotations

from fakes import START, FakeRunner, Served, asynchronous, saying, serving
from tokenizers.processors import TemplateProcessing


def open_texts(served: Served) -> None:
    """From now on the tokenizer begins a text with <|im_start|>, as tokenizers with a BOS do."""
    served.engine.tokenizer._backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", START)]
    )


@asynchronous
async def test_special_tokens_around_a_text_can_be_left_out():
    async with serving() as served:
        open_texts(served)
        for fields, tokens in (
            ({}, [START, 104, 105]),
            ({"add_special_tokens": True}, [START, 104, 105]),
            ({"add_special_tokens": False}, [104, 105]),
        ):
            answer = await served.complete(max_tokens=1, return_token_ids=True, **fields)
            assert answer["choices"][0]["prompt_token_ids"] == tokens
            assert answer["usage"]["prompt_tokens"] == len(tokens)
            assert (await served.post("/tokenize", {"prompt": "hi", **fields})).json()["tokens"] == tokens
        # A chat template writes its own.
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        plain = (await served.post("/tokenize", chat)).json()["tokens"]
        opened = (await served.post("/tokenize", {**chat, "add_special_tokens": True})).json()["tokens"]
        assert opened == [START, *plain]
        for fields, tokens in (({}, plain), ({"add_special_tokens": True}, opened)):
            assert (await served.chat(max_tokens=1, return_token_ids=True, **fields))["prompt_token_ids"] == tokens


@asynchronous
async def test_as_many_as_n_are_the_best():
    async with serving() as served:
        assert len((await served.complete(n=2, best_of=2))["choices"]) == 2
        assert len((await served.complete(best_of=1))["choices"]) == 1


@asynchronous
async def test_several_greedy_choices_are_the_same():
    async with serving(runner=FakeRunner(script=saying("yes"))) as served:
        answer = await served.complete(n=3, temperature=0)
        assert [choice["text"] for choice in answer["choices"]] == ["yes"] * 3


@asynchronous
async def test_there_are_no_spaces_between_special_tokens():
    async with serving(runner=FakeRunner(script=saying("a", START, START, "b"))) as served:
        for spaces in (True, False):
            answer = await served.complete(skip_special_tokens=False, spaces_between_special_tokens=spaces)
            assert answer["choices"][0]["text"] == "a<|im_start|><|im_start|>b"
