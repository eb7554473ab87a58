"""A folder of a quantised checkpoint, seen as if it were not quantised."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, KeysView
from pathlib import Path
from typing import Any

import numpy as np

from tpu_serve.checkpoint.quantised import awq, gptq, mxfp4, nvfp4, packed, scaled
from tpu_serve.checkpoint.quantised.encoded import Encoded
from tpu_serve.checkpoint.quantised.raw import FLOAT8, INT8, UINT8, RawTensors
from tpu_serve.checkpoint.quantised.scheme import AWQ, GPTQ, MXFP4, NVFP4, PACKED, SCALED, Scheme, read_scheme
from tpu_serve.checkpoint.quantised.stored import Stored
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.config import ConfigError
from tpu_serve.hf_config import HFConfig

_FIND: dict[str, Callable[[RawTensors, Scheme], Iterator[Encoded]]] = {
    SCALED: scaled.find,
    PACKED: packed.find,
    GPTQ: gptq.find,
    AWQ: awq.find,
    MXFP4: mxfp4.find,
    NVFP4: nvfp4.find,
}

_FLOAT32 = np.dtype(np.float32)

# Scales of activations and of cached keys and values: this server computes both without them.
_UNUSED = re.compile(
    r".*[._](?:input_scale|input_global_scale|input_zero_point|activation_scale|output_scale|output_zero_point"
    r"|[qkv]_scale|kv_scale|prob_scale|[kv]_zero_point)",
    re.ASCII,
)
# What only makes sense beside quantised values.
_BELONGS = re.compile(
    r".*(?:\.weight_(?:scale|scale_inv|scale_2|global_scale|packed|shape|zero_point|g_idx)|\.qweight|\.qzeros|\.scales|\.g_idx"
    r"|_(?:blocks|scales|scale_inv))",
    re.ASCII,
)


class DequantisedFolder:
    """The tensors of a quantised checkpoint under the names, and with the values, that an unquantised one would have.

    A quantised weight, float32, takes the place of the tensors that it is restored from. What is not quantised passes through. What a
    module is, its tensors say; config.json gives block and group sizes, and has to agree.

    Attributes:
      folder: where it lies.
      scheme: how it is quantised, in words.
      unused: tensors that are neither shown nor read: scales of activations and of the KV cache.

    Raises:
      ConfigError: config.json has no scheme or an unknown one, or contradicts the tensors, or these do not fit together.
    """

    def __init__(self, files: SafetensorsFolder, config: HFConfig):
        self.folder = files.folder
        scheme = read_scheme(config)
        if scheme is None:
            raise ConfigError(f"{config.file} has no quantization_config.")
        self._files = files
        self._raw = RawTensors(files)
        encoded = [one for family in scheme.families for one in _FIND[family](self._raw, scheme)]
        owner = self._owners(encoded)
        self.unused = tuple(name for name in files.names if name not in owner and _UNUSED.fullmatch(name))
        self._check_rest(scheme, owner)
        self._check_skipped(scheme, encoded)
        forms = list(dict.fromkeys(one.form for one in encoded))
        self.scheme = "; ".join(forms) or f"not quantised, although {scheme.file.name} says {scheme.label}"
        # In the order of the files: readers go through them from front to back.
        hidden = {*self.unused, *owner}
        self._tensors: dict[str, Encoded | None] = {}
        for name in files.names:
            if name in owner:
                self._tensors.setdefault(owner[name].name, owner[name])
            elif name not in hidden:
                self._tensors[name] = None

    def _owners(self, encoded: list[Encoded]) -> dict[str, Encoded]:
        """The weight that each tensor belongs to."""
        owner: dict[str, Encoded] = {}
        for one in encoded:
            if one.name in self._files and one.name not in one.parts:
                raise ConfigError(
                    f"{self._raw.place(one.name)} is the weight that {self._raw.place(one.parts[0])} stands for: it is there twice."
                )
            for part in one.parts:
                if owner.setdefault(part, one) is not one:
                    raise ConfigError(
                        f"{self._raw.place(part)} is a part of {one.name} twice over: {', '.join(owner[part].parts)} and "
                        f"{', '.join(one.parts)}."
                    )
        return owner

    def _check_rest(self, scheme: Scheme, owner: dict[str, Encoded]) -> None:
        """Raises ConfigError where a tensor that passes through is quantised, or of use only beside one that is."""
        for name in self._files.names:
            if name in owner or _UNUSED.fullmatch(name):
                continue
            if _BELONGS.fullmatch(name):
                raise self._raw.fault(
                    name, f"there is no quantised weight that it belongs to, as {scheme.file} ({scheme.label}) has them"
                )
            if self._files.info(name)[0] in (*FLOAT8, INT8, UINT8):
                expected = " or ".join(name + suffix for suffix in scaled.SUFFIXES)
                raise self._raw.fault(
                    name, f"what restores its values, {expected}, is missing, and {scheme.file} says {scheme.label}"
                )

    def _check_skipped(self, scheme: Scheme, encoded: list[Encoded]) -> None:
        for one in encoded:
            entry = scheme.skipped.find(one.name.removesuffix(".weight"))
            if entry is not None:
                raise self._raw.fault(one.parts[0], f"{scheme.file} lists {entry!r} among what is not quantised")

    @property
    def names(self) -> KeysView[str]:
        """Every tensor's name."""
        return self._tensors.keys()

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def info(self, name: str) -> tuple[np.dtype[Any], tuple[int, ...]]:
        """(dtype, shape) of a tensor, without touching its values."""
        encoded = self._tensors[name]
        return self._files.info(name) if encoded is None else (_FLOAT32, encoded.shape)

    def path(self, name: str) -> Path:
        """The file that holds a tensor, or the values that it is restored from."""
        encoded = self._tensors[name]
        return self._files.path(name if encoded is None else encoded.parts[0])

    def num_bytes(self, name: str) -> int:
        """Bytes that are read from the files for all of a tensor."""
        encoded = self._tensors[name]
        return self._files.num_bytes(name) if encoded is None else sum(map(self._files.num_bytes, encoded.parts))

    def read(self, name: str, rows: slice | None = None) -> np.ndarray:
        """A tensor's values, or some rows of its leading dimension: restored in memory of their own, or a read-only view of the file.

        Raises:
          ConfigError: a scale is not finite.
          ValueError: rows that are not one after the other.
        """
        encoded = self._tensors[name]
        if encoded is None:
            return self._files.read(name, rows)
        return encoded.read(self._raw, *_ends(rows, encoded.shape[0]))

    def stored(self, name: str, rows: slice | None = None) -> Stored | None:
        """A quantised weight, or some rows of it, as the file holds it; None where it is not quantised, or not with one scale per value.

        Rows are of the weight as `info` has it, and start with a block. The inputs of `Stored` are last: for MXFP4, whose weights are
        [E, N, O], that is their transpose.

        Raises:
          ConfigError: a scale is not finite.
          ValueError: rows that are not one after the other, or do not start with a block.
        """
        encoded = self._tensors[name]
        return None if encoded is None else encoded.stored(self._raw, *_ends(rows, encoded.shape[0]))


