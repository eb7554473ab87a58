"""What both completion endpoints answer, and that a stream says exactly what a whole answer says."""

from typing import Any

import pytest
from fakes import FakeRunner, Script, Served, asynchronous, letters, saying, serving
from pydantic import BaseModel

from tpu_serve.server.replies import ChatChunk, ChatReply, CompletionReply

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USAGE = {"include_usage": True}


def check_shape(model: type[BaseModel], payload: dict[str, Any]) -> None:
    """Checks that a payload is what the documentation says it is, and holds nothing else."""
    assert model.model_validate(payload, extra="forbid").model_dump(exclude_unset=True) == payload


def join(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The choices that the chunks of a stream make."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            choice = choices.setdefault(
                part["index"], {"text": "", "token_ids": [], "logprobs": [], "finish_reason": None}
            )
            assert choice["finish_reason"] is None, "a chunk came after the last one"
            delta = part.get("delta")
            choice["text"] += part["text"] if delta is None else delta.get("content", "")
            choice["token_ids"] += part.get("token_ids", [])
            for name, values in (part["logprobs"] or {}).items():
                if name == "content":
                    choice["logprobs"] += values
                else:
                    choice.setdefault(name, []).extend(values)
            choice["finish_reason"], choice["stop_reason"] = part["finish_reason"], part.get("stop_reason")
    return choices


