"""What `bench moe` runs: layers small enough for a laptop, types and token counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tpu_serve.config import ConfigError

BACKENDS = ("dense", "ragged", "gathered")
DTYPES = {"float32": 4, "bfloat16": 2}
"""Bytes of a value."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a mixture of experts; `name` is what the table calls it."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def num_weights(self) -> int:
        return 3 * self.num_experts * self.hidden * self.intermediate

    def __str__(self) -> str:
        return f"{self.num_experts} experts, {self.top_k} of them a token, hidden {self.hidden}, intermediate {self.intermediate}"


LAYERS = {
    layer.name: layer
    for layer in (
        Layer("tiny-chat", 8, 2, 128, 128),  # of the embedded model
        Layer("8-experts", 8, 2, 512, 1024),
        Layer("32-experts", 32, 4, 512, 512),
        Layer("128-experts", 128, 8, 512, 256),
    )
}


@dataclass(frozen=True, slots=True)
class Case:
    """A layer at a token count.

    Attributes:
      dtype: of tokens and weights, a name in `DTYPES`.
      num_tokens: rows of the program.
      num_padding: how many of them, the last ones, are no tokens and go to no expert, as in a bucket that is not full.
    """

    layer: Layer
    dtype: str
    num_tokens: int
    num_padding: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory that is needed at most: the weights, once more in float32 (what XLA makes of bfloat16 on a CPU, and of gate and up when it
        transposes them for `dense`), and the float32 products of every expert with every token."""
        layer = self.layer
        products = self.num_tokens * layer.num_experts * (3 * layer.intermediate + layer.hidden)
        return layer.num_weights * (DTYPES[self.dtype] + 4) + products * 4


def read_layer(text: str) -> Layer:
    """A name in `LAYERS`, or sizes as in "8x2x512x1024": experts, experts of a token, hidden, intermediate.

    Raises:
      ConfigError: neither, or more experts of a token than there are.
    """
    if text in LAYERS:
        return LAYERS[text]
    if not re.fullmatch(r"[1-9][0-9]{0,6}(x[1-9][0-9]{0,6}){3}", text, re.ASCII):
        raise ConfigError(
            f"--workload {text}: unknown; give {', '.join(LAYERS)} or sizes as in 8x2x512x1024 "
            "(experts, experts of a token, hidden, intermediate)."
        )
    layer = Layer(text, *map(int, text.split("x")))
    if layer.top_k > layer.num_experts:
        raise ConfigError(f"--workload {text}: a token cannot go to {layer.top_k} of {layer.num_experts} experts.")
    return layer


def make_cases(
    layers: Sequence[Layer],
    dtypes: Sequence[str],
    token_counts: Sequence[int],
    padding_percent: int,
    memory_bytes: int,
) -> list[Case]:
    """Every layer in every type at every token count, each once, in the order given.

    Args:
      padding_percent: share of the rows that are padding, rounded down; at least one row stays a token.
      memory_bytes: of this machine, half of which a case may take.

    Raises:
      ConfigError: a case takes more, or there is no such type or share.
    """
    if unknown := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise ConfigError(f"--dtype {unknown[0]}: unknown; give {' or '.join(DTYPES)}.")
    if not 0 <= padding_percent < 100:
        raise ConfigError(f"--padding {padding_percent} must be between 0 and 99.")
    cases = [
        Case(layer, dtype, count, min(count - 1, count * padding_percent // 100))
        for layer in dict.fromkeys(layers)
        for dtype in dict.fromkeys(dtypes)
        for count in dict.fromkeys(token_counts)
    ]
    for case in cases:
        if case.num_bytes > memory_bytes // 2:
            raise ConfigError(
                f"--workload {case.layer.name} with --num-tokens {case.num_tokens} needs {case.num_bytes / 2**30:.1f} GiB in {case.dtype}, "
                f"more than half of the {memory_bytes / 2**30:.1f} GiB of this machine."
            )
    return cases
