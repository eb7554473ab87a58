"""In which number format a model's experts lie on the device, from what the checkpoint holds and what the chip multiplies.

Only experts stay quantised, which are nearly all of a mixture-of-experts model. Everything else is restored to the type of the model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from tpu_serve.checkpoint.quantised.scheme import INT8_VALUES, MXFP4, SCALED, Scheme, read_scheme
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError, ModelOptions
from tpu_serve.device.chip import Chip
from tpu_serve.hf_config import HFConfig

logger = logging.getLogger(__name__)

_EXPERT = "model.layers.0.mlp.experts.0.gate_proj"
"""A module that stands for all experts where a checkpoint lists what it leaves alone."""


_PLAIN = frozenset({"float32", "float16", "bfloat16", "float64"})
_FP8, _INT8, _MXFP4 = frozenset({"float8_e4m3fn"}), frozenset({"int8"}), frozenset({"uint8"})
_VALUES = {
    "fp8_channel": _FP8, "w8a16": _FP8, "fp8_block128": _FP8, "w8a16_block128": _FP8, "int8_channel": _INT8, "mxfp4": _MXFP4,
}  # fmt: skip
"""What the experts of a checkpoint are made of that a format holds bit for bit."""
_MATRICES = (
    "weight",
    "qweight",
    "weight_packed",
    "gate_up_proj",
    "down_proj",
    "gate_up_proj_blocks",
    "down_proj_blocks",
)


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """What the experts' weights become.

    Attributes:
      name: in `fused_moe_v2.formats.FORMATS`; None for the type of the model.
      reason: in words, for the log.
    """

    name: str | None
    reason: str


def choose_format(options: ModelOptions, config: HFConfig, chip: Chip) -> ExpertFormat:
    """The format of a model's experts on a chip.

    Raises:
      ConfigError: the checkpoint's scheme is unknown, or `--quantization` asks for another one than it has.
    """
    scheme = read_scheme(config)
    stored = frozenset() if scheme is None or options.load_format == "dummy" else _stored_types(config)
    if scheme is None or (stored <= _PLAIN if stored else scheme.skipped.find(_EXPERT) is not None):
        if options.quantization == "none":
            return ExpertFormat(None, "as in the checkpoint")
        return ExpertFormat(_asked(options.quantization, chip), f"--quantization {options.quantization}")
    if options.quantization != "none":
        raise ConfigError(
            f"--quantization {options.quantization} is for checkpoints that are not quantised, and this one is ({scheme.label}). Leave it "
            f"out: --requantize says what becomes of such experts."
        )
    exact, narrow = _exact(scheme, chip), _native(chip)
    if exact is not None and not stored <= _VALUES.get(exact, stored):
        exact = None  # some layers are left alone, or their values are of another type
    if options.requantize == "off":
        if exact is None:
            return ExpertFormat(None, f"--requantize off, and no kernel takes {scheme.label} as it is: restored")
        return ExpertFormat(exact, "--requantize off: as in the checkpoint")
    if not chip.is_tpu:
        return ExpertFormat(exact, "as in the checkpoint" if exact else f"{scheme.label}: restored on a CPU")
    if scheme.families == (MXFP4,) and _has_fp8(chip):
        return ExpertFormat("fp4_block512", "larger blocks than the checkpoint's are multiplied faster")
    if exact is not None and exact == narrow:
        return ExpertFormat(exact, "as in the checkpoint")
    return ExpertFormat(
        narrow, f"{chip.name} multiplies it faster than what the checkpoint holds (--requantize off keeps that)"
    )


def _stored_types(config: HFConfig) -> frozenset[str]:
    """Types of the routed experts' matrices, from the headers of the weights: what is quantised config.json says by names, of which every family
    has its own. Empty where there are no weights to look at, or no experts.

    Raises:
      ConfigError: a file of weights is broken.
    """
    if not any(config.folder.glob("*.safetensors")):
        return frozenset()
    files, types = SafetensorsFolder(config.folder), set()
    for name in files.names:
        parts = name.split(".")
        if "experts" in parts and parts[0] != "mtp":
            if parts[-1] in _MATRICES:
                types.add(files.info(name)[0].name)
            elif parts[-1].endswith("weight_zero_point"):
                types.add("zero points")
    return frozenset(types)


def _asked(quantization: str, chip: Chip) -> str:
    if quantization == "int8":
        if "int8" not in chip.peak_ops:
            raise ConfigError(
                f"--quantization int8: {chip.name} has no products of int8; --quantization fp8 is what it multiplies fastest."
            )
        return "int8_channel"
    return "fp8_channel" if _has_fp8(chip) else "w8a16"


def _has_fp8(chip: Chip) -> bool:
    """Whether products of 8-bit floats are faster than those of bfloat16. A CPU has no products of its own for them."""
    return chip.is_tpu and "float8_e4m3fn" in chip.peak_ops


def _native(chip: Chip) -> str:
    """The 8-bit format that a TPU multiplies fastest."""
    return "fp8_channel" if _has_fp8(chip) else "int8_channel"


def _exact(scheme: Scheme, chip: Chip) -> str | None:
    """The format that holds the checkpoint's experts bit for bit, None where there is none for the chip."""
    if scheme.families == (MXFP4,):
        return "mxfp4" if chip.is_tpu else None
    if scheme.families != (SCALED,):
        return None
    if scheme.values == INT8_VALUES:
        has_int8 = not chip.is_tpu or "int8" in chip.peak_ops
        return "int8_channel" if has_int8 and not scheme.blocks and not scheme.group_sizes else None
    inputs = {block[1] for block in scheme.blocks} | set(scheme.group_sizes)
    if not inputs:
        return "fp8_channel" if _has_fp8(chip) else "w8a16"
    if inputs == {128}:
        return "fp8_block128" if _has_fp8(chip) else "w8a16_block128"
    return None


@dataclass(slots=True)
class QuantisationErrors:
    """Collects what quantising cost each weight, for the log. The error is the norm of the difference over the norm of the weight."""

    by_path: dict[str, float] = field(default_factory=dict)

    def __call__(self, path: str, error: float) -> None:
        self.by_path[path] = error
        logger.debug("%s: relative error of its format %.5f", path, error)

    def report(self, format: ExpertFormat) -> None:
        """One line over all weights."""
        if not self.by_path:
            return
        worst = max(self.by_path, key=self.by_path.__getitem__)
        if self.by_path[worst] == 0:
            logger.info("Experts are %s, bit for bit those of the checkpoint", format.name)
            return
        mean = sum(self.by_path.values()) / len(self.by_path)
        logger.info(
            "Experts are %s now; relative error of %d weights: %.4f on average, at most %.4f (%s)",
            format.name, len(self.by_path), mean, self.by_path[worst], worst,
        )  # fmt: skip
