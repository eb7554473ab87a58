"""What the process of a server and the process of its engine say to one another.

The first message to the engine's process and its answer that it is ready hold whole objects, pickled: each process is the other's own
program, and nothing that a client sends is among them. All others are MessagePack.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from tpu_serve.config import EngineConfig
from tpu_serve.engine.intake import Intake
from tpu_serve.engine.operations import Operation
from tpu_serve.engine.reading import CacheFacts, Reading, StepRecord
from tpu_serve.request import FinishReason, Request, TokenOutput
from tpu_serve.text.tokenizer import Tokenizer

Build = Callable[[EngineConfig, Callable[[str, float], None]], Any]
"""Makes an `Engine`, and tells the phases of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Start:
    """The first message to the engine's process, pickled.

    Attributes:
      config: of the engine.
      prepare: called before anything else.
      build: `build_engine` when None, which the server's process does not import.
    """

    config: EngineConfig
    prepare: Callable[[], None] | None
    build: Build | None


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What never changes of an engine that is ready; see `ServedEngine`."""

    config: EngineConfig
    intake: Intake
    tokenizer: Tokenizer
    moe_plans: Mapping[tuple[str, str], int]
    cache: CacheFacts


class _Message(msgspec.Struct, array_like=True):
    """They are arrays that begin with the number of their kind."""


class Add(_Message, tag=0):
    """A request to run; its constraint is apart, see border.py."""

    request: Request
    constraint: bytes | None


class Abort(_Message, tag=1):
    request_id: str
    reason: FinishReason


class Call(_Message, tag=2):
    """Something that is answered by an `Answer` of the same number. `reset_prefix_cache` waits for its turn between two steps."""

    number: int
    name: Operation | str
    arguments: list[Any]


class Phase(_Message, tag=0):
    """Loading is at this phase, of which this share is done."""

    name: str
    share: float


class Refused(_Message, tag=1):
    """Loading has failed. Nothing follows.

    Attributes:
      is_config: it was a `ConfigError`, and `why` is its message; otherwise the log has the traceback.
    """

    why: str
    is_config: bool


class Ready(_Message, tag=2):
    """The engine takes requests from now on.

    Attributes:
      facts: pickled `Facts`.
    """

    facts: bytes
    reading: Reading
    memory: dict[str, int]


class Turn(_Message, tag=3):
    """What a turn of the step loop brought.

    Attributes:
      reading: after the turn; None where the outputs are not of the step loop, whose turns may overtake them.
      taken: requests that the engine has seen in this turn, and counts from now on.
      memory: bytes of each device by what they are for, once in a while.
    """

    outputs: list[TokenOutput]
    reading: Reading | None
    taken: list[str]
    steps: list[StepRecord]
    memory: dict[str, int] | None


class Answer(_Message, tag=4):
    number: int
    result: Any
    error: str | None


class Failed(_Message, tag=5):
    """The engine has failed, and why. Its process waits to be ended."""

    why: str


ToEngine = Add | Abort | Call
FromEngine = Phase | Refused | Ready | Turn | Answer | Failed

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine, dec_hook=lambda kind, value: value).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
