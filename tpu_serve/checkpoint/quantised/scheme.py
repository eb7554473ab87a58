"""What config.json says of how a checkpoint is quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpu_serve.checkpoint.quantised.skipped import SkipList
from tpu_serve.config import ConfigError
from tpu_serve.hf_config import HFConfig
from tpu_serve.json_file import read_json

MODELOPT_FILE = "hf_quant_config.json"
SUPPORTED = (
    "fp8 (per tensor, or weight_block_size); compressed-tensors (float-quantized, int-quantized, naive-quantized, pack-quantized with 4 or 8 "
    "bits, nvfp4-pack-quantized, mixed-precision of these); gptq (4 or 8 bits, gptq or gptq_v2); awq (4 bits, gemm); mxfp4; modelopt (FP8, NVFP4)"
)
SCALED, PACKED, GPTQ, AWQ, MXFP4, NVFP4 = FAMILIES = ("scaled", "packed", "gptq", "awq", "mxfp4", "nvfp4")
INT8_VALUES = "int8"

_FORMATS = {
    "float-quantized": SCALED,
    "int-quantized": SCALED,
    "naive-quantized": SCALED,
    "pack-quantized": PACKED,
    "nvfp4-pack-quantized": NVFP4,
}
_MIXED = "mixed-precision"
_ALGORITHMS = {"FP8": SCALED, "NVFP4": NVFP4}
_SKIP_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")


@dataclass(frozen=True, slots=True)
class Scheme:
    """What tensors mean is read off them; this says what they do not.

    Attributes:
      file: where it was read.
      label: what it is called there, for errors.
      families: the modules of this package that read it, a few of `FAMILIES`.
      skipped: modules that are not quantised.
      blocks: shapes of blocks [outputs, inputs] that share a scale.
      group_sizes: inputs that share a scale; -1 is all of them, in GPTQ and AWQ, which have one entry.
      bits: of packed integers.
      zero_offset: what is added to GPTQ's zero points.
      values: INT8_VALUES where 8-bit values are said to be integers; empty otherwise.
    """

    file: Path
    label: str
    families: tuple[str, ...]
    skipped: SkipList = field(repr=False)
    blocks: tuple[tuple[int, int], ...] = ()
    group_sizes: tuple[int, ...] = ()
    bits: int = 4
    zero_offset: int = 0
    values: str = ""


def read_scheme(config: HFConfig) -> Scheme | None:
    """The scheme of a model folder, None where neither config.json nor ModelOpt's file names one.

    Raises:
      ConfigError: it is unknown, or its values make no sense.
    """
    values = config.get("quantization_config", None, kind=dict) or config.get("compression_config", None, kind=dict)
    file = config.file
    if values is None:
        file = config.folder / MODELOPT_FILE
        if not file.is_file():
            return None
        values = read_json(file)
    method = values.get("quant_method")
    if "quantization" in values and method in (None, "modelopt"):
        # ModelOpt's own file, or a copy of it in config.json.
        entries, method = _Entries(file, values).object("quantization"), "modelopt"
    else:
        entries = _Entries(file, values)
    reader = _READERS.get(method) if isinstance(method, str) else None
    if reader is None:
        raise ConfigError(f"{file}: quant_method {method!r} is not supported. Supported are {SUPPORTED}.")
    return reader(entries)


class _Entries:
    """An object of a config, its values checked when they are asked for. JSON's null counts as absent."""

    def __init__(self, file: Path, values: Mapping[str, Any]):
        self.file = file
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def object(self, key: str) -> _Entries:
        return _Entries(self.file, self.mapping(key))

    def mapping(self, key: str) -> Mapping[str, Any]:
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self.fault(key, "an object")
        return value

    def choice(self, key: str, default: str, supported: tuple[str, ...]) -> str:
        value = self.get(key, default)
        if not isinstance(value, str) or value not in supported:
            raise self.fault(key, " or ".join(supported))
        return value

    def size(self, key: str, default: int) -> int:
        """A number of inputs, -1 for all."""
        value = self.get(key, default)
        if type(value) is not int or (value < 1 and value != -1):
            raise self.fault(key, "a positive integer, or -1 for all inputs")
        return value

    def bits(self, key: str, default: int, supported: tuple[int, ...]) -> int:
        value = self.get(key, default)
        if type(value) is not int or value not in supported:
            raise self.fault(key, " or ".join(map(str, supported)))
        return value

    def block(self, key: str) -> tuple[tuple[int, int], ...]:
        """None or one shape of a block."""
        value = self.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) != 2 or any(type(size) is not int or size < 1 for size in value):
            raise self.fault(key, "two positive integers, the outputs and inputs that share a scale")
        return ((value[0], value[1]),)

    def skipped(self, more: list[str] | None = None) -> SkipList:
        entries: list[object] = list(more or [])
        for key in _SKIP_KEYS:
            value = self.get(key, [])
            if not isinstance(value, list):
                raise self.fault(key, "a list of names")
            entries += value
        return SkipList(entries, f"{self.file}: the list of modules that are not quantised")

    def fault(self, key: str, supported: str) -> ConfigError:
        return ConfigError(f"{self.file}: {key} of the quantisation is {self.get(key)!r}; supported is {supported}.")


