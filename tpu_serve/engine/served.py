"""An engine as a server sees it, in its own process or in another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from tpu_serve.config import EngineConfig
from tpu_serve.engine.intake import Intake, ModelInfo
from tpu_serve.engine.operations import Operation
from tpu_serve.engine.reading import CacheFacts, Reading, StepRecord
from tpu_serve.request import FinishReason, Request, TokenOutput
from tpu_serve.text.tokenizer import Tokenizer


class Client(Protocol):
    """How requests get to a running engine and its outputs back. `close` may be called in any thread, the rest in the event loop's.

    Attributes:
      failure: why the engine has failed, or None.
      is_alive: it takes requests.
      num_running, num_waiting, num_waiting_tokens: see `Reading`; those that have yet to reach the engine are waiting.
    """

    @property
    def failure(self) -> str | None: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_waiting_tokens(self) -> int: ...

    def submit(self, request: Request) -> None:
        """Hands a request to the engine. Raises `EngineDead`."""

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a request soon; harmless when it has finished already. No output follows for it."""

    def reset_prefix_cache(self) -> Future[bool]:
        """Forgets every cached prefix that no request holds, between two steps. The result is False when some are held and stay.

        Raises:
          EngineDead: the engine has failed or is closed; the future raises it where that happens before its turn.
        """

    def close(self) -> None:
        """Ends the engine after the step under way. Unfinished requests get an ABORT output."""


class ServedEngine(Protocol):
    """What is known of an engine that is ready, and the way to it.

    Attributes:
      config: as given.
      info: sizes and defaults of the model.
      intake: makes requests for it.
      tokenizer: of the model.
      moe_plans: how many token buckets run their experts in which way, by (path, where the tiles come from).
      cache: sizes of the KV cache.
    """

    @property
    def config(self) -> EngineConfig: ...

    @property
    def info(self) -> ModelInfo: ...

    @property
    def intake(self) -> Intake: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def moe_plans(self) -> Mapping[tuple[str, str], int]: ...

    @property
    def cache(self) -> CacheFacts: ...

    def connect(
        self, on_outputs: Callable[[list[TokenOutput]], None], on_failure: Callable[[str], None] = lambda _: None
    ) -> Client:
        """Starts it; once only, in a running event loop, where both are called.

        Args:
          on_outputs: gets the outputs of each launch.
          on_failure: called once with a sentence when the engine fails. Every live request has got an ERROR output by then.
        """

    def reading(self) -> Reading:
        """Its numbers now, or after the last step that is known here."""

    def device_memory(self) -> Mapping[str, int]:
        """Bytes of each device, by what they are for."""

    def follow_steps(self, on_step: Callable[[StepRecord], None]) -> None:
        """Has this called with each step from now on, in the engine's thread or in the event loop; it must return quickly."""

    def operate(self, name: Operation, *arguments: Any) -> Future[Any]:
        """Has an operation done beside the steps.

        The future may raise `EngineDead`, and what the operation itself raises, or `OperationFailed` for that.
        """
