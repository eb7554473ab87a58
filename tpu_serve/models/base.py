"""What every model family provides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax

from tpu_serve.device.kv_cache import CacheLayout
from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.mixing import Mixing
from tpu_serve.layers.moe.routing import ExpertWeights, MoEConfig, Routing

Experts = Callable[[jax.Array, Routing, ExpertWeights], jax.Array]
"""(x [T, H], routing, weights) -> [T, H]."""


class Model(Protocol):
    """A family with its sizes: frozen data and pure functions. Weights are passed in, as the tree that `param_specs` describes."""

    @classmethod
    def from_config(cls, config: HFConfig) -> Model:
        """Reads sizes from config.json.

        Raises:
          ConfigError: something is missing or not supported.
        """

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position(self) -> int:
        """Longest sequence that the model was made for."""

    @property
    def moe(self) -> MoEConfig | None:
        """Of all layers that hold experts; None for a dense model."""

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Patterns (fnmatch) of checkpoint tensors that are skipped on purpose."""

    def param_specs(self, dtype: Any) -> Any:
        """Tree of `ParamSpec`."""

    def cache_layout(self, dtype: Any) -> CacheLayout:
        """What each layer keeps of the tokens it has seen."""

    def forward(
        self,
        params: Any,
        token_ids: jax.Array,
        positions: jax.Array,
        is_token: jax.Array,
        caches: list[Any],
        mixing: Mixing,
        experts: Experts,
    ) -> tuple[jax.Array, list[Any]]:
        """Hidden states after the final norm, [T, H], and the new caches.

        Args:
          params: weights.
          token_ids, positions: i32[T].
          is_token: bool[T], False for padding rows; what they hold never reaches a real row.
          caches: one per layer, arranged as `cache_layout` says; handed to `mixing`.
          mixing: how tokens see one another.
          experts: the mixture of experts; never called by a dense model.
        """

    def logits(self, params: Any, hidden: jax.Array) -> jax.Array:
        """f32[..., V] from hidden states [..., H]; where the table is filled up, with as many columns behind those of the model."""
