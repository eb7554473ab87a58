"""The numbers of narrow types and packed words, worked out from their bits, and the simplest way from float32 to them.

Nothing here knows the code that reads quantised checkpoints. Letters: O outputs, N inputs of a weight [O, N].
"""

import numpy as np

# The values of the narrow types, from their bits.


def e4m3(code):
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def e5m2(code):
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 2 & 31, code & 3
    if exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    return sign * (mantissa * 2.0**-16 if exponent == 0 else (4 + mantissa) * 2.0 ** (exponent - 17))


def e2m1(code):
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2))


def e8m0(code):
    return 2.0 ** (code - 127)


DECODERS = {"float8_e4m3fn": e4m3, "float8_e5m2": e5m2, "float8_e8m0fnu": e8m0, "uint8": e8m0}


def numbers(array):
    """The entries of an array of any type as nested lists of Python floats; bytes are exponents."""
    decode = DECODERS.get(array.dtype.name)
    if decode is None:
        return array.astype(np.float64).tolist()
    return np.array([decode(code) for code in range(256)])[array.view(np.uint8)].tolist()


def fields(words, bits, axis):
    """The unsigned integers in 32-bit words, the lowest bits first, as nested lists."""
    words = np.asarray(words).astype(np.int64) & 0xFFFFFFFF
    codes = np.stack([words >> place & (1 << bits) - 1 for place in range(0, 32, bits)], axis=axis + 1)
    shape = list(words.shape)
    shape[axis] *= 32 // bits
    return codes.reshape(shape).tolist()


def each(shape, value):
    """f32 of a shape from `value(o, i)`."""
    return np.array([[value(o, i) for i in range(shape[1])] for o in range(shape[0])], np.float64).astype(np.float32)


# Encoders, as simple as they can be: a weight [O, N] to tensors by the end of their name.


def largest(weight, rows, columns):
    """Of the magnitudes in every block, never 0."""
    outputs, inputs = weight.shape
    return np.array(
        [
            [np.abs(weight[o : o + rows, i : i + columns]).max() + 1e-9 for i in range(0, inputs, columns)]
            for o in range(0, outputs, rows)
        ],
        np.float32,
    )


def spread(grid, rows, columns, shape):
    return np.repeat(np.repeat(grid, rows, 0), columns, 1)[: shape[0], : shape[1]]


def to_narrow(weight, rows, columns, limit, dtype, scale_dtype):
    scale = (largest(weight, rows, columns) / limit).astype(scale_dtype)
    ratio = weight / spread(scale.astype(np.float32), rows, columns, weight.shape)
    ratio = np.clip(ratio, -limit, limit)
    return (np.rint(ratio) if dtype == np.int8 else ratio).astype(dtype), scale


def to_words(codes, bits, axis, order=None):
    """int32 words of unsigned integers packed along an axis; the last word may not be full."""
    codes, per_word = np.moveaxis(np.asarray(codes, np.int64), axis, -1), 32 // bits
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)])
    codes = codes.reshape(*codes.shape[:-1], -1, per_word)
    words = sum(codes[..., place] << bits * k for k, place in enumerate(order or range(per_word)))
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


def to_integers(weight, group, bits, scale_dtype, *, zero):
    """Unsigned codes [O, N], scales and zero points [O, G]. Without `zero` the zero point is the middle."""
    top = 2**bits - 1
    if zero:
        low = -largest(-np.minimum(weight, 0), 1, group)
        scale = ((largest(np.maximum(weight, 0), 1, group) - low) / top).astype(scale_dtype)
        zeros = np.clip(np.rint(-low / scale.astype(np.float32)), 1, top).astype(np.int64)
    else:
        scale = (largest(weight, 1, group) / (top / 2)).astype(scale_dtype)
        zeros = np.full(scale.shape, 2 ** (bits - 1))
    wide = [spread(grid.astype(np.float32), 1, group, weight.shape) for grid in (scale, zeros)]
    return np.clip(np.rint(weight / wide[0] + wide[1]), 0, top).astype(np.int64), scale, zeros


def to_e2m1(ratio):
    """The nearest codes."""
    values = np.array([e2m1(code) for code in range(16)], np.float32)
    return np.abs(ratio[..., None] - values).argmin(-1).astype(np.uint8)


def to_bytes(codes):
    return codes[..., 0::2] | codes[..., 1::2] << 4
