"""Training recipes: a differentiable mixture-of-experts layer of one device, and which of its parts go with which surroundings.

Letters: T tokens, K choices of a token, E experts, H hidden, I intermediate, R rows in order of expert. README.md tells how to use a recipe.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import cast

import jax
import jax.numpy as jnp

from tpu_serve.device.batch import pytree
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.fused_moe_v2.problem import Activation, round_up
from tpu_serve.kernels.fused_moe_v2.tile import activate
from tpu_serve.kernels.grouped_matmul.op import grouped_matmul
from tpu_serve.kernels.grouped_matmul.split import grouped_matmul_split
from tpu_serve.kernels.moe_combine.op import BACKENDS, Backend, Choice, combine, permute
from tpu_serve.layers.moe.grouped import ROW_MULTIPLE
from tpu_serve.layers.moe.routing import Routing
from tpu_serve.option import ConfigError, check_at_least, check_choices, check_types, option

logger = logging.getLogger(__name__)

SILU = Activation("silu")


@dataclass(frozen=True)
class Recipe:
    """What computes the layer, then what surrounds it. Values that cannot be are refused here, those that do not go together by `check`."""

    combine_kernel: str = option("xla", "what adds up the rows of a token, weighted", choices=BACKENDS)
    permute_kernel: str = option("xla", "what copies tokens into the order of experts", choices=BACKENDS)
    weight_layout: str = option(
        "fused", "of wi: 'fused' [E, H, 2I], or 'split' [2, E, H/2, 2I] in two halves", choices=("fused", "split")
    )
    sparse_matmul: bool = option(True, "a row meets the matrix of its own expert only, in grouped products")
    grouped_matmul_version: int = option(
        2, "of grouped products; version 2 can begin at any group and write into a given array"
    )
    ring_of_experts: bool = option(False, "tokens go around a ring of devices that hold the experts")
    ragged_sort: bool = option(False, "rows are sorted by kernels of their own")
    direct_token_gather: bool = option(True, "rows are copied straight from the tokens, which are not repeated first")
    prefused_gate_up: bool = option(True, "gate and up are one array, wi")
    weights_on_input: bool = option(False, "routing weights multiply what goes into an expert, not what comes out")
    quantization: str = option("", "type of quantised activations and weights, 'fp8' or 'int8'; '' for none")
    num_embedding_chunks: int = option(0, "pieces of H that are gathered and multiplied one by one; 0 is the whole")
    expert_parallel_size: int = option(1, "devices among which the experts are divided for computing")
    fsdp_size: int = option(1, "devices among which weights are divided for storage; each gathers what it needs")
    context_parallel_size: int = option(1, "devices among which sequences are divided")
    shard_experts_on_fsdp: bool = option(False, "the stored weights of experts are divided along E")
    serving_attention: bool = option(False, "the model runs with the paged attention of an inference server")
    num_experts: int | None = option(None, "E, on all devices together; `layer` takes it from the weights")
    hidden: int | None = option(None, "H; `layer` takes it from the weights")

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        check_at_least(self, 0, "num_embedding_chunks")
        sizes = ("expert_parallel_size", "fsdp_size", "context_parallel_size", "num_experts", "hidden")
        check_at_least(self, 1, *sizes)
        if self.quantization not in ("", "fp8", "int8"):
            raise ConfigError(f"--quantization must be 'fp8', 'int8' or '', got {self.quantization!r}.")
        if self.grouped_matmul_version not in (1, 2):
            raise ConfigError(f"--grouped-matmul-version must be 1 or 2, got {self.grouped_matmul_version}.")

    @property
    def num_shards(self) -> int:
        """Devices among which an expert's stored weights are divided."""
        return self.fsdp_size * self.context_parallel_size


@dataclass(frozen=True)
class Rule:
    """`holds` must be true where `applies` is. The message has the recipe's fields filled in, and says what to change."""

    applies: Callable[[Recipe], bool]
    holds: Callable[[Recipe], bool]
    message: str


def _always(recipe: Recipe) -> bool:
    return True


def _is_split(recipe: Recipe) -> bool:
    return recipe.weight_layout == "split"


def _only(value: bool | int | str, name: str, because: str, then: str = "") -> Rule:
    """The one value of a field that there is here, whatever the kernels: another one would be ignored, or computed wrongly."""
    message = f"{name} is {{{name}!r}}, but {because}. Set {name} to {value!r}{then}."
    return Rule(_always, lambda recipe: getattr(recipe, name) == value, message)


def _split_only(value: bool | int | str, name: str, because: str) -> Rule:
    """The one value of a field that goes with the split layout."""
    return replace(_only(value, name, because, " or weight_layout to 'fused'"), applies=_is_split)


