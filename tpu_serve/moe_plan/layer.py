"""What a plan is asked about: a layer, and what the user wants of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tpu_serve.kernels.fused_moe_v2.cases import Workload
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.kernels.fused_moe_v2.problem import Activation, PostNorm, Problem


@dataclass(frozen=True, slots=True)
class MoELayer:
    """A mixture-of-experts layer, whatever runs it. Names and meanings as in `Problem`.

    Attributes:
      format: name in `fused_moe_v2.formats.FORMATS`, of the weights as they are stored.
      dtype: of the tokens.
      shared_intermediate: inner size of the expert that every token goes through beside the routed ones; 0 for none.
    """

    num_experts: int
    top_k: int
    hidden: int
    intermediate: int
    format: str = "bfloat16"
    dtype: str = "bfloat16"
    activation: Activation = field(default_factory=Activation)
    gate_up_bias: bool = False
    down_bias: bool = False
    post_norm: PostNorm | None = None
    scale_on_input: bool = False
    shared_intermediate: int = 0

    @classmethod
    def of_workload(cls, workload: Workload, format: str) -> MoELayer:
        """The layer of a public model."""
        return cls(
            workload.num_experts, workload.top_k, workload.hidden, workload.intermediate, format,
            "float32" if format == "float32" else "bfloat16", activation=workload.activation, gate_up_bias=workload.biases, down_bias=workload.biases,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Policy:
    """How the layer is to be run.

    Attributes:
      backend: "auto", or one of `path.PATHS`, which then runs at every token count or the plan is refused.
      sequence_parallel: each device has its own tokens before and after.
      dispatch_dtype, combine_dtype, output_gather_dtype: of the kernel, see `Problem`.
      tiles: run the kernel with this config wherever it is legal, whatever tables say; for experiments.
      unavailable: reasons by path why it cannot run, whatever the token count.
    """

    backend: str = "auto"
    sequence_parallel: bool = False
    dispatch_dtype: str | None = None
    combine_dtype: str | None = None
    output_gather_dtype: str | None = None
    tiles: Config | None = None
    unavailable: Mapping[str, str] = field(default_factory=dict)


def problem_of(layer: MoELayer, num_tokens: int, num_devices: int, policy: Policy) -> Problem:
    """What the fused kernel is asked for a step of so many tokens."""
    return Problem(
        num_tokens=num_tokens,
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        num_devices=num_devices,
        format=layer.format,
        dtype=layer.dtype,
        activation=layer.activation,
        gate_up_bias=layer.gate_up_bias,
        down_bias=layer.down_bias,
        post_norm=layer.post_norm,
        scale_on_input=layer.scale_on_input,
        sequence_parallel=policy.sequence_parallel,
        dispatch_dtype=policy.dispatch_dtype,
        combine_dtype=policy.combine_dtype,
        output_gather_dtype=policy.output_gather_dtype,
    )


def kernel_shapes(layer: MoELayer, num_devices: int) -> dict[str, tuple[int, ...]]:
    """Shapes over all devices of the arrays of an `ExpertWeights` that suit the fused kernel, by field; those that the layer lacks are left out.

    The loader has to deliver these for the kernel to run. E is filled up to a multiple of the devices, H to one of 128, I to one of 128 or 256,
    all with zeros behind the true sizes. Scales have the filled-up H and I as columns, and as many rows as the filled-up contraction has
    blocks, in `gate_up_scale` filled up once more to a multiple of 8 unless it is one row. What lies in the filling of scales does not matter as
    long as it is finite: the values that it multiplies are zeros. Types are the format's for values, and float32 for scales and biases.

    XLA's backends read weights of these shapes as well, and weights without any filling: they need as many rows of scales as H and I as they
    lie there have blocks, and take no notice of more.
    """
    p = problem_of(layer, 1, num_devices, Policy())
    experts, hidden, inner = p.local_experts * p.num_devices, p.padded_hidden, p.padded_intermediate
    shapes: dict[str, tuple[int, ...]] = {"gate_up": (experts, 2, hidden, inner), "down": (experts, inner, hidden)}
    if p.weights.scaled:
        shapes["gate_up_scale"] = (experts, 2, p.weights.scale_rows(hidden), inner)
        shapes["down_scale"] = (experts, p.weights.num_blocks(inner), 1, hidden)
    if p.gate_up_bias:
        shapes["gate_up_bias"] = (experts, 2, 1, inner)
    if p.down_bias:
        shapes["down_bias"] = (experts, 1, hidden)
    return shapes
