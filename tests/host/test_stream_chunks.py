"""Chunks of streams are written as text: byte for byte what the documented models say, and what queued up comes as one."""

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
from fakes import asynchronous, byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tpu_serve.engine.choice import ChoiceDelta
from tpu_serve.engine.client import RequestFailed
from tpu_serve.engine.frontend import Generation
from tpu_serve.parsing.events import ContentText, ReasoningText
from tpu_serve.request import FinishReason, TokenLogprobs
from tpu_serve.server.chat_choice import CallPart
from tpu_serve.server.chat_chunks import ChatChunks
from tpu_serve.server.completions import CompletionAnswer
from tpu_serve.server.fanout import Fanout, Piece
from tpu_serve.server.logprobs import chat_logprobs
from tpu_serve.server.metric_families import TO_NEXT_TOKEN, Families
from tpu_serve.server.protocol import CompletionRequest
from tpu_serve.server.replies import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    Counts,
    FunctionDelta,
    ReasoningUsage,
    ToolCallDelta,
    Usage,
)

TOKENIZER = byte_tokenizer()
HARD = [
    "\u2028",
    "\u2029",
    "\x00",
    "\x7f",
    '"',
    "\\",
    "/",
    "</script>",
    "\ud83d",
    "\ude00",
    "😀",
    "👍🏽",
    "é",
    "\r\n\n",
    "data: ",
    "",
]
TEXTS = st.one_of(st.sampled_from(HARD), st.text(st.characters(), max_size=8), st.text(max_size=8))
"""Lone halves of surrogate pairs among them, which a tokenizer never makes."""
ENTRIES = st.lists(
    st.builds(
        TokenLogprobs,
        st.integers(0, 300),
        st.floats(-50, 0),
        st.lists(st.tuples(st.integers(0, 300), st.sampled_from([-0.5, -1e-9, float("-inf")])), max_size=2).map(tuple),
    ),
    max_size=3,
)
STOPS = st.one_of(st.none(), st.integers(0, 300), TEXTS)
REASONS = st.sampled_from([None, None, FinishReason.STOP, FinishReason.LENGTH])


def dumped(model) -> bytes:
    """The fields of a model that were set, written by the library with its plain settings."""
    return json.dumps(model.model_dump(exclude_unset=True), separators=(",", ":")).encode()


def documented(part, repeats_reasoning: bool) -> ChatDelta:
    if isinstance(part, ContentText):
        return ChatDelta(content=part.text)
    if isinstance(part, ReasoningText):
        return ChatDelta(reasoning=part.text, **({"reasoning_content": part.text} if repeats_reasoning else {}))
    if part.id is None:
        return ChatDelta(tool_calls=[ToolCallDelta(index=part.index, function=FunctionDelta(arguments=part.arguments))])
    function = FunctionDelta(name=part.name, arguments=part.arguments)
    return ChatDelta(tool_calls=[ToolCallDelta(index=part.index, id=part.id, type="function", function=function)])


@settings(max_examples=70, deadline=None)
@given(
    parts=st.lists(
        st.one_of(
            st.builds(ContentText, TEXTS),
            st.builds(ReasoningText, TEXTS),
            st.builds(CallPart, st.integers(0, 3), TEXTS),
            st.builds(CallPart, st.integers(0, 3), TEXTS, TEXTS, TEXTS),
        ),
        max_size=3,
    ),
    entries=ENTRIES,
    reason=REASONS,
    stop=STOPS,
    counts=st.one_of(st.none(), st.builds(Counts, *[st.integers(0, 99)] * 3, st.one_of(st.none(), st.integers(0, 9)))),
    flags=st.tuples(*[st.booleans()] * 4),
)
def test_chunks_of_a_chat_are_what_the_models_say(parts, entries, reason, stop, counts, flags):
    with_logprobs, with_token_ids, as_ids, repeats = flags
    head = {"id": 'chatcmpl-"x"\\', "created": 17, "model": "mödel\u2028"}
    chunks = ChatChunks(
        head, TOKENIZER, with_logprobs=with_logprobs, with_token_ids=with_token_ids, as_ids=as_ids, repeats_reasoning=repeats
    )  # fmt: skip
    piece = Piece(2, "", [entry.token_id for entry in entries], entries, finish_reason=reason, stop_reason=stop)
    usage = "" if counts is None else f',"usage":{counts.text()}'
    expected = []
    for place, part in enumerate(parts or [None]):
        fields = {"delta": ChatDelta() if part is None else documented(part, repeats), "logprobs": None}
        if with_logprobs and place == 0:
            fields["logprobs"] = chat_logprobs(TOKENIZER, entries, as_ids=as_ids)
        fields["finish_reason"] = None
        if reason is not None and place == max(0, len(parts) - 1):
            fields |= {"finish_reason": "tool_calls", "stop_reason": stop}
        if with_token_ids:
            fields["token_ids"] = [entry.token_id for entry in entries] if place == 0 else []
        more = {}
        if counts is not None:
            plain = Usage.of(*counts[:3])
            more["usage"] = (
                plain if counts.reasoning is None else ReasoningUsage.with_reasoning(plain, counts.reasoning)
            )
        choices = [ChatChunkChoice(index=2, **fields)]
        expected.append(dumped(ChatChunk(object="chat.completion.chunk", **head, choices=choices, **more)))
    assert chunks.of(piece, parts, "tool_calls", usage) == expected


