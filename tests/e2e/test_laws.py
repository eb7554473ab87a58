"""Laws of the whole server, over HTTP with the `openai` client, on the embedded model in float32."""

import asyncio
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest
from docs_blocks import ADDRESS, blocks

ROOT = Path(__file__).parents[2]
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "while",
    "seven",
    "gulls",
    "counted",
    "stones",
    "near",
    "é",
    "😀",
    "and",
    "then",
]


class Server:
    """`tpu-serve serve` in a process of its own."""

    def __init__(self, *flags):
        command = [sys.executable, "server.py", "--port", "0", *flags]
        self.process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.lines = []
        for line in self.process.stderr:
            self.lines.append(line)
            if match := re.search(r"Serving (\S+) at (http://\S+) after", line):
                self.model, self.url = match.groups()
                break
        else:
            raise RuntimeError("the server did not start:\n" + "".join(self.lines))
        assert len(self.lines) <= 13, "starting says too much:\n" + "".join(self.lines)

    def metrics(self):
        text = httpx.get(f"{self.url}/metrics").text
        return {name: float(value) for name, value in re.findall(r"^(\S+?)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE)}

    def num_compiled(self, phase):
        text = httpx.get(f"{self.url}/metrics").text
        return float(re.search(rf'^tpu_serve:compile_total\{{.*phase="{phase}"\}} (\S+)$', text, re.MULTILINE)[1])

    def stop(self):
        self.process.terminate()
        self.process.stderr.close()
        return self.process.wait(timeout=40)


@pytest.fixture(scope="module")
def server():
    server = Server("--dtype", "float32")
    yield server
    assert server.stop() == 0


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_of(rng, longest=120):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, longest)))


async def complete_all(server, requests):
    """(text, finish reason, tokens) of each request, all of them sent at once."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=200) as client:

        async def one(top_k=0, **request):
            answer = await client.completions.create(model=server.model, **request, extra_body={"top_k": top_k})
            return answer.choices[0].text, answer.choices[0].finish_reason, answer.usage.completion_tokens

        return await asyncio.gather(*(one(**request) for request in requests))


def test_streaming_equals_not_streaming(client, server):
    rng = random.Random(1)
    for seed in range(12):
        request = {
            "model": server.model,
            "messages": [{"role": "user", "content": prompt_of(rng, 20)}],
            "seed": seed,
            "temperature": 1.5,
            "top_p": 1.0,
            "max_tokens": 60,
            "n": 1 + seed % 3,
            "stop": ["the", "\n\n", " a c"] if seed % 2 else None,
            "logprobs": seed % 4 == 0,
        }
        whole = client.chat.completions.create(**request)
        texts, reasons, logprobs = ["" for _ in whole.choices], {}, [[] for _ in whole.choices]
        usage = None
        for chunk in client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
                if choice.finish_reason:
                    assert choice.index not in reasons
                    reasons[choice.index] = (choice.finish_reason, choice.stop_reason)
        assert texts == [choice.message.content for choice in whole.choices]
        assert [reasons[i] for i in range(len(texts))] == [
            (choice.finish_reason, choice.stop_reason) for choice in whole.choices
        ]
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            whole.usage.prompt_tokens,
            whole.usage.completion_tokens,
        )
        for streamed, choice in zip(logprobs, whole.choices, strict=True):
            expected = choice.logprobs.content if choice.logprobs else []
            assert [entry.token for entry in streamed] == [entry.token for entry in expected]
            assert [entry.logprob for entry in streamed] == pytest.approx(
                [entry.logprob for entry in expected], abs=1e-4
            )


def test_a_seed_gives_the_same_tokens_whatever_the_neighbours(server):
    rng = random.Random(2)
    fixed = {
        "prompt": "Once upon a time there was",
        "seed": 42,
        "temperature": 1.2,
        "top_p": 0.95,
        "top_k": 50,
        "max_tokens": 40,
    }
    alone = asyncio.run(complete_all(server, [fixed]))[0]
    for size in (3, 20, 70):
        strangers = [
            {"prompt": prompt_of(rng), "temperature": rng.choice([0, 0.7, 1.9]), "max_tokens": rng.randint(1, 60)}
            for _ in range(size)
        ]
        place = rng.randrange(size)
        answers = asyncio.run(complete_all(server, [*strangers[:place], fixed, *strangers[place:]]))
        assert answers[place] == alone


def test_64_concurrent_ragged_requests_equal_the_same_requests_alone(server):
    rng = random.Random(3)
    requests = [
        {
            "prompt": prompt_of(rng),
            "max_tokens": rng.randint(1, 40),
            "seed": i,
            "temperature": rng.choice([0.0, 0.8]),
            "top_p": rng.choice([1.0, 0.9]),
        }
        for i in range(64)
    ]
    together = asyncio.run(complete_all(server, requests))
    alone = [asyncio.run(complete_all(server, [request]))[0] for request in requests]
    assert together == alone


def test_100_aborted_streams_leave_nothing_behind(server):
    async def storm():
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def one(index):
                body = {
                    "prompt": prompt_of(random.Random(index)),
                    "max_tokens": 1500,
                    "ignore_eos": True,
                    "stream": True,
                }
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    assert response.status_code == 200
                    if index % 2:
                        await anext(response.aiter_lines())
                    await asyncio.sleep(random.Random(index).random() * 0.5)

            await asyncio.gather(*(one(index) for index in range(100)))

    before = server.metrics()
    asyncio.run(storm())
    ended = time.monotonic()
    while True:
        now = server.metrics()
        left = [now[f"vllm:{name}"] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
        if left == [0, 0, 0]:
            break
        assert time.monotonic() - ended < 1.0, left
    assert now["vllm:generation_tokens_total"] > before["vllm:generation_tokens_total"]
    assert asyncio.run(complete_all(server, [{"prompt": "Once", "max_tokens": 3, "temperature": 0}]))[0][2] == 3


def test_the_compile_counter_is_flat_over_200_random_shapes(server):
    rng = random.Random(4)
    assert server.num_compiled("start") > 0
    assert server.num_compiled("serving") == 0
    requests = [
        {
            "prompt": prompt_of(rng, rng.choice([1, 5, 300])),
            "max_tokens": rng.randint(1, 12),
            "temperature": rng.choice([0, 1]),
            "top_k": rng.choice([0, 1, 40]),
            "logprobs": rng.choice([None, 0, 20]),
            "n": rng.choice([1, 1, 2]),
        }
        for _ in range(200)
    ]
    at = 0
    while at < len(requests):
        count = rng.choice([1, 2, 9, 40])
        asyncio.run(complete_all(server, requests[at : at + count]))
        at += count
    assert server.num_compiled("serving") == 0


def test_the_curl_examples_of_the_documentation(server):
    examples = [block.text for block in blocks() if block.is_curl]
    assert len(examples) >= 2
    promised = re.search(r"^> (.+)$", (ROOT / "README.md").read_text(), re.MULTILINE)[1]
    outputs = []
    for example in examples:
        command = example.replace(ADDRESS, server.url).replace("curl ", "curl --fail-with-body ")
        outputs.append(
            subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True).stdout
        )
    assert promised in outputs[0]
    assert outputs[1].endswith("data: [DONE]\n\n")
    assert '"completion_tokens":24' in outputs[1].replace(" ", "")


def test_the_python_examples_of_the_documentation_that_need_a_server(server):
    examples = [block.text for block in blocks() if block.language == "python" and block.needs_server]
    outputs = []
    for example in examples:
        code = example.replace(ADDRESS, server.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        outputs.append(done.stdout)
    assert outputs[0] == "The capital of France is Paris.\n"
