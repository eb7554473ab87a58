"""Grouped products as loops over groups in float64, and the inputs of their tests."""

import numpy as np


def rows_of(sizes, offset, experts):
    """Pairs of a matrix's number and the slice of its rows."""
    ends = np.cumsum(sizes)
    return [(e, slice(ends[offset + e] - sizes[offset + e], ends[offset + e])) for e in range(experts)]


def activate(gate, up, activation):
    if activation.name == "silu":
        return gate / (1 + np.exp(-gate)) * up
    assert activation.name == "swigluoai"
    gate, up = np.minimum(gate, activation.limit), np.clip(up, -activation.limit, activation.limit)
    return (up + 1) * gate / (1 + np.exp(-activation.alpha * gate))


def forward(lhs, weights, sizes, offset=0, activation=None, existing=None):
    """[Z, R, N_out] of lhs [R, N_in] and weights [E, Z, N_in, N_out], or [R, N_out] with an activation. Rows in no group: of existing, else NaN."""
    lhs, weights = lhs.astype(np.float64), weights.astype(np.float64)
    out = np.full((weights.shape[1], len(lhs), weights.shape[3]), np.nan)
    for expert, rows in rows_of(sizes, offset, len(weights)):
        for z, matrix in enumerate(weights[expert]):
            out[z, rows] = lhs[rows] @ matrix
    if activation is not None:
        out = activate(out[0], out[1], activation)
    return out if existing is None else np.where(np.isnan(out), existing.astype(np.float64), out)


def input_gradient(dproducts, weights, sizes, offset=0):
    """[R, N_in] of dproducts [Z, R, N_out]; zero for rows in no group."""
    dproducts, weights = dproducts.astype(np.float64), weights.astype(np.float64)
    out = np.zeros((dproducts.shape[1], weights.shape[2]))
    for expert, rows in rows_of(sizes, offset, len(weights)):
        for z, matrix in enumerate(weights[expert]):
            out[rows] += dproducts[z, rows] @ matrix.T
    return out


def weight_gradient(lhs, dproducts, sizes, offset=0, experts=None):
    """[E, Z, N_in, N_out]; zero for groups without rows."""
    lhs, dproducts = lhs.astype(np.float64), dproducts.astype(np.float64)
    out = np.zeros((experts or len(sizes), len(dproducts), lhs.shape[1], dproducts.shape[2]))
    for expert, rows in rows_of(sizes, offset, len(out)):
        for z, values in enumerate(dproducts):
            out[expert, z] = lhs[rows].T @ values[rows]
    return out


def normal(seed, shape, dtype="float32", scale=1.0):
    """Random values that the type holds exactly."""
    import ml_dtypes

    values = np.random.default_rng(seed).normal(size=shape) * scale
    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def error(got, wanted):
    """Largest difference, as a share of the largest value."""
    got, wanted = np.asarray(got).astype(np.float64), np.asarray(wanted).astype(np.float64)
    assert got.shape == wanted.shape
    assert np.isfinite(got).all()
    return np.abs(got - wanted).max() / max(np.abs(wanted).max(), 1e-30)


ERROR = {"float32": 1e-5, "bfloat16": 1e-2}