class Known:
    """A source of pieces that are known in advance."""

    def __init__(self, pieces):
        self._pieces = pieces

    async def pieces(self):
        for piece in self._pieces:
            yield piece

    def counts(self):
        return Counts(5, 7, 3)


@settings(max_examples=50, deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=3),
    reason=REASONS,
    stop=STOPS,
    has_usage=st.booleans(),
    entries=st.one_of(st.none(), ENTRIES),
)
def test_chunks_of_a_completion_are_what_the_models_say(texts, reason, stop, has_usage, entries):
    options = {"include_usage": True, "continuous_usage_stats": True} if has_usage else None
    request = CompletionRequest(prompt="hi", logprobs=None if entries is None else 2, stream_options=options)
    service = SimpleNamespace(names=["mödel"], tokenizer=TOKENIZER, include_usage=False)
    pieces = [
        Piece(0, text, [1], list(entries or ()), finish_reason=reason, stop_reason=stop, is_first=not place)
        for place, text in enumerate(texts)
    ]
    source = Known(pieces)
    answer = CompletionAnswer(
        service, request, source, request_id="x", ignored=(), prompts=[[104, 105]], openings=(), num_choices=1
    )

    async def stream():
        found = answer.stream()
        try:
            return [await anext(found) for _ in pieces]  # what comes behind them has the metrics of a request
        finally:
            await found.aclose()

    chunks = asyncio.run(stream())
    for chunk, piece in zip(chunks, pieces, strict=True):
        told = json.loads(chunk)
        logprobs = None
        if entries is not None:
            logprobs = CompletionLogprobs.model_validate(told["choices"][0]["logprobs"], extra="forbid")
            assert logprobs.tokens == [TOKENIZER.token_text(entry.token_id) for entry in entries]
            assert logprobs.token_logprobs == [max(entry.logprob, -9999.0) for entry in entries]
        choice = CompletionChoice(
            index=0, text=piece.text, logprobs=logprobs, finish_reason=reason, stop_reason=piece.stop_reason
        )
        extra = {"usage": Usage.of(5, 7, 3)} if has_usage else {}
        head = {"id": "cmpl-x", "object": "text_completion", "created": told["created"], "model": "mödel"}
        assert chunk == dumped(CompletionReply(**head, choices=[choice], **extra))


def a_generation(num_choices: int = 1) -> Generation:
    choices = [
        SimpleNamespace(
            request=SimpleNamespace(id="r", prompt_token_ids=[1, 2]), num_tokens=0, num_cached_tokens=1, timing=None
        )
        for _ in range(num_choices)
    ]
    frontend = SimpleNamespace(abort=lambda choice: None, client=SimpleNamespace(is_alive=True))
    return Generation(frontend, choices)


def deltas_of(rng: random.Random, num_choices: int) -> list[ChoiceDelta]:
    """Random ones, with the choices interleaved and each of them ended; some have no text, as parts of an emoji have none."""
    left = {index: rng.randint(1, 12) for index in range(num_choices)}
    found = []
    while left:
        index = rng.choice(list(left))
        left[index] -= 1
        ids = tuple(rng.randrange(256) for _ in range(rng.choice([1, 1, 1, 2, 3])))
        text = rng.choice(["", "a", "😀", "\u2028", "xyz"])
        logprobs = tuple(TokenLogprobs(token_id, -1.0) for token_id in ids)
        reason = None if left[index] else FinishReason.LENGTH
        found.append(ChoiceDelta(index=index, text=text, token_ids=ids, logprobs=logprobs, finish_reason=reason))
        if not left[index]:
            del left[index]
    return found


