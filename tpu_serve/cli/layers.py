"""The expert layer of a model that a command names."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from tpu_serve.config import EMBEDDED_MODEL, ConfigError

if TYPE_CHECKING:
    from tpu_serve.moe_plan.layer import MoELayer


def layer_of_checkpoint(model: str | None, format: str | None) -> tuple[str, MoELayer]:
    """Name and expert layer of a model folder or hub id, of the embedded model for None.

    Args:
      format: of the weights; None for the type of the checkpoint.

    Raises:
      ConfigError: the model is not there or not supported, or quantised and `format` does not say how.
    """

    from tpu_serve.checkpoint.folder import resolve
    from tpu_serve.checkpoint.quantised.scheme import read_scheme
    from tpu_serve.hf_config import read_config
    from tpu_serve.layers.moe.backends import layer_of
    from tpu_serve.models.registry import build_model

    config = read_config(resolve(model or str(EMBEDDED_MODEL), None, weights=False))
    if format is None and read_scheme(config) is not None:
        raise ConfigError("config.json: the checkpoint is quantised; name the weights' format with --format.")
    dtype = config.get("dtype", "bfloat16")
    dtype = dtype if dtype == "float32" else "bfloat16"
    moe = build_model(config).moe
    if moe is None:
        raise ConfigError(f"{config.architecture} has no experts, and so no plan for them.")
    layer = layer_of(moe, dtype)
    if format is not None:
        layer = dataclasses.replace(layer, format=format, dtype="float32" if format == "float32" else "bfloat16")
    return model or EMBEDDED_MODEL.name, layer
