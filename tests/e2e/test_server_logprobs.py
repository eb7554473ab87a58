"""Log-probabilities of prompts and answers: echo, prompt_logprobs, tokens by their ids, places in the text."""

from typing import Any

import pytest
from fakes import END, START, VOCAB_SIZE, FakeRunner, Served, asynchronous, byte_tokenizer, saying, serving
from test_server_answers import check_shape, flat, join
from test_server_errors import CHAT, COMPLETIONS, USER, check_error

from tpu_serve.config import ServerConfig
from tpu_serve.server.logprobs import TextPlace
from tpu_serve.server.replies import ChatReply, CompletionReply


async def echo(served: Served, **fields: Any) -> dict[str, Any]:
    """The one choice of an echo with log-probabilities, the same in a stream and whole."""
    fields = {"prompt": "hi", "echo": True, "logprobs": 2, "return_token_ids": True, **fields}
    answer = await served.complete(**fields)
    check_shape(CompletionReply, answer)
    chunks = await served.events(COMPLETIONS, **fields)
    joined = join(chunks)
    assert joined == {choice["index"]: flat(choice) for choice in answer["choices"]}
    return joined[0]


@asynchronous
async def test_an_echo_with_log_probabilities():
    async with serving(runner=FakeRunner(script=saying("!?"))) as served:
        for max_tokens, text, reason in ((0, "hi", "length"), (1, "hi!", "length"), (9, "hi!?", "stop")):
            choice = await echo(served, max_tokens=max_tokens)
            assert (choice["text"], choice["finish_reason"]) == (text, reason)
            shown = [*text, "<|im_end|>"] if reason == "stop" else [*text]
            assert choice["tokens"] == shown
            assert choice["token_logprobs"] == [None] + [-0.25] * (len(shown) - 1)
            assert choice["top_logprobs"][:2] == [None, {"i": -0.25, "j": -1.25}]
            assert choice["text_offset"] == list(range(len(shown)))
            assert choice["token_ids"] == [*text[2:].encode()] + [END] * (reason == "stop")
        answer = await served.complete(prompt="hi", echo=True, logprobs=1, max_tokens=0)
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["prompt_tokens"] == 2
        await served.idle()


@asynchronous
async def test_an_echo_of_several_prompts_and_choices():
    async with serving(runner=FakeRunner(script=saying("!"))) as served:
        for max_tokens, end in ((0, []), (1, ["!"])):
            prompts = ["ab", "c", "x" * 100]  # the last one takes more than one step
            answer = await served.complete(
                prompt=prompts, echo=True, logprobs=0, n=2, max_tokens=max_tokens, return_token_ids=True
            )
            assert [choice["index"] for choice in answer["choices"]] == list(range(6))
            for choice in answer["choices"]:
                prompt = prompts[choice["index"] // 2]
                assert choice["prompt_token_ids"] == [*prompt.encode()]
                assert choice["logprobs"]["tokens"] == [*prompt, *end]
                assert choice["logprobs"]["token_logprobs"] == [None] + [-0.25] * (len(prompt) + len(end) - 1)
                assert choice["logprobs"]["top_logprobs"][1:] == [{token: -0.25} for token in [*prompt[1:], *end]]
                assert choice["logprobs"]["text_offset"] == list(range(len(prompt) + len(end)))


@asynchronous
async def test_places_in_a_text_of_many_bytes():
    async with serving(runner=FakeRunner(script=saying("😀!"))) as served:
        choice = await echo(served, prompt="é\n1. x", max_tokens=5, logprobs=0)
        assert choice["text"] == "é\n1. x😀!"
        assert choice["text_offset"] == [0, 0, 1, 2, 3, 4, 5, 6, 6, 6, 6, 7]
        for offset, token in zip(choice["text_offset"], choice["tokens"], strict=True):
            assert token in ("\ufffd", choice["text"][offset])
        # special tokens of a prompt stand in its text where they were written, and nowhere else
        choice = await echo(served, prompt="a<|im_end|>b", max_tokens=1, logprobs=0)
        assert choice["text"].startswith("a<|im_end|>b")
        assert choice["text_offset"] == [0, 1, 11, 12]
        choice = await echo(served, prompt=[97, END, 98], max_tokens=1, logprobs=0)
        assert choice["text"].startswith("ab")
        assert choice["text_offset"] == [0, 1, 1, 2]
        choice = await echo(served, prompt=[97, 0xC3], max_tokens=5, logprobs=0)
        assert choice["text"] == "a\ufffd😀!"
        assert choice["text_offset"] == [0, 1, 2, 2, 2, 2, 3]
        choice = await echo(served, prompt=[97, END, 98], max_tokens=1, logprobs=0, skip_special_tokens=False)
        assert choice["text_offset"] == [0, 1, 11, 12]
    async with serving(runner=FakeRunner(script=saying("a", START, "b"))) as served:
        for skip, offsets in ((True, [0, 1, 1, 2]), (False, [0, 1, 13, 14])):
            logprobs = (await served.complete(logprobs=0, skip_special_tokens=skip))["choices"][0]["logprobs"]
            assert logprobs["text_offset"] == offsets


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"ab", b"c"], [0, 2]),
        ([b"\xf0\x9f", b"\x98\x80", b"x"], [0, 0, 1]),
        ([b"a\xc3", b"\xa9b", b"c"], [0, 1, 3]),
        ([b"\xc3", b"(", b"x"], [0, 1, 2]),
        ([b"\xf0", b"\xf0", b"\x9f\x98\x80", b"x"], [0, 1, 1, 2]),
        ([b"", b"a", b"", b"b"], [0, 0, 1, 1]),
    ],
)
def test_where_tokens_begin(pieces: list[bytes], offsets: list[int]):
    tokenizer = byte_tokenizer()
    tokenizer._bytes.update(enumerate(pieces))
    place = TextPlace(tokenizer, skip_special_tokens=True)
    assert [place.next(index) for index in range(len(pieces))] == offsets