RULES = (
    _only(True, "sparse_matmul", "permute and combine serve grouped products, and the layer has no others"),
    _only(
        2, "grouped_matmul_version", "grouped products here are version 2, without which halves of wi cannot be chained"
    ),
    _only(
        False,
        "ring_of_experts",
        "the layer runs on one device and passes no tokens on",
        ", and with several devices add up what each makes of its own experts",
    ),
    _only(False, "ragged_sort", "permute and combine find rows by one stable order, which they make themselves"),
    _only(True, "direct_token_gather", "permute never repeats the tokens first"),
    _only(
        True,
        "prefused_gate_up",
        "both layouts have gate and up in one array",
        ", with gate and up joined along their last axis, gate first",
    ),
    _only(
        False,
        "weights_on_input",
        "the layer weights what comes out of the experts",
        "; with one expert for each token, multiply the tokens before the layer and route with weights of 1",
    ),
    _only(0, "num_embedding_chunks", "the layer takes all columns of the tokens at once"),
    _split_only("", "quantization", "halves of wi are multiplied unquantised only"),
    _split_only(
        1,
        "expert_parallel_size",
        "halves of wi, each divided along E, would give a device other experts than its wo has",
    ),
    _split_only(
        False,
        "serving_attention",
        "inference has its own layout of experts, to which the loader converts a split checkpoint",
    ),
    Rule(
        lambda recipe: _is_split(recipe) and recipe.num_shards > 1,
        lambda recipe: recipe.shard_experts_on_fsdp,
        "shard_experts_on_fsdp is {shard_experts_on_fsdp} with fsdp_size {fsdp_size} and context_parallel_size {context_parallel_size}, but "
        "the split layout is for gathering whole experts in two halves. Set shard_experts_on_fsdp to True or weight_layout to 'fused'.",
    ),
    Rule(
        lambda recipe: _is_split(recipe) and recipe.num_experts is not None,
        lambda recipe: (recipe.num_experts or 0) % 2 == 0,
        "num_experts is {num_experts}, an odd number, but the split layout halves the experts. Set weight_layout to 'fused'.",
    ),
    Rule(
        lambda recipe: _is_split(recipe) and recipe.hidden is not None,
        lambda recipe: (recipe.hidden or 0) % 2 == 0,
        "hidden is {hidden}, an odd number, but the split layout halves it. Set weight_layout to 'fused'.",
    ),
    Rule(
        lambda recipe: recipe.shard_experts_on_fsdp and recipe.num_experts is not None,
        lambda recipe: recipe.num_shards <= (recipe.num_experts or 0),
        "fsdp_size {fsdp_size} times context_parallel_size {context_parallel_size} is more than num_experts {num_experts}, so that a device "
        "would store no expert. Make fsdp_size smaller, or set shard_experts_on_fsdp to False and weight_layout to 'fused'.",
    ),
)


def check(recipe: Recipe) -> None:
    """Refuses what would fail or be ignored. Rules about E and H are left out while the recipe does not name them.

    No rule keeps the combine kernel from expert parallelism or from fewer rows than choices, as elsewhere: here a choice of -1 has no row.
    README.md lists such limits, and which of them are kept.

    Raises:
      ConfigError: the message of every rule that is broken, one a line.
    """
    broken = [rule.message for rule in RULES if rule.applies(recipe) and not rule.holds(recipe)]
    if broken:
        raise ConfigError("\n".join(message.format(**asdict(recipe)) for message in broken))


def effective(recipe: Recipe) -> Recipe:
    """The recipe as it can run: of quantised tokens the permute kernel ("tc") is replaced by "xla", which the log says.

    The kernel moves rows of 8 bits, but its backward pass is a sum of them, and those have none.

    Raises:
      ConfigError: as `check`.
    """
    check(recipe)
    if recipe.quantization and recipe.permute_kernel == "tc":
        _log_downgrade(recipe.quantization)
        return replace(recipe, permute_kernel="xla")
    return recipe


@functools.cache
def _log_downgrade(quantization: str) -> None:
    """Says so once for each type."""
    logger.warning("MoE recipe: permute_kernel 'tc' becomes 'xla': %s activations cannot be added up", quantization)


PRESETS: Mapping[str, Recipe] = MappingProxyType(
    {
        "combine": Recipe(combine_kernel="tc"),
        "combine-permute-split": Recipe(
            combine_kernel="tc", permute_kernel="tc", weight_layout="split", shard_experts_on_fsdp=True
        ),
    }
)
"""Recipes to start from, with `dataclasses.replace` for the surroundings. "combine" goes with checkpoints as they are and FSDP of any size;
"combine-permute-split" needs a wi in the split layout, and at least as many experts as there are shards."""


