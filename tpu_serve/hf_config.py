"""config.json and generation_config.json, in one dialect.

Published configs and those that transformers 5 wrote say the same things under different names, and multimodal ones keep the
text model's part one level down. `read_config` turns all of them into one flat dictionary, so that a model reads one name for
one thing:

  num_experts           also from num_local_experts
  rope_theta, rope_scaling, partial_rotary_factor    also from rope_parameters; rope_scaling is None for plain RoPE and
                        otherwise holds `rope_type` (never the older `type`)
  dtype                 also from torch_dtype; without a "torch." before it
  eos_token_id          a list: the ids of both levels
  model_type, architectures, tie_word_embeddings      of the outer level; everything else of the text model where both have it

`rope_parameters` stays as it is where it holds one entry per kind of layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

from tpu_serve.config import ConfigError
from tpu_serve.json_file import read_json

T = TypeVar("T")

_OUTER_WINS = ("model_type", "architectures", "tie_word_embeddings", "transformers_version")
_SAMPLING_KEYS: Mapping[str, type] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "min_new_tokens": int,
}
_NAMES_OF_REQUESTS = {"min_new_tokens": "min_tokens"}
_UNUSED_KEYS = (
    "begin_suppress_tokens", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "no_repeat_ngram_size",
    "num_beams", "penalty_alpha", "sequence_bias", "typical_p", "epsilon_cutoff", "eta_cutoff", "stop_strings",
)  # fmt: skip
"""Of generation_config.json: what changes answers there and has no counterpart here."""
LARGEST_SIZE = 2**24
"""More of anything is a mistake, and would take for ever to find out otherwise."""
_REQUIRED: Any = object()


@dataclass(frozen=True)
class HFConfig:
    """A model's configuration, flat and in one dialect (see the top of the file).

    Attributes:
      folder: where it was read.
      values: the dictionary, overrides included.
    """

    folder: Path
    values: Mapping[str, Any]

    @property
    def file(self) -> Path:
        return self.folder / "config.json"

    @property
    def architecture(self) -> str:
        """The class name that decides which of our models reads this folder."""
        names = self.get("architectures", kind=list)
        if len(names) != 1 or not isinstance(names[0], str):
            raise ConfigError(f"{self.file}: architectures must hold one name, got {names!r}.")
        return names[0]

    @overload
    def get(self, name: str, *, kind: type[T]) -> T: ...
    @overload
    def get(self, name: str, default: None, *, kind: type[T]) -> T | None: ...
    @overload
    def get(self, name: str, default: Any = ..., *, kind: type | None = None) -> Any: ...
    def get(self, name: str, default: Any = _REQUIRED, *, kind: type | None = None) -> Any:
        """The value of a key. JSON's null counts as absent.

        Args:
          default: what an absent key means. Without it the key is required.
          kind: type that the value must have; the default's type when left out. An int is accepted as a float.

        Raises:
          ConfigError: a required key is absent, or the value has another type.
        """
        value = self.values.get(name)
        if value is None:
            if default is _REQUIRED:
                found = "is null" if name in self.values else "is missing"
                raise ConfigError(f"{self.file}: {name} {found}, but this model needs it.")
            return default
        if kind is None and default is not _REQUIRED and default is not None:
            kind = list if isinstance(default, tuple) else type(default)  # JSON has no tuples
        return value if kind is None else _typed(self.file, name, value, kind)

    def positive(self, name: str, default: Any = _REQUIRED) -> int:
        """The value of a key that counts something.

        Raises:
          ConfigError: as `get`, or the value is below 1.
        """
        value: int = self.get(name, default, kind=int)
        if not 1 <= value <= LARGEST_SIZE:
            bound = "at least 1" if value < 1 else f"at most {LARGEST_SIZE}"
            raise ConfigError(f"{self.file}: {name} must be {bound}, got {value}.")
        return value

    def optional_positive(self, name: str) -> int | None:
        """As `positive`, but an absent key means that there is no such limit."""
        return None if self.get(name, None) is None else self.positive(name)


def _typed(origin: Path | str, name: str, value: Any, kind: type) -> Any:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{origin}: {name} is too large a number.") from None
    # bool is an int to isinstance, never to a config.
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigError(f"{origin}: {name} must be {_NAMES.get(kind, kind.__name__)}, got {value!r}.")
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{origin}: {name} must be a finite number, got {value!r}.")
    return value


_NAMES = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}


def read_config(folder: Path, overrides: Mapping[str, Any] | None = None) -> HFConfig:
    """Reads `config.json` and lays `overrides` over it.

    Overrides may be written in either dialect and on either level, whatever the file's own: both are normalised before they
    are merged. Objects are merged key by key, everything else replaces.

    Raises:
      ConfigError: the file is missing, broken or of an impossible shape.
    """
    file = folder / "config.json"
    values = _normalise(file, read_json(file))
    over = _normalise("--hf-overrides", overrides or {})
    return HFConfig(folder, _cut(_merge(values, over), over))


def _cut(values: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Where an override leaves fewer layers, what config.json says of each layer ends with them, unless that is overridden too."""
    count = over.get("num_hidden_layers")
    if type(count) is not int:
        return values
    kinds, single = values.get("layer_types"), values.get("per_layer_config")
    if isinstance(kinds, list) and "layer_types" not in over:
        values["layer_types"] = kinds[: max(0, count)]
    if isinstance(single, Mapping) and "per_layer_config" not in over:
        values["per_layer_config"] = {
            layer: sizes for layer, sizes in single.items() if not layer.isdecimal() or int(layer) < count
        }
    return values


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


