"""What the fields of a request do: echo, truncation, lengths, chat prompts, ids, defaults; and /tokenize."""

import asyncio
from typing import Any

from fakes import END, FakeRunner, asynchronous, byte_tokenizer, saying, serving

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USAGE = {"include_usage": True}


def text_of(chunks: list[dict[str, Any]]) -> str:
    """The text of the first choice of a stream."""
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if not choice["index"])


@asynchronous
async def test_echo():
    async with serving(runner=FakeRunner(script=saying("!"))) as served:
        for prompt, shown in (("hé", "hé"), ([104, 105], "hi"), (["a", "b"], "a")):
            answer = await served.complete(prompt=prompt, echo=True)
            assert answer["choices"][0]["text"] == f"{shown}!"
            chunks = await served.events(COMPLETIONS, prompt=prompt, echo=True, return_token_ids=True)
            assert text_of(chunks) == f"{shown}!"
        num_steps = served.runner.num_steps
        for n in (1, 2):
            answer = await served.complete(prompt=["hé", "x"], echo=True, max_tokens=0, n=n)
            assert [choice["text"] for choice in answer["choices"]] == ["hé"] * n + ["x"] * n
            assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
            assert answer["usage"]["completion_tokens"] == 0
            assert answer["usage"]["prompt_tokens"] == 4
        chunks = await served.events(COMPLETIONS, prompt="hé", echo=True, max_tokens=0, stream_options=USAGE)
        assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == ["hé"]
        assert served.runner.num_steps == num_steps
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]
        for extra in ({"continue_final_message": True}, {}):
            response = await served.post(CHAT, {"messages": messages, "echo": True, **extra})
            assert response.json()["choices"][0]["message"]["content"] == "Well!"


@asynchronous
async def test_prompts_are_truncated_on_the_asked_side():
    async with serving() as served:
        for fields, kept in (
            ({"truncate_prompt_tokens": 3}, "fgh"),
            ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
            ({"truncate_prompt_tokens": 100}, "abcdefgh"),
        ):
            answer = await served.complete(prompt="abcdefgh", max_tokens=1, return_token_ids=True, echo=True, **fields)
            choice = answer["choices"][0]
            assert bytes(choice["prompt_token_ids"]).decode() == kept
            assert choice["text"].startswith(kept)
            assert answer["usage"]["prompt_tokens"] == len(kept)
        answer = await served.complete(prompt="x" * 1000, truncate_prompt_tokens=-1, max_tokens=9)
        assert answer["usage"]["total_tokens"] == 256
        assert answer["choices"][0]["finish_reason"] == "length"


@asynchronous
async def test_lengths_are_clipped_to_the_context():
    async with serving() as served:
        answer = await served.complete(prompt="x" * 200, max_tokens=10**30)
        assert answer["usage"]["completion_tokens"] == 56
        assert (await served.complete(prompt="x"))["usage"]["completion_tokens"] == 16
        chat = await served.chat()
        assert chat["usage"]["total_tokens"] == 256
        assert (await served.chat(max_tokens=9, max_completion_tokens=2))["usage"]["completion_tokens"] == 2
        assert (await served.chat(max_tokens=9))["usage"]["completion_tokens"] == 9


@asynchronous
async def test_the_chat_prompt():
    tokenizer = byte_tokenizer()

    async def prompt(**fields: Any) -> str:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": True, **fields}
        response = await served.post(CHAT, body)
        assert response.status_code == 200, response.text
        chunks = await served.events(CHAT, **body)
        assert chunks[0]["prompt_token_ids"] == response.json()["prompt_token_ids"]
        del body["max_tokens"], body["return_token_ids"]
        tokens = (await served.post("/tokenize", body)).json()["tokens"]
        assert tokens == response.json()["prompt_token_ids"]
        return tokenizer.decode(tokens, skip_special_tokens=False)

    async with serving() as served:
        opening = "<|im_start|>user\nhi<|im_end|>\n"
        assert await prompt() == f"{opening}<|im_start|>assistant\n"
        assert await prompt(add_generation_prompt=False) == opening
        assert (
            await prompt(chat_template_kwargs={"enable_thinking": True}) == f"{opening}<|im_start|>assistant\n<think>"
        )
        parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
        assert await prompt(
            messages=[{"role": "user", "content": parts}]
        ) == f"{opening}<|im_start|>assistant\n".replace("hi", "h\ni")
        final = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "OK! \n"}]
        for extra in ({}, {"add_generation_prompt": False}):
            text = await prompt(messages=final, continue_final_message=True, **extra)
            assert text == f"{opening}<|im_start|>assistant\nOK! \n"
        assert await prompt(
            messages=[{"role": "narrator", "content": "x", "name": "n"}], add_generation_prompt=False
        ) == ("<|im_start|>narrator\nx<|im_end|>\n")
        response = await served.post(
            CHAT,
            {
                "messages": [{"role": "user", "content": "hi"}],
                "chat_template_kwargs": {"mood": 1},
                "documents": [],
                "max_tokens": 1,
            },
        )
        assert response.headers["x-tpu-serve-ignored"] == "chat_template_kwargs.mood,documents"
        long = await served.post(
            CHAT,
            {"messages": [{"role": "user", "content": "x" * 50_000}], "truncate_prompt_tokens": 9, "max_tokens": 1},
        )
        assert long.json()["usage"]["prompt_tokens"] == 9


