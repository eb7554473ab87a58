"""Whether the engine really generates, found out by letting it."""

from __future__ import annotations

import asyncio
import uuid

from tpu_serve.engine.client import EngineDead, RequestFailed
from tpu_serve.request import InvalidRequest, SamplingParams
from tpu_serve.server.service import Service

PATIENCE = 20.0
"""Seconds without any progress after which an engine does not count as healthy."""
_PROMPT = "health"


class DeepHealth:
    """Asks the engine for one token. Callers at the same time share one question, so that asking often costs nothing."""

    def __init__(self, patience: float = PATIENCE):
        self.patience = patience
        self._question: asyncio.Task[str | None] | None = None

    async def check(self, service: Service) -> str | None:
        """Why the engine is not healthy, or None when it is."""
        if self._question is None or self._question.done():
            self._question = asyncio.create_task(self._ask(service))
        # A caller that leaves must not end the others' question.
        return await asyncio.shield(self._question)

    async def _ask(self, service: Service) -> str | None:
        progress = _Progress(service)
        try:
            async with asyncio.timeout(self.patience):
                try:
                    await _one_token(service)
                except InvalidRequest:  # the queue is full: others' tokens will do
                    while not progress.is_made:
                        await asyncio.sleep(0.05)
        except TimeoutError:
            # Behind a long queue the token may take longer than anybody waits, which is no illness.
            if not progress.is_made:
                return f"the engine generated nothing for {self.patience:g} seconds"
        except (EngineDead, RequestFailed) as error:
            return str(error)
        return None


async def _one_token(service: Service) -> None:
    prompt = service.tokenizer.encode(_PROMPT)[:1] or [0]
    params = SamplingParams(temperature=0.0, max_tokens=1)
    async with service.frontend.start(f"health-{uuid.uuid4().hex}", prompt, params) as generation:
        async for _ in generation:
            pass


class _Progress:
    """Whether an engine has done anything since this was made."""

    def __init__(self, service: Service):
        self._read = service.frontend.engine.reading
        self._before = self._read()

    @property
    def is_made(self) -> bool:
        # Steps are counted when they are launched: those that may be under way prove nothing. Long prompts take steps without tokens.
        now, before = self._read(), self._before
        return now.num_steps > before.num_steps + 2 or now.stats.generated != before.stats.generated
