"""An engine ready to run, and what its frontends need to know."""

from __future__ import annotations

from collections.abc import Mapping
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
    """

    config: EngineConfig
    info: ModelInfo
    intake: Intake
    core: EngineCore
    tokenizer: Tokenizer
    moe_plans: Mapping[tuple[str, str], int] = field(default_factory=dict)
