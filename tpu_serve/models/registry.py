"""Which `model_type` of config.json is served by which class."""

from __future__ import annotations

from tpu_serve.config import ConfigError
from tpu_serve.hf_config import HFConfig
from tpu_serve.models.base import Model
from tpu_serve.models.gemma3 import Gemma3
from tpu_serve.models.gemma4 import Gemma4
from tpu_serve.models.gpt_oss import GptOss
from tpu_serve.models.mixtral import Mixtral
from tpu_serve.models.qwen2_moe import Qwen2Moe
from tpu_serve.models.qwen3 import Qwen3
from tpu_serve.models.qwen3_5_moe import Qwen35Moe
from tpu_serve.models.qwen3_moe import Qwen3Moe
from tpu_serve.models.qwen3_next import Qwen3Next

MODELS: dict[str, type[Model]] = {
    "gemma3": Gemma3,
    "gemma3_text": Gemma3,
    "gemma4": Gemma4,
    "gemma4_text": Gemma4,
    "gpt_oss": GptOss,
    "mixtral": Mixtral,
    "qwen2_moe": Qwen2Moe,
    "qwen3": Qwen3,
    "qwen3_5_moe": Qwen35Moe,
    "qwen3_5_moe_text": Qwen35Moe,
    "qwen3_moe": Qwen3Moe,
    "qwen3_next": Qwen3Next,
}


def build_model(config: HFConfig) -> Model:
    """The model that config.json describes.

    Raises:
      ConfigError: its type is not supported; the message lists what is.
    """
    kind = config.get("model_type", kind=str)
    if kind not in MODELS:
        raise ConfigError(
            f"config.json: model_type {kind!r} is not supported; supported are {', '.join(sorted(MODELS))}."
        )
    return MODELS[kind].from_config(config)