def _ends(rows: slice | None, size: int) -> tuple[int, int]:
    start, stop, step = (rows or slice(None)).indices(size)
    if step != 1:
        raise ValueError(f"rows are read one after the other, not in steps of {step}")
    return start, max(start, stop)


def open_checkpoint(folder: Path, config: HFConfig) -> SafetensorsFolder | DequantisedFolder:
    """The tensors of a model folder, restored where they are quantised.

    Raises:
      ConfigError: as both classes, or tensors are quantised and config.json does not say how.
    """
    files = SafetensorsFolder(folder)
    if read_scheme(config) is not None:
        return DequantisedFolder(files, config)
    raw = RawTensors(files)
    for name in files.names:
        # A scale without its values would be a tensor that nobody knows: the loader names it.
        suffix = next((suffix for suffix in scaled.SUFFIXES if name.endswith(suffix)), None)
        if (
            suffix
            and name.removesuffix(suffix) in files
            and files.info(name.removesuffix(suffix))[0] in (*FLOAT8, INT8, UINT8)
        ):
            raise raw.fault(name, f"{config.file} has no quantization_config that says how weights are quantised")
        if name.endswith((".weight_packed", ".qweight", "_blocks")):
            raise raw.fault(name, f"{config.file} has no quantization_config that says how weights are quantised")
    return files
