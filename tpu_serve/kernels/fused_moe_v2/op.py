"""`fused_moe_v2`: the whole expert-parallel layer behind one function. What surrounds the kernels is here: routing metadata and layouts."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from tpu_serve.device.experts import ExpertWeights
from tpu_serve.kernels.fused_moe_v2 import mode_d, routed, tables, tile
from tpu_serve.kernels.fused_moe_v2.buffers import ROW_MULTIPLE, window_rows
from tpu_serve.kernels.fused_moe_v2.call import Call
from tpu_serve.kernels.fused_moe_v2.combine import combine, own_sums
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.formats import ROW_LIMITS
from tpu_serve.kernels.fused_moe_v2.legality import check
from tpu_serve.kernels.fused_moe_v2.problem import LANES, Problem, ceil_div, round_up
from tpu_serve.kernels.fused_moe_v2.staged import run_stage

F32 = jnp.float32


def fused_moe_v2(
    x: jax.Array,
    expert_ids: jax.Array,
    routing_weights: jax.Array,
    weights: ExpertWeights,
    norm_weight: jax.Array | None = None,
    *,
    problem: Problem,
    config: Config,
    call: Call,
) -> jax.Array:
    """The layer's output for the tokens given, inside `shard_map` over `call.axis`.

    Args:
      x: own tokens [T, H], or all tokens without sequence parallelism, in the problem's dtype.
      expert_ids: i32[T, K] over all experts; -1 for none. An expert named twice by a token counts with both weights.
      routing_weights: f32[T, K]; 0 is as good as an id of -1.
      weights: the device's own experts, padded to `local_experts`, and H and I to multiples of 128.
      norm_weight: f32[H], for a problem with a post norm.

    Returns:
      [T, H] like x. A token's row depends on that token only: what padding rows (all ids -1) hold does not matter.

    Raises:
      ValueError: the config is not legal for the problem and chip, or an array does not fit the problem.
    """
    if (reason := check(problem, config, call.chip)) is not None:
        raise ValueError(reason)
    check_arrays(problem, x, expert_ids, routing_weights, weights, norm_weight)
    p = problem
    num_rows = x.shape[0]
    x, expert_ids, routing_weights = normal_form(p, x, expert_ids, routing_weights)
    norm = None if norm_weight is None else padded_norm(p, norm_weight)
    run = _mode_d if config.mode == "D" else _mode_g
    result = run(problem, config, call, x, expert_ids, routing_weights, weights, norm)
    return result[:num_rows, : p.hidden]


def normal_form(
    p: Problem, x: Any, expert_ids: jax.Array, routing_weights: jax.Array
) -> tuple[Any, jax.Array, jax.Array]:
    """As many rows as the devices' shares together, -1 for every id that is no expert's, and each expert once per token where that matters.
    x may be None.

    It matters where the input is scaled, and where a token could name the experts of a device more often than there are of them: then it
    would have more rows there than `buffers.max_rows` makes room for.
    """
    expert_ids = jnp.where((expert_ids >= 0) & (expert_ids < p.num_experts), expert_ids, -1)
    missing = p.group_tokens - len(expert_ids)
    if not p.sequence_parallel and missing:
        rows = ((0, missing), (0, 0))
        x = None if x is None else jnp.pad(x, rows)
        routing_weights = jnp.pad(routing_weights, rows)
        expert_ids = jnp.pad(expert_ids, rows, constant_values=-1)
    if p.scale_on_input or p.top_k > p.local_experts:
        expert_ids, routing_weights = merge_duplicates(expert_ids, routing_weights)
    # A choice of weight 0 is none in every mode: 0 times a row that overflowed is NaN, and a biased expert makes something of an input of 0.
    return x, jnp.where(routing_weights == 0, -1, expert_ids), routing_weights


def padded_norm(p: Problem, norm_weight: jax.Array) -> jax.Array:
    """f32[1, padded H]; see `tile.normalise`."""
    return jnp.pad(norm_weight, (0, p.padded_hidden - p.hidden))[None]


def check_arrays(
    p: Problem,
    x: jax.Array | None,
    expert_ids: jax.Array,
    routing_weights: jax.Array,
    weights: ExpertWeights,
    norm_weight: jax.Array | None,
) -> None:
    """Raises: ValueError, naming the array whose shape or type is not what the problem asks for. x may be None."""
    rows = p.local_tokens if p.sequence_parallel else p.num_tokens
    experts, hidden, intermediate = p.local_experts, p.padded_hidden, p.padded_intermediate
    expected: dict[str, tuple[tuple[int, ...], str] | None] = {
        "x": ((rows, p.hidden), p.dtype),
        "expert_ids": ((rows, p.top_k), "int32"),
        "routing_weights": ((rows, p.top_k), "float32"),
        "gate_up": ((experts, 2, hidden, intermediate), p.weights.weight),
        "down": ((experts, intermediate, hidden), p.weights.weight),
        "gate_up_scale": ((experts, 2, p.weights.scale_rows(hidden), intermediate), "float32")
        if p.weights.scaled
        else None,
        "down_scale": ((experts, p.weights.num_blocks(intermediate), 1, hidden), "float32")
        if p.weights.scaled
        else None,
        "gate_up_bias": ((experts, 2, 1, intermediate), "float32") if p.gate_up_bias else None,
        "down_bias": ((experts, 1, hidden), "float32") if p.down_bias else None,
        "norm_weight": ((p.hidden,), "float32") if p.post_norm else None,
    }
    if x is None:
        del expected["x"]
    given = {"x": x, "expert_ids": expert_ids, "routing_weights": routing_weights, "norm_weight": norm_weight}
    for name, shape_and_type in expected.items():
        array = given[name] if name in given else getattr(weights, name)
        found = None if array is None else (array.shape, array.dtype.name)
        if found != shape_and_type:
            raise ValueError(f"{name} is {found}, the problem asks for {shape_and_type}")


def merge_duplicates(expert_ids: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each expert at most once per token, its weights added in the first place where it stood; later places become -1."""
    same = (expert_ids[:, :, None] == expert_ids[:, None, :]) & (expert_ids >= 0)[:, :, None]
    earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1)
    repeated = jnp.any(same & earlier, axis=2)
    total = jnp.sum(jnp.where(same, weights[:, None, :], 0.0), axis=2)
    return jnp.where(repeated, -1, expert_ids), jnp.where(repeated, 0.0, total)