@asynchronous
async def test_prompt_logprobs():
    async with serving(runner=FakeRunner(script=saying("!"))) as served:
        entry = {"logprob": -0.25, "decoded_token": "i"}
        second = {"106": {"logprob": -1.25, "rank": 2, "decoded_token": "j"}}
        for count, expected in (
            (0, {"105": {**entry, "rank": None}}),
            (1, {"105": {**entry, "rank": 1}}),
            (2, {"105": {**entry, "rank": 1}, **second}),
        ):
            answer = await served.complete(prompt_logprobs=count)
            check_shape(CompletionReply, answer)
            assert answer["choices"][0]["prompt_logprobs"] == [None, expected]
            assert answer["choices"][0]["logprobs"] is None
        answer = await served.complete(prompt=["ab", "c"], prompt_logprobs=1, n=2, max_tokens=0, echo=True, logprobs=2)
        assert [list(choice["prompt_logprobs"][-1] or {}) for choice in answer["choices"]] == [["98"], ["98"], [], []]
        assert [len(choice["logprobs"]["top_logprobs"][-1] or {}) for choice in answer["choices"]] == [2, 2, 0, 0]
        answer = await served.complete(prompt="ab", prompt_logprobs=3, max_tokens=1, echo=True, logprobs=1)
        assert [len(tops) for tops in answer["choices"][0]["logprobs"]["top_logprobs"][1:]] == [1, 1]
        assert len(answer["choices"][0]["prompt_logprobs"][1]) == 3
        assert (await served.complete())["choices"][0]["prompt_logprobs"] is None
        chat = await served.chat(prompt_logprobs=1, return_token_ids=True)
        check_shape(ChatReply, chat)
        ids = [list(tokens or {}) for tokens in chat["prompt_logprobs"]]
        assert ids == [[], *([str(token_id)] for token_id in chat["prompt_token_ids"][1:])]
        for path, body in ((COMPLETIONS, {"prompt": "hi"}), (CHAT, {"messages": [USER]})):
            response = await served.post(path, {**body, "prompt_logprobs": 1, "stream": True})
            message = check_error(response, 400, "prompt_logprobs", "invalid_value")
            assert message == "prompt_logprobs are not available when stream = true."
            response = await served.post(path, {**body, "prompt_logprobs": 21})
            message = check_error(response, 400, "prompt_logprobs", "invalid_value")
            assert message == "Requested prompt logprobs of 21, which is greater than max allowed: 20."
            response = await served.post(path, {**body, "prompt_logprobs": -1})
            message = check_error(response, 400, "prompt_logprobs", "invalid_value")
            assert message.startswith(f"Requested prompt logprobs of {VOCAB_SIZE}, ")


@asynchronous
async def test_tokens_by_their_ids():
    config = ServerConfig(enable_scripted_output=True)
    async with serving(config) as served:
        fields = {"return_tokens_as_token_ids": True, "scripted_token_ids": [*"aé".encode()]}
        logprobs = (await served.complete(logprobs=2, **fields))["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:97", "token_id:195", "token_id:169", f"token_id:{END}"]
        assert logprobs["top_logprobs"][1] == {"token_id:195": -0.25, "token_id:196": -1.25}
        assert logprobs["text_offset"] == [0, 1, 1, 2]
        content = (await served.chat(logprobs=True, top_logprobs=1, **fields))["choices"][0]["logprobs"]["content"]
        assert content[1]["token"] == content[1]["top_logprobs"][0]["token"] == "token_id:195"
        assert content[1]["bytes"] == [195]
        choice = await echo(served, **fields)
        assert choice["tokens"][:2] == ["token_id:104", "token_id:105"]
