"""Small checkpoint folders with routed experts, for tests of conversion."""

import json
import struct

import numpy as np

from tpu_serve.checkpoint.convert import convert_folder
from tpu_serve.checkpoint.safetensors import DTYPES, SafetensorsFolder

GIB = 2**30
LAYER = "model.layers.0.mlp.experts"


def convert(source, target, layout, *, max_shard_bytes=GIB, **options):
    return convert_folder(source, target, layout, max_shard_bytes=max_shard_bytes, **options)


def contents(folder):
    """Type, shape and bytes of every tensor."""
    files = SafetensorsFolder(folder)
    return {name: (*files.info(name), files.read(name).tobytes()) for name in files.names}


def write(folder, tensors, model_type="qwen3_moe"):
    """A checkpoint folder, its weights written without the package's own writer. Arrays are of any type that DTYPES has."""
    kinds = {dtype: kind for kind, dtype in DTYPES.items()}
    header, data = {}, b""
    for name, array in tensors.items():
        start, data = len(data), data + array.tobytes()
        header[name] = {
            "dtype": kinds[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [start, len(data)],
        }
    text = json.dumps(header).encode()
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


def random_bits(rng, dtype, *shape):
    """Any pattern of bits, NaNs too."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def experts(dtype=np.float32, count=4, hidden=6, inner=2, prefix=LAYER):
    """One layer, one tensor for each expert and projection."""
    rng = np.random.default_rng(3)
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {
        f"{prefix}.{expert}.{name}.weight": random_bits(rng, dtype, *shape)
        for expert in range(count)
        for name, shape in shapes.items()
    }


def nothing_but(folder, *names):
    return sorted(path.name for path in folder.iterdir()) == sorted(names)