def encode_tokens(p: Problem, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Tokens [T, H] as they travel, [T, L, 128], and f32[T] scales where that is in 8 bits."""
    rows, scale = tile.to_wire(jnp.pad(x, ((0, 0), (0, p.padded_hidden - p.hidden))).astype(F32), p.dispatch_type)
    return tile.to_lanes(rows, p.row_lanes), None if scale is None else scale[:, 0]


def _everyone(call: Call, p: Problem, tree: Any) -> Any:
    """Own arrays of every device, stacked on a new first axis. Arrays of 32 bits travel as one: a collective costs more than its bytes."""
    if p.num_devices == 1:
        return jax.tree.map(lambda array: array[None], tree)
    leaves, structure = jax.tree.flatten(tree)
    if len(leaves) == 1 or any(leaf.dtype.itemsize != 4 for leaf in leaves):
        return jax.tree.map(lambda array: jax.lax.all_gather(array, call.axis), tree)
    words = [jax.lax.bitcast_convert_type(leaf, jnp.int32).reshape(-1) for leaf in leaves]
    packed = jnp.concatenate(words)
    # Whole rows of lanes: others are gathered by a sum over the devices, which moves everyone's part with zeros for the rest.
    packed = jnp.pad(packed, (0, -len(packed) % LANES))
    gathered = jax.lax.all_gather(packed, call.axis)
    ends = itertools.accumulate(leaf.size for leaf in leaves)
    parts = [
        jax.lax.bitcast_convert_type(gathered[:, end - leaf.size : end].reshape(p.num_devices, *leaf.shape), leaf.dtype)
        for leaf, end in zip(leaves, ends, strict=True)
    ]
    return jax.tree.unflatten(structure, parts)


def _mode_d(
    p: Problem, config: Config, call: Call, x: jax.Array, expert_ids: jax.Array, routing_weights: jax.Array,
    weights: ExpertWeights, norm: jax.Array | None,
) -> jax.Array:  # fmt: skip
    rows, scale = encode_tokens(p, x)
    if p.sequence_parallel:
        gathered = _everyone(call, p, (expert_ids, routing_weights, scale))
        expert_ids, routing_weights, scale = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), gathered)
    first = jax.lax.axis_index(call.axis) * p.local_experts
    coefficients, counts = routed.coefficients(p, config, expert_ids, routing_weights, first)
    missing = round_up(p.group_tokens, ROW_MULTIPLE) - p.group_tokens
    return mode_d.run(
        p, config, call, rows,
        None if scale is None else jnp.pad(scale, (0, missing))[None],
        coefficients, routed.active_first(counts), jnp.sum(counts > 0, dtype=jnp.int32)[None], counts,
        weights, norm,
    )  # fmt: skip


def sorted_by_everyone(
    p: Problem, config: Config, call: Call, expert_ids: jax.Array, routing_weights: jax.Array
) -> tables.Sorted:
    """Every device's sorted slots: own ones gathered, or all sorted here where every device has all tokens.

    With sequence parallelism, `weights` and `places` of other devices are only gathered where the config needs them, and else stand for own ones.
    """
    if p.sequence_parallel:
        own = tables.sort_slots(p, jax.lax.axis_index(call.axis), expert_ids, routing_weights)
        wanted = {"tokens", "counts"}
        wanted |= {"weights"} if p.scale_on_input else set()
        wanted |= {"places"} if config.dispatch == "dedup_push" or config.combine == "rs" else set()
        fields = {name: getattr(own, name) for name in tables.Sorted.__dataclass_fields__}
        shared = _everyone(call, p, {name: array for name, array in fields.items() if name in wanted})
        kept = {
            name: jnp.broadcast_to(array, (p.num_devices, *array.shape))
            for name, array in fields.items()
            if name not in wanted
        }
        return tables.Sorted(**shared, **kept)
    by_device = (p.num_devices, p.local_tokens, p.top_k)
    return jax.vmap(lambda device, ids, weights: tables.sort_slots(p, device, ids, weights))(
        jnp.arange(p.num_devices, dtype=jnp.int32), expert_ids.reshape(by_device), routing_weights.reshape(by_device)
    )


def prepare(
    p: Problem, config: Config, call: Call, x: jax.Array, expert_ids: jax.Array, routing_weights: jax.Array
) -> tuple[tables.Sorted, dict[str, jax.Array], dict[str, Any]]:
    """Everyone's sorted slots, and the tables and inputs that mode G's first stage needs (weights excepted)."""
    me = jax.lax.axis_index(call.axis)
    everyone = sorted_by_everyone(p, config, call, expert_ids, routing_weights)
    scalars = tables.kernel_tables(p, config, me, everyone)
    if config.dispatch == "dedup_push":
        scalars |= tables.dedup_runs(p, me, everyone)
    rows, scale = encode_tokens(p, x)
    if p.sequence_parallel:
        if scale is not None:
            scale = _everyone(call, p, scale).reshape(-1)
        if config.dispatch == "xla_ag":
            rows = _everyone(call, p, rows).reshape(-1, *rows.shape[1:])
    if scale is not None:
        scalars["token_scales"] = scale
    inputs: dict[str, Any] = {"x": rows, "sorted_tokens": in_windows(config, everyone.tokens)}
    if p.scale_on_input:
        inputs["sorted_weights"] = in_windows(config, everyone.weights)
    return everyone, scalars, inputs


def in_windows(config: Config, array: jax.Array) -> jax.Array:
    """[D, S] as rows of 128 that a window may begin at, [D * S / 128 + window, 1, 128]."""
    return jnp.pad(array.reshape(-1, 1, LANES), ((0, window_rows(config)), (0, 0), (0, 0)))


def _mode_g(
    p: Problem, config: Config, call: Call, x: jax.Array, expert_ids: jax.Array, routing_weights: jax.Array,
    weights: ExpertWeights, norm: jax.Array | None,
) -> jax.Array:  # fmt: skip
    everyone, scalars, inputs = prepare(p, config, call, x, expert_ids, routing_weights)
    inputs["weights"] = weights
    if norm is not None:
        inputs["norm_weight"] = norm
    delivered = run_stage(p, config, call, "whole", scalars, inputs)
    return finish(p, config, call, everyone, scalars, expert_ids, routing_weights, delivered)


def finish(
    p: Problem, config: Config, call: Call, everyone: tables.Sorted, scalars: dict[str, jax.Array],
    expert_ids: jax.Array, routing_weights: jax.Array, delivered: dict[str, jax.Array],
) -> jax.Array:  # fmt: skip
    """Weighted sums of the delivered rows, on the devices that want them."""
    me = jax.lax.axis_index(call.axis)
    if p.scale_on_input:
        routing_weights = jnp.ones_like(routing_weights)
    arrived, scale = delivered["arrived_done"], delivered.get("arrived_done_scale")
    dtype = jnp.dtype(p.dtype)

    def summed(places: jax.Array, weights: jax.Array, dtype: Any) -> jax.Array:
        return combine(p, config, call, arrived, scale, places, weights, dtype)

    if config.combine == "rs":
        places = tables.slab_places(p, config, me, everyone, scalars)
        by_device = (p.num_devices, p.local_tokens, p.top_k)
        if p.sequence_parallel:
            routing_weights = _everyone(call, p, routing_weights)
        return _reduce_in_parts(p, call, places, routing_weights.reshape(by_device), summed)
    if p.sequence_parallel:
        own_ids, own_weights = expert_ids, routing_weights
    else:
        own_ids, own_weights = (
            jax.lax.dynamic_slice_in_dim(array, me * p.local_tokens, p.local_tokens)
            for array in (expert_ids, routing_weights)
        )
    # In float32 where the sums are rounded once more, to 8 bits on their way.
    sums = jnp.dtype(F32) if not p.sequence_parallel and p.output_gather_type in ROW_LIMITS else dtype
    own = own_sums(p, config, call, arrived, scale, own_ids, everyone.places[me], own_weights, sums)
    return own if p.sequence_parallel else _gathered(p, call, own)


NUM_PARTS = 4
"""Parts in which rows are summed and reduced, so that one part's exchange runs beside the next part's sum."""


def _reduce_in_parts(p: Problem, call: Call, places: jax.Array, weights: jax.Array, summed: Any) -> jax.Array:
    """Partial sums of everyone's tokens, added over the devices; each device's own tokens [T, H], or all of them.

    Args:
      places: i32[D, T, K] in the local slab, -1 for another device's; weights: f32[D, T, K].
    """
    size = ceil_div(p.local_tokens, NUM_PARTS)
    done = []
    for first in range(0, p.local_tokens, size):
        part_places, part_weights = (array[:, first : first + size] for array in (places, weights))
        part = summed(
            part_places.reshape(-1, p.top_k), part_weights.reshape(-1, p.top_k), jnp.dtype(p.combine_type)
        ).reshape(p.num_devices, -1, p.padded_hidden)
        if p.num_devices == 1:
            done.append(part)
        elif p.sequence_parallel:
            done.append(jax.lax.psum_scatter(part, call.axis, tiled=True))
        else:
            done.append(jax.lax.psum(part, call.axis))
    return jnp.concatenate(done, axis=1).reshape(-1, p.padded_hidden).astype(jnp.dtype(p.dtype))


def _gathered(p: Problem, call: Call, own: jax.Array) -> jax.Array:
    """Finished tokens of every device, travelling in the output gather type."""
    if p.num_devices == 1:
        return own
    rows, scales = _everyone(call, p, tile.to_wire(own, p.output_gather_type))
    if scales is not None:
        rows = rows.astype(F32) * scales
    return rows.astype(jnp.dtype(p.dtype)).reshape(p.group_tokens, -1)
