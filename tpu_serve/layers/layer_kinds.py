"""Which layers of a model are what, from config.json."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tpu_serve.config import ConfigError
from tpu_serve.hf_config import HFConfig

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"


def read_kinds(config: HFConfig, supported: Sequence[str], kind_of: Callable[[int], str]) -> tuple[str, ...]:
    """Per layer its kind, from `layer_types`.

    Args:
      supported: kinds that there may be.
      kind_of: of a layer's index, where config.json has no `layer_types`.

    Raises:
      ConfigError: a kind of layer is not supported, or there are not as many as layers.
    """
    num_layers = config.positive("num_hidden_layers")
    kinds = config.get("layer_types", None, kind=list)
    if kinds is None:
        return tuple(map(kind_of, range(num_layers)))
    if len(kinds) != num_layers:
        raise ConfigError(
            f"{config.file}: layer_types names {len(kinds)} layers, but num_hidden_layers is {num_layers}."
        )
    for kind in kinds:
        if kind not in supported:
            raise ConfigError(
                f"{config.file}: {kind!r} in layer_types is not supported; supported are {' and '.join(map(repr, supported))}."
            )
    return tuple(kinds)


def read_windows(config: HFConfig, slides: Callable[[int], bool]) -> tuple[int | None, ...]:
    """Per layer how many keys a token sees, its own included, from `layer_types` and `sliding_window`; None for all before it.

    Args:
      slides: of a layer's index, where config.json has no `layer_types`.

    Raises:
      ConfigError: a kind of layer is not supported, there are not as many as layers, or a window is missing.
    """
    kinds = read_kinds(config, (SLIDING, FULL), lambda layer: SLIDING if slides(layer) else FULL)
    window = config.positive("sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


def read_moe_layers(config: HFConfig) -> tuple[bool, ...]:
    """Per layer whether it holds experts: every `decoder_sparse_step`-th does, unless `mlp_only_layers` names it (Qwen).

    Raises:
      ConfigError: a value has the wrong type, or the step is not positive.
    """
    dense, step = config.get("mlp_only_layers", None, kind=list) or [], config.positive("decoder_sparse_step", 1)
    return tuple(
        layer not in dense and (layer + 1) % step == 0 for layer in range(config.positive("num_hidden_layers"))
    )


def require_silu(config: HFConfig) -> None:
    """Raises ConfigError where `hidden_act` is another function."""
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ConfigError(
            f"{config.file}: hidden_act {activation!r} is not supported for {config.get('model_type')}; supported is 'silu'."
        )
