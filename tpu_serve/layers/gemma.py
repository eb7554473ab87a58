"""What Gemma 3 and Gemma 4 have in common: which layers see a window, scaled embeddings, GELU, capped logits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.config import ConfigError
from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.layer_kinds import FULL, SLIDING, read_kinds
from tpu_serve.layers.transformer import embed, gated_mlp, project_logits


def refuse_unsupported(config: HFConfig, neutral: Mapping[str, Any]) -> None:
    """Compares keys with the only values that are supported for them; an absent key has that value.

    Raises:
      ConfigError: a key has another value, or the activation is not the tanh form of GELU.
    """
    kind = config.get("model_type", kind=str)
    for name, supported in {"hidden_activation": "gelu_pytorch_tanh", **neutral}.items():
        value = config.get(name, None)
        if value is not None and value != supported:
            raise ConfigError(
                f"config.json: {name} {json.dumps(value)} is not supported for {kind}; supported is {json.dumps(supported)}."
            )


def layer_types(config: HFConfig, period: int) -> tuple[str, ...]:
    """For each layer `SLIDING` or `FULL`; every `period`-th layer is full where config.json does not list them.

    Raises:
      ConfigError: as `read_kinds`.
    """
    return read_kinds(config, (SLIDING, FULL), lambda layer: SLIDING if (layer + 1) % period else FULL)


def scaled_embedding(table: jax.Array, token_ids: jax.Array) -> jax.Array:
    """Rows [T, H] of the table [V, H] times the root of H, which is first rounded to the table's type: 53 for 2816 in bfloat16."""
    return embed(table, token_ids) * jnp.asarray(table.shape[1] ** 0.5, table.dtype)


def gelu_mlp(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """`down(gelu(gate(x)) * up(x))` with the tanh form of GELU, computed in float32: its cube is coarse in bfloat16."""
    return gated_mlp(params, x, lambda gate: jax.nn.gelu(gate.astype(jnp.float32), approximate=True).astype(gate.dtype))


def capped_logits(hidden: jax.Array, table: jax.Array, cap: float | None) -> jax.Array:
    """f32[..., V] logits, squeezed smoothly into +-cap where there is one."""
    logits = project_logits(hidden, table)
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def read_cap(config: HFConfig) -> float | None:
    """`final_logit_softcapping`, None without one.

    Raises:
      ConfigError: it is not a positive number.
    """
    cap: float | None = config.get("final_logit_softcapping", None, kind=float)
    if cap is not None and not cap > 0:
        raise ConfigError(f"config.json: final_logit_softcapping must be positive or null, got {cap:g}.")
    return cap