def _normalise(origin: Path | str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dictionary in one dialect. Says nothing about keys that `raw` does not have."""
    values = dict(raw)
    text = values.pop("text_config", None)
    if text is not None:
        text = _typed(origin, "text_config", text, dict)
        ends = _token_ids(origin, values) | _token_ids(origin, text)
        values |= {key: value for key, value in text.items() if key not in _OUTER_WINS or key not in values}
        values["eos_token_id"] = sorted(ends) or None
    elif "eos_token_id" in values:
        values["eos_token_id"] = sorted(_token_ids(origin, values)) or None

    experts = values.pop("num_local_experts", None)
    if experts is not None and values.get("num_experts") is None:
        values["num_experts"] = experts
    torch_dtype = values.pop("torch_dtype", None)
    dtype = values.get("dtype") or torch_dtype
    if dtype is not None:
        values["dtype"] = _typed(origin, "dtype", dtype, str).removeprefix("torch.")
    return _normalise_rope(origin, values)


def _normalise_rope(origin: Path | str, values: dict[str, Any]) -> dict[str, Any]:
    parameters = values.get("rope_parameters")
    if parameters is not None:
        parameters = dict(_typed(origin, "rope_parameters", parameters, dict))
        kinds = {kind: entry for kind, entry in parameters.items() if isinstance(entry, dict)}
        if kinds:
            if rest := [key for key, entry in parameters.items() if key not in kinds and entry is not None]:
                raise ConfigError(
                    f"{origin}: rope_parameters mixes entries per kind of layer ({', '.join(kinds)}) with {', '.join(rest)}."
                )
            values["rope_parameters"] = kinds
            return values
        del values["rope_parameters"]
        for key in ("rope_theta", "partial_rotary_factor"):
            if parameters.get(key) is not None:
                values[key] = parameters[key]
            parameters.pop(key, None)
        if parameters:
            values["rope_scaling"] = parameters
    scaling = values.get("rope_scaling")
    if scaling is not None:
        scaling = dict(_typed(origin, "rope_scaling", scaling, dict))
        older = scaling.pop("type", None)
        if older is not None:
            scaling.setdefault("rope_type", older)
        values["rope_scaling"] = None if scaling.get("rope_type") == "default" or not scaling else scaling
    return values


@dataclass(frozen=True)
class GenerationDefaults:
    """What the model's authors recommend for requests that do not say.

    Attributes:
      sampling: only what the file has, by the names that requests use; `do_sample: false` gives temperature 0.
      eos_token_ids: ids that end an answer, besides those of `config.json`.
      suppressed_ids: ids that no answer may have.
      unused: keys that would change answers and are not honoured.
    """

    sampling: Mapping[str, float | int]
    eos_token_ids: frozenset[int]
    suppressed_ids: tuple[int, ...] = ()
    unused: tuple[str, ...] = ()


def read_generation_config(folder: Path) -> GenerationDefaults:
    """Reads `generation_config.json`; a folder without one recommends nothing.

    Raises:
      ConfigError: the file is broken or a value has the wrong type.
    """
    file = folder / "generation_config.json"
    if not file.exists():
        return GenerationDefaults({}, frozenset())
    values = read_json(file)
    sampling = {
        _NAMES_OF_REQUESTS.get(key, key): _typed(file, key, values[key], kind)
        for key, kind in _SAMPLING_KEYS.items()
        if values.get(key) is not None
    }
    if values.get("do_sample") is False:
        sampling["temperature"] = 0.0
    unused = tuple(key for key in _UNUSED_KEYS if values.get(key) not in (None, 0, 1, False, []))
    suppressed = _token_ids(file, values, "suppress_tokens")
    return GenerationDefaults(sampling, _token_ids(file, values), tuple(sorted(suppressed)), unused)


def eos_token_ids(config: HFConfig) -> frozenset[int]:
    """Every id that ends an answer: those of config.json (both levels) and of generation_config.json."""
    return _token_ids(config.file, config.values) | read_generation_config(config.folder).eos_token_ids


def _token_ids(origin: Path | str, values: Mapping[str, Any], key: str = "eos_token_id") -> frozenset[int]:
    value = values.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for item in ids:
        if type(item) is not int:
            raise ConfigError(f"{origin}: {key} must be an integer or a list of integers, got {value!r}.")
    return frozenset(ids)