@asynchronous
async def test_what_queued_up_comes_as_one_and_sums_up_to_the_same():
    rng = random.Random(5)
    num_merged = 0
    for _ in range(60):
        num_choices, interval = rng.choice([1, 1, 3]), rng.choice([1, 1, 4])
        generation, deltas = a_generation(num_choices), deltas_of(rng, num_choices)
        fanout, pieces, counts = Fanout([generation], num_choices, interval=interval), [], []

        async def read(fanout=fanout, pieces=pieces, counts=counts):
            async for piece in fanout.pieces():
                pieces.append(piece)
                counts.append(fanout.counts().completion)
                await asyncio.sleep(0)  # as a slow client does

        reader = asyncio.create_task(read())
        for delta in deltas:
            generation.put(delta)
            if rng.random() < 0.4:
                await asyncio.sleep(0)
        await asyncio.wait_for(reader, 5)
        for index in range(num_choices):
            mine, parts = [d for d in deltas if d.index == index], [p for p in pieces if p.index == index]
            assert "".join(p.text for p in parts) == "".join(d.text for d in mine)
            assert [i for p in parts for i in p.token_ids] == [i for d in mine for i in d.token_ids]
            assert [e for p in parts for e in p.logprobs] == [e for d in mine for e in d.logprobs]
            assert [p.is_first for p in parts] == [True] + [False] * (len(parts) - 1)
            assert [p.finish_reason for p in parts] == [None] * (len(parts) - 1) + [FinishReason.LENGTH]
            assert all(len(p.token_ids) >= interval for p in parts[1:-1])
            num_merged += len(parts) < sum(bool(d.text) for d in mine)
        assert counts == [sum(len(p.token_ids) for p in pieces[: place + 1]) for place in range(len(pieces))]
        assert fanout.counts() == Counts(2, sum(len(d.token_ids) for d in deltas), 1)
    assert num_merged > 20, "hardly anything queued up: this shows nothing"


@asynchronous
async def test_what_came_before_a_failure_is_sent_before_it():
    generation = a_generation()
    for text in "abc":
        generation.put(ChoiceDelta(index=0, text=text, token_ids=(1,)))
    generation.put(ChoiceDelta(index=0, finish_reason=FinishReason.ERROR, error="no luck"))
    texts = []
    with pytest.raises(RequestFailed, match="no luck"):
        async for piece in Fanout([generation], 1).pieces():
            texts.append(piece.text)
    assert texts == ["a", "bc"], "the first one waits for nothing, the others come together"


@asynchronous
async def test_a_wait_that_was_given_up_loses_nothing():
    generation = a_generation()
    waiting = asyncio.ensure_future(anext(generation))
    await asyncio.sleep(0)
    waiting.cancel()
    generation.put(ChoiceDelta(index=0, text="a"))
    generation.put(ChoiceDelta(index=0, text="b", finish_reason=FinishReason.STOP))
    await asyncio.gather(waiting, return_exceptions=True)
    assert [delta.text async for delta in generation] == ["a", "b"]


def test_many_equal_observations_are_those_one_by_one():
    registry, labels = CollectorRegistry(), ("m", "0")
    families = Families(labels, ("p",))
    bulk = families.bulk_histogram("waits", "Help", TO_NEXT_TOKEN)
    registry.register(families)
    reference = Histogram("p:waits", "Help", ("model_name", "engine"), buckets=TO_NEXT_TOKEN, registry=None)
    rng = random.Random(3)
    for _ in range(200):
        value, count = rng.choice([*TO_NEXT_TOKEN, rng.uniform(0, 90), 0.0, 1000.0]), rng.randint(1, 5)
        bulk.observe(value, count)
        for _ in range(count):
            reference.labels(*labels).observe(value)
    expected = CollectorRegistry()
    expected.register(reference)

    def figures(text: bytes) -> dict[str, float]:
        lines = (line.rsplit(" ", 1) for line in text.decode().splitlines() if "_created{" not in line)
        return {name: float(value) if name[0] != "#" else value for name, value in lines}

    found, known = figures(generate_latest(registry)), figures(generate_latest(expected))
    assert list(found) == list(known)
    for name, value in known.items():
        assert found[name] == (value if isinstance(value, str) else pytest.approx(value)), name
