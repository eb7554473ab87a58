"""An engine ready to run, and what its frontends need to know."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tpu_serve.config import EngineConfig
from tpu_serve.engine.client import EngineClient
from tpu_serve.engine.core import EngineCore
from tpu_serve.engine.intake import Intake, ModelInfo
from tpu_serve.engine.operations import Operation, Operations
from tpu_serve.engine.reading import CacheFacts, Reading, StepRecord, cache_facts, read, record
from tpu_serve.request import TokenOutput
from tpu_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Engine:
    """What `build_engine` makes: a `ServedEngine` in this process. Hand `core` to one `EngineClient`, as `connect` does, or step it yourself.

    Attributes:
      config: as given.
      info: sizes and defaults of the model.
      intake: makes requests for the core.
      core: the step loop.
      tokenizer: of the model.
      moe_plans: how many token buckets run their experts in which way, by (path, where the tiles come from), see `moe_plan`.
      buckets: token counts that have a program, in rising order.
      memory_bytes: of each device, by what it is for.
      compile_costs: programs of this process that came from the compile cache, and seconds that compiling took.
      num_recompiled: programs that were compiled in this process since the engine was ready and that it did not expect.
      programs: how many of its programs are compiled, and how many there are.
      operations: what operators may ask of it.
    """

    config: EngineConfig
    info: ModelInfo
    intake: Intake
    core: EngineCore
    tokenizer: Tokenizer
    moe_plans: Mapping[tuple[str, str], int] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    memory_bytes: Callable[[], Mapping[str, int]] = dict
    compile_costs: Callable[[], tuple[int, float]] = lambda: (0, 0.0)
    num_recompiled: Callable[[], int] = lambda: 0
    programs: Callable[[], tuple[int, int]] = lambda: (0, 0)
    operations: Operations = field(default_factory=Operations)

    @property
    def cache(self) -> CacheFacts:
        return cache_facts(self.core.scheduler)

    def connect(
        self, on_outputs: Callable[[list[TokenOutput]], None], on_failure: Callable[[str], None] = lambda _: None
    ) -> EngineClient:
        """Runs the core in a thread. See `ServedEngine`."""
        loop = asyncio.get_running_loop()

        def post(function: Callable[..., None], *arguments: object) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(function, *arguments)

        return EngineClient(self.core, lambda outputs: post(on_outputs, outputs), lambda why: post(on_failure, why))

    def reading(self) -> Reading:
        return read(self.core, self.compile_costs(), self.num_recompiled(), self.programs())

    def device_memory(self) -> Mapping[str, int]:
        return self.memory_bytes()

    def follow_steps(self, on_step: Callable[[StepRecord], None]) -> None:
        self.core.on_step = lambda output, seconds: on_step(record(output, seconds, self.buckets))

    def operate(self, name: Operation, *arguments: Any) -> Future[Any]:
        return self.operations.begin(self, name, *arguments)
