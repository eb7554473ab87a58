"""An engine ready to run, and what its frontends need to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tpu_serve.config import EngineConfig
from tpu_serve.engine.core import EngineCore
from tpu_serve.engine.intake import Intake, ModelInfo
from tpu_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Engine:
    """What `build_engine` makes. Hand `core` to one `EngineClient`, or step it yourself.

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