@pytree
@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The experts' weights.

    Attributes:
      wi: in the recipe's layout, gate columns first. A split wi may also be a pair of arrays [E, H/2, 2I], as two gathers leave it.
      wo: [E, I, H].
    """

    wi: jax.Array | tuple[jax.Array, jax.Array]
    wo: jax.Array


def layer(
    recipe: Recipe,
    context: Context,
    x: jax.Array,
    routing: Routing,
    weights: LayerWeights,
    activation: Activation = SILU,
) -> jax.Array:
    """y[t] = sum over k of routing.weights[t, k] * down_e(activation(gate_e(x[t]), up_e(x[t]))), e = routing.expert_ids[t, k].

    Differentiable in x, routing.weights, weights.wi and weights.wo. For one device: with experts on several, each calls it with its own, ids
    counted from its first one and -1 for all others, and the results are to be added.

    Gate and up are one product [R, 2I] in float32, kept for the backward pass, which the activation reads afterwards. `grouped_gate_up` would
    save that, but takes gate and up apart, and a wi of either layout would be copied whole at every call.

    Args:
      x: [T, H], bfloat16 or float32.
      routing: id -1 is no expert.
      weights: in the type of x; E and H are theirs.

    Returns:
      [T, H] in the type of x. Rows [R, H] are rounded to it between the stages, sums are made in float32.

    Raises:
      ConfigError: as `check`, with E and H of the weights; the recipe names other ones, or quantised products, which this layer has not.
      ValueError: shapes or types do not belong together.
    """
    num_experts, hidden = _sizes(recipe, weights)
    for name, given, found in (
        ("num_experts", recipe.num_experts, num_experts * recipe.expert_parallel_size),
        ("hidden", recipe.hidden, hidden),
    ):
        if given not in (None, found):
            raise ConfigError(f"{name} is {given} in the recipe and {found} by the weights. Set {name} to {found}.")
    recipe = effective(replace(recipe, num_experts=num_experts * recipe.expert_parallel_size, hidden=hidden))
    if recipe.quantization:
        raise ConfigError(
            f"quantization is {recipe.quantization}, but this layer's products are of bfloat16 or float32. Set quantization to ''."
        )
    if x.ndim != 2 or x.shape[1] != hidden or x.dtype != weights.wo.dtype:
        raise ValueError(f"x must be {weights.wo.dtype}[T, {hidden}], got {x.dtype}{list(x.shape)}")
    ids = routing.expert_ids
    sizes = jnp.sum(ids[..., None] == jnp.arange(num_experts, dtype=ids.dtype), axis=(0, 1), dtype=jnp.int32)
    moves, sums = (
        Choice(cast(Backend, name), context, num_experts) for name in (recipe.permute_kernel, recipe.combine_kernel)
    )
    rows = permute(x, ids, moves, round_up(ids.size, ROW_MULTIPLE))
    if isinstance(weights.wi, tuple):
        both = grouped_matmul_split(rows, weights.wi, sizes, context, out_dtype="float32")
    else:
        # Halves that lie one after the other are whole matrices already.
        matrices = weights.wi.reshape(num_experts, hidden, -1)
        both = grouped_matmul(rows, matrices, sizes, context, out_dtype="float32")
    gate, up = jnp.split(both, 2, axis=1)
    inner = activate(gate, up, activation).astype(x.dtype)
    return combine(grouped_matmul(inner, weights.wo, sizes, context), ids, routing.weights, sums)


def _sizes(recipe: Recipe, weights: LayerWeights) -> tuple[int, int]:
    """E and H of weights that are in the recipe's layout, or ValueError."""
    if weights.wo.ndim != 3:
        raise ValueError(f"wo must be [E, I, H], got {list(weights.wo.shape)}")
    num_experts, inner, hidden = weights.wo.shape
    parts = weights.wi if isinstance(weights.wi, tuple) else (weights.wi,)
    half, matrix = (num_experts, hidden // 2, 2 * inner), (num_experts, hidden, 2 * inner)
    known = {(matrix,)} if recipe.weight_layout == "fused" else {((2, *half),), (half, half)}
    if tuple(part.shape for part in parts) not in known or any(part.dtype != weights.wo.dtype for part in parts):
        raise ValueError(
            f"wi of the {recipe.weight_layout} layout must be {weights.wo.dtype} "
            f"{' or '.join(sorted(' and '.join(map(str, map(list, shapes))) for shapes in known))} "
            f"with this wo, got {' and '.join(f'{part.dtype}{list(part.shape)}' for part in parts)}"
        )
    return num_experts, hidden