def flat(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of a whole answer in the shape of `join`."""
    logprobs = choice["logprobs"] or {}
    rest = {name: values for name, values in logprobs.items() if name != "content"}
    return {
        "text": choice["message"]["content"] if "message" in choice else choice["text"],
        "token_ids": choice["token_ids"],
        "logprobs": logprobs.get("content", []),
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice["stop_reason"],
        **rest,
    }


async def check_both_modes(served: Served, **fields: Any) -> dict[int, dict[str, Any]]:
    """Asks both endpoints in both modes, compares everything, and returns the choices of the completion."""
    result = {}
    for path, body, reply_model, chunk_model, logprobs in (
        (
            CHAT,
            {"messages": [{"role": "user", "content": "hi"}]},
            ChatReply,
            ChatChunk,
            {"logprobs": True, "top_logprobs": 2},
        ),
        (COMPLETIONS, {"prompt": "hi"}, CompletionReply, CompletionReply, {"logprobs": 2}),
    ):
        for extra in ({}, logprobs):
            request = {**body, "return_token_ids": True, **fields, **extra}
            response = await served.post(path, request)
            assert response.status_code == 200, response.text
            whole = response.json()
            check_shape(reply_model, whole)
            chunks = await served.events(path, **request, stream_options=USAGE)
            for chunk in chunks:
                check_shape(chunk_model, chunk)
                assert {key: chunk[key] for key in ("created", "model")} == {
                    "created": chunk["created"],
                    "model": whole["model"],
                }
            assert len({chunk["id"] for chunk in chunks}) == 1
            check_frames(chunks, is_chat=path == CHAT)
            joined = join(chunks)
            assert joined == {choice["index"]: flat(choice) for choice in whole["choices"]}
            cached = chunks[-1]["usage"]["prompt_tokens_details"], whole["usage"].pop("prompt_tokens_details")
            assert set(cached[0]) == set(cached[1]) == {"cached_tokens"}
            assert chunks[-1]["usage"] | {"prompt_tokens_details": None} == whole["usage"] | {
                "prompt_tokens_details": None
            }
            assert whole["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in joined.values())
            result = joined
    await served.idle()
    return result


def check_frames(chunks: list[dict[str, Any]], *, is_chat: bool) -> None:
    """Role first, no empty chunks, one end per choice, usage on a last chunk of its own and nowhere else."""
    assert chunks[-1]["choices"] == []
    assert [("usage" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    seen: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks[:-1]:
        assert len(chunk["choices"]) == 1
        seen.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
    for parts in seen.values():
        if is_chat:
            role = parts.pop(0)
            assert role["delta"] == {"role": "assistant", "content": ""}
            assert role["finish_reason"] is None
            assert all("role" not in part["delta"] for part in parts)
        assert [part["finish_reason"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
        for part in parts[:-1]:
            assert part["delta"]["content"] if is_chat else part["text"]


def in_order(*scripts: Script) -> Script:
    """A script for each choice."""
    return lambda request, index: scripts[request.choice % len(scripts)](request, index)


CASES: list[tuple[str, Script, dict[str, Any], list[tuple[str, str, Any]]]] = [
    ("length", letters, {"max_tokens": 5}, [("behkn", "length", None)]),
    ("one token", letters, {"max_tokens": 1}, [("b", "length", None)]),
    ("end of sequence", saying("yes"), {}, [("yes", "stop", None)]),
    ("nothing at all", saying(), {}, [("", "stop", None)]),
    ("end ignored", saying("ab"), {"ignore_eos": True, "max_tokens": 4}, [("ab", "length", None)]),
    ("end shown", saying("ab"), {"include_stop_str_in_output": True, "skip_special_tokens": False}, [("ab<|im_end|>", "stop", None)]),
    ("stop token", saying("abc"), {"stop_token_ids": [ord("c")]}, [("ab", "stop", ord("c"))]),
    ("emoji byte by byte", saying("é😀x"), {}, [("é😀x", "stop", None)]),
    ("emoji cut", saying("a😀"), {"max_tokens": 3}, [("a\ufffd", "length", None)]),
    ("bytes that are no text", saying(b"a\xc3(\xf0\x9f", "A"), {}, [("a\ufffd(\ufffdA", "stop", None)]),
    ("stop string", saying("ABCDEFG"), {"stop": "DE"}, [("ABC", "stop", "DE")]),
    ("stop string shown", saying("ABCDEFG"), {"stop": "DE", "include_stop_str_in_output": True}, [("ABCDE", "stop", "DE")]),
    ("stop string from the start", saying("DEFGHIJK"), {"stop": "DEFGHIJ"}, [("", "stop", "DEFGHIJ")]),
    ("stop string that does not come", saying("DEFGHI"), {"stop": ["DEFGHIJ", "zz"]}, [("DEFGHI", "stop", None)]),
    ("two stop strings", saying(" Alice!\nBob:"), {"stop": ["\n", "Bob:"]}, [(" Alice!", "stop", "\n")]),
    ("stop string inside an emoji's text", saying("a😀b"), {"stop": ["😀"]}, [("a", "stop", "😀")]),
    ("line separators", saying("a\u2028b\x85c\x0bd\r\ne"), {}, [("a\u2028b\x85c\x0bd\r\ne", "stop", None)]),
    (
        "choices of different length",
        in_order(saying("one"), saying("thirteen"), saying("😀")),
        {"n": 3},
        [("one", "stop", None), ("thirteen", "stop", None), ("😀", "stop", None)],
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("script", "fields", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
@asynchronous
async def test_a_stream_says_what_a_whole_answer_says(script: Script, fields: dict[str, Any], expected: list[Any]):
    async with serving(runner=FakeRunner(script=script)) as served:
        choices = await check_both_modes(served, **fields)
        outcome = [
            (choice["text"], choice["finish_reason"], choice["stop_reason"]) for _, choice in sorted(choices.items())
        ]
        assert outcome == expected


@asynchronous
async def test_tokens_after_a_stop_string_count_for_nothing():
    async with serving(runner=FakeRunner(script=saying("ABCDEFGHIJ"))) as served:
        answer = await served.complete(stop="C", return_token_ids=True, logprobs=0)
        assert answer["choices"][0]["token_ids"] == [ord("A"), ord("B"), ord("C")]
        assert answer["choices"][0]["logprobs"]["tokens"] == ["A", "B", "C"]
        assert answer["usage"]["completion_tokens"] == 3


@asynchronous
async def test_several_prompts_with_several_choices():
    async with serving() as served:
        prompts = ["a", "bb", "ccc"]
        answer = await served.complete(prompt=prompts, n=2, max_tokens=3)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        for place, prompt in enumerate(prompts):
            alone = await served.complete(prompt=prompt, n=2, max_tokens=3)
            for choice in (0, 1):
                assert answer["choices"][2 * place + choice]["text"] == alone["choices"][choice]["text"]
        usage = {"prompt_tokens": 6, "completion_tokens": 18, "total_tokens": 24}
        assert answer["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}
        ids = await served.complete(prompt=[[97], [98, 98], [99, 99, 99]], n=2, max_tokens=3, logprobs=1)
        assert [choice["text"] for choice in ids["choices"]] == [choice["text"] for choice in answer["choices"]]
        assert (await served.complete(prompt=[98, 98], max_tokens=3))["choices"][0]["text"] == answer["choices"][2][
            "text"
        ]
        chunks = await served.events(
            COMPLETIONS, prompt=prompts, n=2, max_tokens=3, stream_options=USAGE, return_token_ids=True
        )
        assert {index: choice["text"] for index, choice in join(chunks).items()} == {
            choice["index"]: choice["text"] for choice in answer["choices"]
        }
        assert chunks[-1]["usage"]["prompt_tokens"] == 6
        await served.idle()


@asynchronous
async def test_one_bad_prompt_of_several_starts_none():
    async with serving(runner=FakeRunner(seconds=0.02)) as served:
        response = await served.post(COMPLETIONS, {"prompt": [[1], [2], [999]], "max_tokens": 250})
        assert response.status_code == 400
        await served.idle()


@asynchronous
async def test_cached_prompt_tokens_are_reported():
    async with serving() as served:
        prompt = "x" * 30
        counts = [
            (await served.complete(prompt=prompt, max_tokens=1))["usage"]["prompt_tokens_details"]["cached_tokens"]
            for _ in range(2)
        ]
        assert counts == [0, 24]
        for salt, cached in (("tenant", 0), ("tenant", 24), ("other", 0)):
            answer = await served.complete(prompt=prompt, max_tokens=1, cache_salt=salt)
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


@asynchronous
async def test_usage_on_every_chunk_is_cumulative():
    async with serving() as served:
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await served.events(
            CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=3, stream_options=options
        )
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3]
        chunks = await served.events(COMPLETIONS, prompt="hi", max_tokens=3, stream_options=options)
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {2}
        options = {"include_usage": None, "continuous_usage_stats": True}
        chunks = await served.events(COMPLETIONS, prompt="hi", max_tokens=3, stream_options=options)
        assert all("usage" not in chunk for chunk in chunks)


@asynchronous
async def test_log_probabilities():
    async with serving(runner=FakeRunner(script=saying("a“"))) as served:
        answer = await served.complete(logprobs=2)
        assert answer["choices"][0]["logprobs"] == {
            "tokens": ["a", "\ufffd", "\ufffd", "\ufffd", "<|im_end|>"],
            "token_logprobs": [-0.25] * 5,
            "top_logprobs": [
                {"a": -0.25, "b": -1.25},
                {"\ufffd": -0.25, "token_id:227": -1.25},
                {"\ufffd": -0.25, "token_id:129": -1.25},
                {"\ufffd": -0.25, "token_id:157": -1.25},
                {"<|im_end|>": -0.25, "<|im_start|>": -1.25},
            ],
            "text_offset": [0, 1, 1, 1, 2],
        }
        answer = await served.complete(logprobs=0)
        assert answer["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.25}
        content = (await served.chat(logprobs=True))["choices"][0]["logprobs"]["content"]
        assert content[0] == {"token": "a", "logprob": -0.25, "bytes": [97], "top_logprobs": []}
        assert bytes(byte for entry in content[:-1] for byte in entry["bytes"]).decode() == "a“"
        content = (await served.chat(logprobs=True, top_logprobs=3))["choices"][0]["logprobs"]["content"]
        assert [len(entry["top_logprobs"]) for entry in content] == [3] * 5
        assert content[0]["top_logprobs"][1] == {"token": "b", "logprob": -1.25, "bytes": [98]}
