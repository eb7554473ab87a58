"""The server under load: how a prompt becomes a request, and an answer an `Outcome`."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tpu_serve.bench.serving.events import EventReader
from tpu_serve.bench.serving.http_client import Answer, BrokenConnection, HttpClient
from tpu_serve.bench.serving.outcome import AnswerReader, Outcome, explain_error
from tpu_serve.bench.serving.prompts import Prompt
from tpu_serve.bench.serving.server_metrics import Snapshot
from tpu_serve.config import ConfigError

Backend = Literal["openai", "openai-chat"]
ENDPOINTS: Mapping[Backend, str] = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}
MAX_ERROR_TEXT = 500
ANSWER_SECONDS = 6 * 3600.0
"""For one answer, its time in the server's queue included: to wait long is no error in a benchmark."""
SHORT_SECONDS = 60.0
"""For what a server knows without asking its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server and how it is asked.

    Attributes:
      client: of the server; `endpoint` is a path there.
      model: name of the model in requests.
      fields: further fields of every request; they win over those made here.
      ignore_eos: answers are as long as asked for, where the server supports that.
      streams: answers come in pieces; without, time to first token is that of the whole answer.
      id_prefix: of the header x-request-id of each request; none is sent when empty.
    """

    client: HttpClient
    backend: Backend = "openai"
    endpoint: str = ENDPOINTS["openai"]
    model: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    ignore_eos: bool = False
    streams: bool = True
    id_prefix: str = ""

    def body(self, prompt: Prompt) -> dict[str, Any]:
        """The request's fields."""
        if self.backend == "openai-chat":
            said: dict[str, Any] = {
                "messages": [{"role": "user", "content": prompt.text}],
                "max_completion_tokens": prompt.output_len,
            }
        else:
            said = {"prompt": prompt.text, "max_tokens": prompt.output_len}
        body = {"model": self.model, **said, "temperature": 0.0, "stream": self.streams}
        if self.streams:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **self.fields}

    async def ask(self, prompt: Prompt, number: int = 0) -> Outcome:
        """One request to its end. Never raises for what the server does: that is in the outcome."""
        outcome = Outcome(prompt_tokens=prompt.num_tokens)
        data = json.dumps(self.body(prompt)).encode()
        headers = {"accept": "text/event-stream" if self.streams else "application/json"}
        if self.id_prefix:
            headers["x-request-id"] = f"{self.id_prefix}{number}"
        outcome.start = time.perf_counter()
        try:
            async with (
                asyncio.timeout(ANSWER_SECONDS),
                self.client.send("POST", self.endpoint, data, headers) as answer,
            ):
                if answer.status == 200:
                    await self._read(answer, outcome)
                else:
                    cause, message = _refusal(answer.status, await answer.read())
                    outcome.fail(cause, message)
        except BrokenConnection as error:
            outcome.fail("connection broken", str(error))
        except ConnectionRefusedError:
            outcome.fail("connection refused", f"Nothing listens at {self.client.url}.")
        except TimeoutError:
            outcome.fail("timeout", f"{self.client.url} took too long.")
        except OSError as error:
            outcome.fail("connection broken", error.strerror or str(error) or type(error).__name__)
        outcome.end = time.perf_counter()
        return outcome

    async def _read(self, answer: Answer, outcome: Outcome) -> None:
        reader, events = AnswerReader(outcome), EventReader()
        if not self.streams:
            reader.body(await answer.read(), time.perf_counter())
        else:
            async for piece in answer.body:
                at = time.perf_counter()
                for data in events.feed(piece):
                    reader.event(data, at)
        reader.close()

    async def metrics(self) -> Snapshot | None:
        """The server's metrics now, None when it has none to read."""
        try:
            async with asyncio.timeout(SHORT_SECONDS), self.client.send("GET", "/metrics") as answer:
                text = await answer.read()
                return Snapshot.read(text.decode("utf-8", "replace")) if answer.status == 200 else None
        except (OSError, BrokenConnection):
            return None

    async def about(self) -> dict[str, Any]:
        """Where the server runs, as far as it says: `versions`, and `device` as in other benchmarks' results; empty for other servers."""
        try:
            async with asyncio.timeout(SHORT_SECONDS), self.client.send("GET", "/server_info") as answer:
                said = json.loads(await answer.read()) if answer.status == 200 else {}
        except (OSError, BrokenConnection, ValueError):
            return {}
        found: dict[str, Any] = {}
        if isinstance(said, dict) and isinstance(said.get("versions"), dict):
            found["versions"] = {"tpu_serve": said.get("version"), **said["versions"]}
            devices = said.get("devices") or []
            if devices:
                found["device"] = {name: devices[0].get(name) for name in ("platform", "kind")} | {
                    "count": len(devices)
                }
        return found

    async def post(self, path: str) -> tuple[int, str]:
        """(Status, text) of a POST without a body; (0, why) when there is no answer."""
        try:
            # The end of a trace writes it first.
            async with asyncio.timeout(ANSWER_SECONDS), self.client.send("POST", path, b"") as answer:
                return answer.status, (await answer.read()).decode("utf-8", "replace")
        except (OSError, BrokenConnection) as error:
            return 0, str(error)


