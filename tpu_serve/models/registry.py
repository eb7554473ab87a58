"""Which `model_type` of config.json is served by which class."""

from __future__ import annotations

from tpu_serve.config import ConfigError
from tpu_serve.hf_config import HFConfig
from tpu_serve.models.base import Model
from tpu_serve.models.mixtral import Mixtral
from tpu_serve.models.qwen3_moe import Qwen3Moe

MODELS: dict[str, type[Model]] = {"mixtral": Mixtral, "qwen3_moe": Qwen3Moe}


def build_model(config: HFConfig) -> Model:
    """The model that config.json describes.

    Raises:
      ConfigError: its type is not supported; the message lists what is.
    """
    kind = config.get("model_type")
    if kind not in MODELS:
        raise ConfigError(
            f"config.json: model_type {kind!r} is not supported; supported are {', '.join(sorted(MODELS))}."
        )
    return MODELS[kind].from_config(config)