@asynchronous
async def test_a_model_without_a_template_cannot_chat():
    async with serving(template=None) as served:
        response = await served.post(CHAT, {"messages": [{"role": "user", "content": "hi"}]})
        assert response.status_code == 400
        assert response.json()["error"]["reason"] == "no_chat_template"
        await served.complete(max_tokens=1)


@asynchronous
async def test_model_defaults_hold_unless_the_request_says_otherwise():
    seen = {}

    def spy(request: Any, index: int) -> int:
        seen[request.id] = request
        return END

    async with serving(runner=FakeRunner(script=spy), temperature=0.6, top_k=20, stop_token_ids=(5,)) as served:
        await served.complete(temperature=None)
        await served.complete(temperature=0, top_k=-1, top_p=0.5, min_p=0.1, seed=-1, stop_token_ids=[])
        await served.complete(seed=7, n=2)
    first, second, third, fourth = seen.values()
    assert (first.params.temperature, first.params.top_k, first.params.stop_token_ids) == (0.6, 20, (5,))
    assert (second.params.temperature, second.params.top_k, second.params.top_p, second.params.min_p) == (
        0,
        -1,
        0.5,
        0.1,
    )
    assert second.params.stop_token_ids == ()
    assert second.params.seed is None
    assert (third.seed, fourth.seed, third.choice, fourth.choice) == (7, 7, 0, 1)
    assert first.params.max_tokens == 16


@asynchronous
async def test_ids_are_the_clients_own_and_may_be_used_twice():
    async with serving(runner=FakeRunner(seconds=0.01)) as served:
        given = {"x-request-id": "my-id"}
        calls = [served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 5, "n": 2}, **given) for _ in range(3)]
        calls += [served.post(COMPLETIONS, {"prompt": "hi", "max_tokens": 5, "request_id": "my-id"}) for _ in range(3)]
        for response in await asyncio.gather(*calls):
            assert response.status_code == 200
            assert response.json()["id"] == "cmpl-my-id"
            assert response.headers["x-request-id"] == "my-id"
        await served.idle()
        response = await served.post(
            CHAT, {"messages": [{"role": "user", "content": "a"}], "request_id": "body", "max_tokens": 1}, **given
        )
        assert response.json()["id"] == "chatcmpl-my-id"
        response = await served.client.get("/version", headers={"x-request-id": "a b\x7f" + "c" * 500})
        assert response.headers["x-request-id"] == "ab" + "c" * 126
        first, second = [await served.post(COMPLETIONS, {"prompt": "hi"}) for _ in range(2)]
        assert first.json()["id"] == f"cmpl-{first.headers['x-request-id']}" != second.json()["id"]


@asynchronous
async def test_tokenize_and_detokenize():
    async with serving() as served:
        response = await served.post("/tokenize", {"prompt": "hé<|im_end|>", "return_token_strs": True})
        assert response.json() == {
            "count": 4,
            "max_model_len": 256,
            "tokens": [104, 195, 169, 256],
            "token_strs": ["h", "Ã", "©", "<|im_end|>"],
        }
        long = await served.post("/tokenize", {"prompt": "x" * 30_000})
        assert long.json()["count"] == 30_000
        assert long.json()["token_strs"] is None
        response = await served.post("/detokenize", {"tokens": [104, 195, 169, 256]})
        assert response.json() == {"prompt": "hé<|im_end|>"}
        assert (await served.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}
        for path, body, param in (
            ("/detokenize", {"tokens": [258]}, "tokens"),
            ("/detokenize", {"tokens": [-1]}, "tokens"),
            ("/detokenize", {"tokens": [2**63 - 1]}, "tokens"),
            ("/detokenize", {"tokens": [2**63]}, "tokens"),
            ("/detokenize", {"tokens": [True]}, "tokens"),
            ("/detokenize", {"tokens": ["a"]}, "tokens"),
            ("/detokenize", {}, "tokens"),
            ("/tokenize", {}, "prompt"),
            ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
            ("/tokenize", {"prompt": [1]}, "prompt"),
        ):
            response = await served.post(path, body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
