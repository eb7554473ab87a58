"""Small quantised checkpoints for tests, and what they mean, worked out one value at a time from the definitions of the formats.

Nothing here knows the code that reads such checkpoints. Letters: O outputs, N inputs of a weight [O, N].
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import safetensors.numpy
from quantised_numbers import (
    e2m1,
    each,
    fields,
    largest,
    numbers,
    spread,
    to_bytes,
    to_e2m1,
    to_integers,
    to_narrow,
    to_words,
)

KINDS = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int8": "I8", "uint8": "U8",
}  # fmt: skip
BLOCK = (16, 24)
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write(folder, tensors, config, *, num_files=1, **files):
    """A checkpoint folder; with several files, neighbouring tensors are in different ones."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["model.safetensors"] if num_files == 1 else [f"model-{k}.safetensors" for k in range(num_files)]
    for k, name in enumerate(names):
        _write_file(folder / name, dict(list(tensors.items())[k::num_files]))
    if num_files > 1:
        weight_map = {tensor: names[k % num_files] for k, tensor in enumerate(tensors)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def _write_file(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        start, data = len(data), data + np.asarray(array).tobytes()
        kind = KINDS[np.asarray(array).dtype.name]
        header[name] = {"dtype": kind, "shape": list(np.shape(array)), "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def quantise_folder(source, target, form, *, num_files=1):
    """A copy of an unquantised folder with its projections in a format, and the float32 weights by name that it stands for."""
    stored, meant = {}, {}
    for name, array in safetensors.numpy.load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            module = name.removesuffix(".weight")
            parts = form.encode(array.astype(np.float32))
            stored |= {f"{module}.{leaf}": part for leaf, part in parts.items()}
            meant[name] = form.decode(parts)
        else:
            stored[name], meant[name] = array, array.astype(np.float32)
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": form.config}
    return write(target, stored, config, num_files=num_files), meant


@dataclass(frozen=True)
class Form:
    """A format of a weight [O, N].

    Attributes:
      config: the `quantization_config`.
      encode: weight -> tensors by the end of their name.
      decode: these -> f32[O, N].
      words: how the folder calls it.
    """

    config: dict
    encode: Callable
    decode: Callable
    words: str


def compressed(form, **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def scaled_form(config, words, rows, columns, suffix, scale_dtype, dtype=ml_dtypes.float8_e4m3fn, shape=None, **more):
    def encode(weight):
        sizes = rows or weight.shape[0], columns or weight.shape[1]
        limit = 127 if dtype == np.int8 else float(ml_dtypes.finfo(dtype).max)
        values, scale = to_narrow(weight, *sizes, limit, dtype, scale_dtype)
        extra = {leaf: np.array(value, np.float32) for leaf, value in more.items()}
        return {"weight": values, suffix: scale if shape is None else scale.reshape(shape), **extra}

    def decode(parts):
        values = parts["weight"]
        sizes = rows or values.shape[0], columns or values.shape[1]
        scale = numbers(parts[suffix].reshape(-(-values.shape[0] // sizes[0]), -(-values.shape[1] // sizes[1])))
        value = numbers(values)
        return each(values.shape, lambda o, i: value[o][i] * scale[o // sizes[0]][i // sizes[1]])

    return Form(config, encode, decode, words)


def packed_form(bits, group, *, zero):
    def encode(weight):
        size = group or weight.shape[1]
        codes, scale, zeros = to_integers(weight, size, bits, ml_dtypes.bfloat16, zero=zero)
        parts = {
            "weight_packed": to_words(codes, bits, 1),
            "weight_scale": scale,
            "weight_shape": np.array(weight.shape, np.int64),
        }
        return parts | ({"weight_zero_point": to_words(zeros, bits, 0)} if zero else {})

    def decode(parts):
        outputs, inputs = (int(size) for size in parts["weight_shape"])
        size = group or inputs
        code, scale = fields(parts["weight_packed"], bits, 1), numbers(parts["weight_scale"])
        zeros = fields(parts["weight_zero_point"], bits, 0) if zero else None

        def value(o, i):
            origin = zeros[o][i // size] if zero else 2 ** (bits - 1)
            return (code[o][i] - origin) * scale[o][i // size]

        return each((outputs, inputs), value)

    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    words = f"{bits}-bit integers, {f'groups of {group}' if group else 'a scale per output channel'}"
    config = compressed("pack-quantized", num_bits=bits, type="int", symmetric=not zero, **strategy)
    return Form(config, encode, decode, words + (" with zero points" if zero else ""))


def gptq_form(bits, version, *, reordered=False, group=GROUP, indexed=True):
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": reordered, "sym": False}
    config |= {"checkpoint_format": version, "dynamic": {"-:.*mlp.gate$": {}, "lm_head": {}}}

    def encode(weight):
        inputs = weight.shape[1]
        size = inputs if group == -1 else group
        order = np.random.default_rng(5).permutation(inputs) if reordered else np.arange(inputs)
        codes, scale, zeros = to_integers(weight[:, order], size, bits, np.float16, zero=True)
        codes = codes[:, np.argsort(order)]
        parts = {
            "qweight": to_words(codes.T, bits, 0),
            "qzeros": to_words(zeros.T - (version == "gptq"), bits, 1),
            "scales": np.ascontiguousarray(scale.T),
        }
        return parts | ({"g_idx": (np.argsort(order) // size).astype(np.int32)} if indexed else {})

    def decode(parts):
        inputs, outputs = parts["qweight"].shape[0] * 32 // bits, parts["qweight"].shape[1]
        size = inputs if group == -1 else group

        code, zero, scale = (
            fields(parts["qweight"], bits, 0),
            fields(parts["qzeros"], bits, 1),
            numbers(parts["scales"]),
        )
        group_of = parts["g_idx"].tolist() if indexed else [i // size for i in range(inputs)]

        def value(o, i):
            g = group_of[i]
            return (code[i][o] - (zero[g][o] + (version == "gptq"))) * scale[g][o]

        return each((outputs, inputs), value)

    words = "a scale per output channel" if group == -1 else f"groups of {group}"
    return Form(config, encode, decode, f"{bits}-bit integers, {words} (GPTQ)")


def awq_form():
    config = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    config["modules_to_not_convert"] = ["gate"]

    def encode(weight):
        codes, scale, zeros = to_integers(weight, GROUP, 4, np.float16, zero=True)
        return {
            "qweight": to_words(codes.T, 4, 1, AWQ_ORDER),
            "qzeros": to_words(zeros.T, 4, 1, AWQ_ORDER),
            "scales": np.ascontiguousarray(scale.T),
        }

    def decode(parts):
        inputs, outputs = parts["qweight"].shape[0], parts["qweight"].shape[1] * 8
        code, zero, scale = fields(parts["qweight"], 4, 1), fields(parts["qzeros"], 4, 1), numbers(parts["scales"])

        def value(o, i):
            place = o // 8 * 8 + AWQ_ORDER.index(o % 8)
            return (code[i][place] - zero[i // GROUP][place]) * scale[i // GROUP][o]

        return each((outputs, inputs), value)

    return Form(config, encode, decode, f"4-bit integers, groups of {GROUP} (AWQ)")


def nvfp4_form(config, words, names, *, divides):
    values_name, local_name, whole_name, unused = names

    def encode(weight):
        whole = np.float32(np.abs(weight).max() / (6 * 448) + 1e-12)
        local = (largest(weight, 1, 16) / 6 / whole).astype(ml_dtypes.float8_e4m3fn)
        step = spread(local.astype(np.float32), 1, 16, weight.shape) * whole
        codes = to_e2m1(weight / np.maximum(step, 1e-30))
        factor = np.array([1 / whole], np.float32) if divides else np.array(whole, np.float32)
        return {values_name: to_bytes(codes), local_name: local, whole_name: factor, unused: np.ones_like(factor)}

    def decode(parts):
        codes, whole = parts[values_name], np.float32(parts[whole_name].reshape(-1)[0])
        local = np.array(numbers(parts[local_name]), np.float32)
        pairs, scale = codes.tolist(), (local / whole if divides else local * whole).astype(np.float64).tolist()

        def value(o, i):
            return e2m1(pairs[o][i // 2] >> 4 * (i % 2) & 15) * scale[o][i // 16]

        return each((codes.shape[0], 2 * codes.shape[1]), value)

    return Form(config, encode, decode, words)


def to_mxfp4(weight):
    """Blocks u8[E, O, N / 32, 16] and scales u8[E, O, N / 32] of weights [E, N, O]."""
    groups = np.swapaxes(weight, 1, 2).reshape(weight.shape[0], weight.shape[2], -1, 32)
    exponent = np.floor(np.log2(np.abs(groups).max(-1) + 1e-30)) - 2
    codes = to_e2m1(groups / np.exp2(exponent)[..., None])
    return to_bytes(codes), (exponent + 127).astype(np.uint8)


def from_mxfp4(blocks, scales):
    """f32[E, N, O]."""
    num_experts, outputs, num_groups, _ = blocks.shape
    values = np.empty((num_experts, num_groups * 32, outputs), np.float32)
    scale = numbers(scales)
    for e, i, o in np.ndindex(values.shape):
        code = int(blocks[e, o, i // 32, i % 32 // 2]) >> 4 * (i % 2) & 15
        values[e, i, o] = e2m1(code) * scale[e][o][i // 32]
    return values


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "modules_to_not_convert": ["lm_head", "mlp.gate"]}
BLOCKS = FP8 | {"activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
BLOCK_WORDS = "FP8, blocks of 16x24"
CHANNEL = "a scale per output channel"
NVIDIA = {
    "quant_method": "modelopt",
    "ignore": ["lm_head", "model.layers.*.mlp.gate"],
    "kv_cache_scheme": {"num_bits": 8},
}

FORMS = {
    "fp8_block_bfloat16": scaled_form(BLOCKS, BLOCK_WORDS, *BLOCK, "weight_scale_inv", ml_dtypes.bfloat16),
    "fp8_block_float32": scaled_form(BLOCKS, BLOCK_WORDS, *BLOCK, "weight_scale_inv", np.float32),
    "fp8_block_e8m0": scaled_form(
        BLOCKS | {"scale_fmt": "ue8m0"}, BLOCK_WORDS, *BLOCK, "weight_scale_inv", ml_dtypes.float8_e8m0fnu
    ),
    "fp8_tensor": scaled_form(
        FP8 | {"activation_scheme": "static"}, "FP8, a scale per tensor", None, None, "weight_scale", np.float32, shape=(), input_scale=2
    ),
    "fp8_tensor_e5m2": scaled_form(
        FP8, "FP8, a scale per tensor", None, None, "weight_scale", np.float32, ml_dtypes.float8_e5m2, (1,), input_scale=[2]
    ),
    "ct_fp8_channel": scaled_form(
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        f"FP8, {CHANNEL}", 1, None, "weight_scale", ml_dtypes.bfloat16,
    ),
    "ct_fp8_tensor": scaled_form(
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
        "FP8, a scale per tensor", None, None, "weight_scale", np.float32, shape=(1,), input_scale=[0.5],
    ),
    "ct_fp8_block": scaled_form(
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=list(BLOCK)),
        BLOCK_WORDS, *BLOCK, "weight_scale", np.float32,
    ),
    "ct_int8_channel": scaled_form(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel"), f"int8, {CHANNEL}", 1, None, "weight_scale", np.float32, np.int8
    ),
    "ct_int8_group": scaled_form(
        compressed("int-quantized", num_bits=8, type="int", strategy="group", group_size=GROUP),
        f"int8, groups of {GROUP}", 1, GROUP, "weight_scale", np.float16, np.int8,
    ),
    "ct_w4_group": packed_form(4, GROUP, zero=False),
    "ct_w4_group_zero": packed_form(4, GROUP, zero=True),
    "ct_w4_channel": packed_form(4, None, zero=False),
    "ct_w8_group_zero": packed_form(8, GROUP, zero=True),
    "ct_w8_channel": packed_form(8, None, zero=False),
    "gptq": gptq_form(4, "gptq"),
    "gptq_v2": gptq_form(4, "gptq_v2", indexed=False),
    "gptq_reordered": gptq_form(4, "gptq", reordered=True),
    "gptq_8_reordered": gptq_form(8, "gptq_v2", reordered=True),
    "gptq_8": gptq_form(8, "gptq"),
    "gptq_channel": gptq_form(4, "gptq", group=-1),
    "awq": awq_form(),
    "ct_nvfp4": nvfp4_form(
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        "NVFP4 (compressed-tensors)", ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"), divides=True,
    ),
    "modelopt_nvfp4": nvfp4_form(
        NVIDIA | {"quant_algo": "NVFP4", "group_size": 16},
        "NVFP4 (ModelOpt)", ("weight", "weight_scale", "weight_scale_2", "input_scale"), divides=False,
    ),
    "modelopt_fp8": scaled_form(
        NVIDIA | {"quant_algo": "FP8"}, "FP8, a scale per tensor", None, None, "weight_scale", np.float32, shape=(), input_scale=1
    ),
}  # fmt: skip
"""Every format of a single weight."""
