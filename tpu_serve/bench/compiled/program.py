"""What a target hands over to be compiled and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Program:
    """A function, and what is known about a call of it. Targets, `target(devices, **kwargs)`, return one.

    Attributes:
      function: of arrays; shard_map inside works.
      args: `jax.ShapeDtypeStruct`s with shardings over the devices the target was given.
      scalars: for kernels whose name matches the regular expression, the contents of integer operands by operand index: an integer or
        an array in its logical shape, as device 0 would receive them. Operands count from 0 in the order of the kernel's call,
        scalar-prefetch ones first. Those not given are zero, and the report says so.
      analytic: what the call must do at least, per device; any of "flops", "peak" (the key in the chip's `peak_ops`), "hbm_bytes",
        "ici_bytes", "bound_us". Copied into the report and compared with.
      jit_options: for `jax.jit`.
    """

    function: Callable[..., Any]
    args: Sequence[Any]
    scalars: Mapping[str, Mapping[int, Any]] = field(default_factory=dict)
    analytic: Mapping[str, Any] = field(default_factory=dict)
    jit_options: Mapping[str, Any] = field(default_factory=dict)
