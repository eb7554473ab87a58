"""Gated DeltaNet (Yang et al., "Gated Delta Networks", 2024): a token mixer with a state of one size, however long the sequence.

Letters: T tokens, H hidden, Hk key heads and Hv value heads, Dk and Dv their sizes, W taps of the convolution, V = Hv * Dv.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.config import ConfigError
from tpu_serve.device.kv_cache import StateArray, StateCache
from tpu_serve.device.params import ParamSpec, Source, Transform, transposed
from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.mixing import Mixing
from tpu_serve.layers.norm import rms_norm_wide
from tpu_serve.layers.product import product
from tpu_serve.layers.transformer import linear_spec

HEADS = "linear_heads"
"""Logical axis of value heads."""
KEY_HEADS = "linear_key_heads"
"""Logical axis of key heads. Each lies together with value heads that share it, on every device that holds some of those."""


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Sizes of a layer, its weights and what it computes. Queries and keys have the same heads.

    Attributes:
      num_value_heads: a multiple of num_key_heads; neighbours share a key head.
      num_taps: inputs that the convolution sees, the token's own included.
      epsilon: of the norm behind the delta rule.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    num_taps: int
    epsilon: float

    @classmethod
    def from_config(cls, config: HFConfig, epsilon: float) -> GatedDeltaNet:
        """Reads the `linear_*` sizes; those that are absent are as in transformers.

        Raises:
          ConfigError: a size is below 1, or the value heads cannot be shared out among the key heads.
        """
        num_keys = config.positive("linear_num_key_heads", 16)
        num_values = config.positive("linear_num_value_heads", 32)
        if num_values % num_keys:
            raise ConfigError(
                f"config.json: linear_num_value_heads {num_values} is not a multiple of linear_num_key_heads {num_keys}."
            )
        return cls(
            num_key_heads=num_keys,
            num_value_heads=num_values,
            key_head_dim=config.positive("linear_key_head_dim", 128),
            value_head_dim=config.positive("linear_value_head_dim", 128),
            num_taps=config.positive("linear_conv_kernel_dim", 4),
            epsilon=epsilon,
        )

    @property
    def key_size(self) -> int:
        """Of the keys of all heads, and of the queries."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def cache(self) -> StateCache:
        """The last W - 1 inputs of each convolution, and a matrix for each value head."""
        keys, values = (self.key_size, KEY_HEADS, self.key_head_dim), (self.value_size, HEADS, self.value_head_dim)
        reach = self.num_taps - 1
        # Flat, see `convolution_on_pool`.
        tails = tuple(
            (f"{name}_tail", StateArray((reach * size,), (axis,), unit=reach * unit))
            for name, (size, axis, unit) in {"q": keys, "k": keys, "v": values}.items()
        )
        shape = (self.num_value_heads, self.key_head_dim, self.value_head_dim)
        return StateCache((*tails, ("state", StateArray(shape, (HEADS, None, None), jnp.float32))))

    def param_specs(self, prefix: str, hidden: int, dtype: Any) -> dict[str, ParamSpec]:
        """Weights of a layer. What decides about decay, and the norm, is float32.

        Checkpoints keep the rows of several projections in one tensor, in one of two orders: `in_proj_qkvz` and `in_proj_ba` hold for one key
        head after the other what belongs to it (Qwen3-Next); `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a` do not mix heads (Qwen3.5).
        """
        keys, values = self.key_size, self.value_size
        sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": self.num_value_heads, "a": self.num_value_heads}
        units = {name: (KEY_HEADS, self.key_head_dim) for name in "qk"}
        units |= {name: (HEADS, self.value_head_dim) for name in "vz"} | {name: (HEADS, 1) for name in "ba"}

        def within(tensor: str, name: str, num_groups: int) -> Source:
            """The rows of projection `name` among those of all that are in `tensor`, of which there are so many groups."""
            start, stop = _span([sizes[part] // num_groups for part in tensor], tensor.index(name))
            transform = transposed if tensor == name else _columns(num_groups, start, stop)
            num_rows = sum(sizes[part] for part in tensor)
            return Source((f"{prefix}.in_proj_{tensor}.weight",), transform, (num_rows, hidden))

        def projection(name: str, by_head: str, plain: str) -> ParamSpec:
            sources = within(by_head, name, self.num_key_heads), within(plain, name, 1)
            axis, unit = units[name]
            return ParamSpec((hidden, sizes[name]), dtype, (None, axis), sources, scale=hidden**-0.5, unit=unit)

        def taps(name: str, num_heads: int) -> ParamSpec:
            shape = (num_heads, sizes[name] // num_heads, self.num_taps)
            start, stop = _span([sizes[part] for part in "qkv"], "qkv".index(name))
            source = Source(
                (f"{prefix}.conv1d.weight",),
                lambda arrays: arrays[0][start:stop].reshape(shape),
                (2 * keys + values, 1, self.num_taps),
            )
            return ParamSpec(shape, dtype, (units[name][0], None, None), (source,), scale=self.num_taps**-0.5)

        def numbers(name: str, size: int, axis: str | None, scale: float | None) -> ParamSpec:
            source = Source((f"{prefix}.{name}",), shape=(size,))
            return ParamSpec((size,), jnp.float32, (axis,), (source,), scale)

        return {
            **{f"{name}_proj": projection(name, "qkvz", "qkv") for name in "qkv"},
            "z_proj": projection("z", "qkvz", "z"),
            **{f"{name}_proj": projection(name, "ba", name) for name in "ba"},
            "q_conv": taps("q", self.num_key_heads),
            "k_conv": taps("k", self.num_key_heads),
            "v_conv": taps("v", self.num_value_heads),
            "decay_log": numbers("A_log", self.num_value_heads, HEADS, 0.5),
            "decay_bias": numbers("dt_bias", self.num_value_heads, HEADS, None),
            "norm": numbers("norm.weight", self.value_head_dim, None, None),
            "out_proj": linear_spec(
                f"{prefix}.out_proj", values, hidden, dtype, (HEADS, None), unit=self.value_head_dim
            ),
        }

    @jax.named_scope("delta_net")
    def mix(
        self, params: dict[str, jax.Array], x: jax.Array, cache: dict[str, Any], mixing: Mixing
    ) -> tuple[jax.Array, dict[str, Any]]:
        """The layer's output [T, H] for x [T, H], and the new cache, arranged as `cache` says.

        Decay, correction strength and output gate are float32.
        """

        def project(name: str) -> jax.Array:
            return product(x, params[f"{name}_proj"])

        new_cache: dict[str, Any] = {}

        def convolved(name: str, head_dim: int) -> jax.Array:
            tail, taps = f"{name}_tail", params[f"{name}_conv"]
            out, new_cache[tail] = mixing.convolve(project(name), taps, cache[tail])
            return jax.nn.silu(out).reshape(len(x), -1, head_dim)

        q, k, v = (
            convolved(name, size)
            for name, size in (("q", self.key_head_dim), ("k", self.key_head_dim), ("v", self.value_head_dim))
        )
        beta = jax.nn.sigmoid(project("b").astype(jnp.float32))
        pace = jax.nn.softplus(project("a").astype(jnp.float32) + params["decay_bias"])
        log_decay = -jnp.exp(params["decay_log"]) * pace
        out, new_cache["state"] = mixing.delta_rule(q, k, v, log_decay, beta, cache["state"])
        normed = rms_norm_wide(out.astype(jnp.float32), params["norm"], self.epsilon)
        gate = jax.nn.silu(project("z").astype(jnp.float32)).reshape(normed.shape)
        return product((normed * gate).astype(x.dtype).reshape(len(x), -1), params["out_proj"]), new_cache


def _span(sizes: list[int], index: int) -> tuple[int, int]:
    """Where one of several parts of these sizes that lie one after the other starts and ends."""
    start = sum(sizes[:index])
    return start, start + sizes[index]


def _columns(num_groups: int, start: int, stop: int) -> Transform:
    """Takes rows start to stop of each group of a tensor [out, in] whose rows are so many groups, as [in, rows]."""

    def take(arrays: list[np.ndarray]) -> np.ndarray:
        (array,) = arrays
        groups = array.reshape(num_groups, -1, array.shape[1])
        return groups[:, start:stop].reshape(-1, array.shape[1]).T

    return take