def _fp8(entries: _Entries) -> Scheme:
    blocks = entries.block("weight_block_size")
    return Scheme(entries.file, "quant_method fp8", (SCALED,), entries.skipped(), blocks=blocks)


def _compressed_tensors(entries: _Entries) -> Scheme:
    for key, why in (("sparsity_config", "sparse weights"), ("transform_config", "transforms of activations")):
        value = entries.mapping(key)
        if value and value.get("format") != "dense":
            raise ConfigError(f"{entries.file}: {key} is {value!r}, but {why} are not supported.")
    config_groups = entries.object("config_groups")
    groups = [config_groups.object(name) for name in entries.mapping("config_groups")]
    outer = entries.choice("format", "", (*_FORMATS, _MIXED))
    if not groups:
        raise entries.fault("config_groups", "an object of one group or more")
    formats = [group.choice("format", "", tuple(_FORMATS)) if outer == _MIXED else outer for group in groups]
    weights = [group.object("weights") for group in groups]
    blocks = [block for one in weights for block in one.block("block_structure")]
    sizes = [one.size("group_size", -1) for one in weights]
    bits = [
        one.bits("num_bits", 4, (4, 8)) for one, form in zip(weights, formats, strict=True) if _FORMATS[form] == PACKED
    ]
    return Scheme(
        entries.file,
        f"quant_method compressed-tensors, format {outer}",
        tuple(dict.fromkeys(_FORMATS[kind] for kind in formats)),
        entries.skipped(),
        blocks=tuple(dict.fromkeys(blocks)),
        group_sizes=tuple(dict.fromkeys(size for size in sizes if size > 0)),
        bits=bits[0] if bits else 4,
        values=INT8_VALUES if set(formats) == {"int-quantized"} else "",
    )


def _gptq(entries: _Entries) -> Scheme:
    version = entries.choice("checkpoint_format", "gptq", ("gptq", "gptq_v2"))
    entries.choice("pack_dtype", "int32", ("int32",))
    # `dynamic` has settings for the modules that a regular expression matches; a minus before it means that they are not quantised.
    skipped = []
    for pattern, changes in entries.mapping("dynamic").items():
        if pattern.startswith("-:"):
            skipped.append("re:" + pattern.removeprefix("-:"))
        elif isinstance(changes, Mapping) and {"bits", "group_size"} & changes.keys():
            raise ConfigError(
                f"{entries.file}: dynamic gives {pattern!r} bits or a group_size of its own, which is not supported: all weights of a GPTQ "
                f"checkpoint share them."
            )
    return Scheme(
        entries.file,
        f"quant_method gptq, checkpoint_format {version}",
        (GPTQ,),
        entries.skipped(skipped),
        group_sizes=(entries.size("group_size", 128),),
        bits=entries.bits("bits", 4, (4, 8)),
        zero_offset=1 if version == "gptq" else 0,
    )


def _awq(entries: _Entries) -> Scheme:
    entries.bits("bits", 4, (4,))
    entries.choice("version", "gemm", ("gemm", "GEMM"))
    size = entries.size("group_size", 128)
    return Scheme(entries.file, "quant_method awq", (AWQ,), entries.skipped(), group_sizes=(size,))


def _mxfp4(entries: _Entries) -> Scheme:
    return Scheme(entries.file, "quant_method mxfp4", (MXFP4,), entries.skipped())


def _modelopt(entries: _Entries) -> Scheme:
    algorithm = entries.choice("quant_algo", "", tuple(_ALGORITHMS))
    entries.bits("group_size", 16, (16,))
    label = f"quant_method modelopt, quant_algo {algorithm}"
    return Scheme(entries.file, label, (_ALGORITHMS[algorithm],), entries.skipped())


_READERS = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}