async def model_card(client: HttpClient, name: str | None = None) -> dict[str, Any]:
    """What the server says of the model called `name`, of its first one for None: `id`, and `root` where it says.

    Raises:
      ConfigError: the server cannot be reached, or has no such model.
    """
    try:
        async with asyncio.timeout(SHORT_SECONDS), client.send("GET", "/v1/models") as answer:
            data = await answer.read()
            if answer.status != 200:
                raise ConfigError(f"{client.url}/v1/models answered: {_refusal(answer.status, data)[1]}")
    except (OSError, BrokenConnection) as error:
        raise ConfigError(f"{client.url} cannot be reached: {str(error) or type(error).__name__}.") from None
    try:
        cards = [{**card, "id": str(card["id"])} for card in json.loads(data)["data"]]
    except (ValueError, LookupError, TypeError):
        cards = []
    if not cards:
        raise ConfigError(f"{client.url}/v1/models names no model; say which with --model.")
    found = next((card for card in cards if name in (None, card["id"])), None)
    if found is None:
        known = ", ".join(card["id"] for card in cards)
        raise ConfigError(f"--model {name}: {client.url} has no such model; it has {known}.")
    return found


async def wait_listening(client: HttpClient, seconds: float, pause: float = 1.0) -> None:
    """Waits until the server accepts connections and lists its models, or `seconds` are over; whoever asks next finds out why."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            async with asyncio.timeout(SHORT_SECONDS), client.send("GET", "/v1/models") as answer:
                await answer.read()
                if answer.status not in (429, 502, 503, 504):
                    return
        except (OSError, BrokenConnection):
            pass
        await asyncio.sleep(pause)


async def wait_ready(target: Target, prompt: Prompt, seconds: float, pause: float = 1.0) -> None:
    """Asks one thing until it is answered.

    Raises:
      ConfigError: the server refuses what it is asked, or did not answer within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        outcome = await target.ask(prompt)
        if outcome.is_success:
            return
        is_loading = outcome.cause in ("connection refused", "connection broken", "timeout") or (
            outcome.cause or ""
        ).startswith(("HTTP 502", "HTTP 503", "HTTP 504", "HTTP 429"))
        if not is_loading:
            raise ConfigError(f"{target.client.url}{target.endpoint} does not answer a first request: {outcome.error}")
        if time.monotonic() >= deadline:
            raise ConfigError(
                f"{target.client.url} was not ready within --ready-check-timeout-sec {seconds:g}: {outcome.error}"
            )
        await asyncio.sleep(pause)


def _refusal(status: int, data: bytes) -> tuple[str, str]:
    """(Cause, message) of an answer that is an error."""
    try:
        body = json.loads(data)
    except ValueError:
        body = None
    kind, message = explain_error(body)
    text = message or data.decode("utf-8", "replace")[:MAX_ERROR_TEXT].strip() or "no reason given"
    return f"HTTP {status}{f' ({kind})' if kind else ''}", text
