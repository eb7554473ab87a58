"""What is decided about an engine from options, config.json and a chip: the same for devices that are here and for some that are not."""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from tpu_serve.checkpoint.quantising import quantised
from tpu_serve.config import ConfigError, EngineConfig
from tpu_serve.device.chip import Chip
from tpu_serve.device.params import iterate
from tpu_serve.engine.placement import Placement
from tpu_serve.engine.plan import EnginePlan, StepBytesOf, make_plan
from tpu_serve.engine.quantisation import ExpertFormat, choose_format
from tpu_serve.engine.step_memory import StepFormula
from tpu_serve.hf_config import HFConfig, read_config
from tpu_serve.kernels.fused_moe_v2.formats import FORMATS
from tpu_serve.layers.moe.backends import choose_backend
from tpu_serve.layers.moe.planned import Planned
from tpu_serve.models.base import Model
from tpu_serve.models.registry import build_model
from tpu_serve.moe_plan.rows import rows_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Design:
    """A model on devices, before its memory is shared out.

    Attributes:
      hf_config: config.json of the model.
      dtype: of weights that are not quantised, and of activations.
      format: of the experts, and why.
      placement: what lies where.
      experts: how experts run; None for a dense model.
    """

    hf_config: HFConfig
    model: Model
    dtype: Any
    format: ExpertFormat
    placement: Placement
    experts: Planned | None

    @cached_property
    def param_bytes(self) -> int:
        """Weights on each device."""
        return self.placement.param_bytes

    @property
    def num_params(self) -> int:
        """Parameters of the model, without padding."""
        return sum(math.prod(spec.given) for _, spec in iterate(self.placement.specs))

    @property
    def ignored_weights(self) -> tuple[str, ...]:
        """Patterns of the checkpoint's tensors that are left out on purpose: by the model, and with the layers that --hf-overrides cut off."""
        kept, whole = (
            one.get("num_hidden_layers", kind=int) for one in (self.hf_config, read_config(self.hf_config.folder))
        )
        return (*self.model.ignored_weights, *(f"*.layers.{layer}.*" for layer in range(kept, whole)))

    @cached_property
    def step_formula(self) -> StepFormula:
        """What steps take, calculated."""
        return StepFormula(self.placement, self.experts, self.dtype)

    def step_bytes(self, config: EngineConfig) -> StepBytesOf:
        """`step_formula` for some options."""
        return partial(
            self.step_formula,
            attention_backend=config.attention.attention_backend,
            num_decode_steps=config.scheduler.num_decode_steps,
        )

    def plan(self, config: EngineConfig, step_bytes: StepBytesOf | None = None) -> EnginePlan:
        """Sizes, for the options of this design or others that differ in sizes only.

        Args:
          step_bytes: what steps take; calculated when left out.

        Raises:
          ConfigError: see `make_plan`.
        """
        placement, model = self.placement, self.model
        return make_plan(
            config,
            model.max_position,
            model.vocab_size,
            self.param_bytes,
            placement.cache_on_one_device,
            placement.chip,
            step_bytes or self.step_bytes(config),
        )


def design_engine(config: EngineConfig, hf_config: HFConfig, chip: Chip, mesh: Mesh) -> Design:
    """Decides everything but sizes.

    Args:
      chip: each of the devices, as if it were alone.
      mesh: the devices, which need not be there; see `make_abstract_mesh`.

    Raises:
      ConfigError: the model is not supported, or options contradict each other, the model or the chip.
    """
    model = build_model(hf_config)
    dtype = _dtype(config, hf_config)
    format = choose_format(config.model, hf_config, chip)
    specs = model.param_specs(dtype)
    if model.moe is None:
        _check_dense(config, hf_config)
    elif format.name is not None:
        specs = quantised(specs, FORMATS[format.name])
    layout = model.cache_layout(dtype).stored_as(config.cache.stored_type)
    if config.attention.attention_backend == "kernel":
        layout = layout.for_kernel()
    placement = Placement.on_mesh(chip, mesh, specs, layout)
    if model.moe is None:
        return Design(hf_config, model, dtype, format, placement, None)
    rows = rows_of(placement.chip.name, config.moe.tuning_folders)
    layer = dataclasses.replace(model.moe, format=format.name)
    experts = choose_backend(config.moe, layer, placement.chip, mesh, dtype.name, rows)
    logger.info("Experts are %s: %s", format.name or dtype.name, format.reason)
    return Design(hf_config, model, dtype, format, placement.padded_for(experts.padding), experts)


def _check_dense(config: EngineConfig, hf_config: HFConfig) -> None:
    """Raises ConfigError where an option is about experts, which the model does not have."""
    asked = config.moe.non_default + (("quantization",) if config.model.quantization != "none" else ())
    if asked:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise ConfigError(f"{hf_config.architecture} has no experts, which {flags} would be about: leave that out.")


def _dtype(config: EngineConfig, hf_config: HFConfig) -> Any:
    name = config.model.dtype
    if name == "auto":
        name = hf_config.get("dtype", "bfloat16")
        if name == "float16":
            logger.info(
                "The checkpoint is float16, which TPUs do not compute in: bfloat16 is used (--dtype float32 keeps every bit)"
            )
            name = "bfloat16"
    if name not in ("bfloat16", "float32"):
        raise ConfigError(
            f"config.json: dtype {name!r} is not supported; choose with --dtype bfloat16 or --dtype float32."
        )
    return jnp.dtype(name)
