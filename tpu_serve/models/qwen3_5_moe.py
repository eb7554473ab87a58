"""Qwen3.5-MoE and Qwen3.6-MoE, the text model: Qwen3-Next with other names in its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from tpu_serve.hf_config import HFConfig
from tpu_serve.layers.transformer import also_under
from tpu_serve.models.qwen3_next import Qwen3Next


@dataclass(frozen=True, slots=True)
class Qwen35Moe(Qwen3Next):
    """Sizes of a model; see `Model` for the functions. All layers hold experts, and their weights always sum to one."""

    @classmethod
    def from_config(cls, config: HFConfig) -> Self:
        """Reads sizes from config.json. What transformers has a size of its own for may be absent.

        Raises:
          ConfigError: something is missing or not supported.
        """
        return cls._read(config, (True,) * config.positive("num_hidden_layers"), renormalise=True)

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        return ("model.visual.*", "mtp.*", *(("lm_head.weight",) if self.tied else ()))

    def param_specs(self, dtype: Any) -> Any:
        """Tree of `ParamSpec`. Published checkpoints hold the text model beside a vision tower, one level further down."""
        return also_under(Qwen3Next.param_specs(self, dtype), "model.", "model.language_model.")
