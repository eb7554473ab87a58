"""What is asked of a grouped product: shapes, types and which of its three products. Plain Python: plans and checks need no jax."""

from __future__ import annotations

from dataclasses import dataclass

from tpu_serve.kernels.fused_moe_v2.problem import ACTIVATIONS, LANES, Activation

ROLES = ("forward", "input_gradient", "weight_gradient")
DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class Problem:
    """Rows sorted by group, a matrix (or two) for each group.

    Letters: R rows, E groups that have matrices here, N_in and N_out sizes of a matrix, Z matrices of a group.

    Attributes:
      rows, experts, n_in, n_out: R, E, N_in, N_out; those of the weights `[E, Z, N_in, N_out]`, whatever the role.
      dtype: of rows and weights, "bfloat16" or "float32".
      out_dtype: of the result; None is `dtype`.
      num_matrices: Z, 1 or 2.
      activation: (forward, Z = 2) what makes one result of the two products; None gives both.
      role: "forward" `lhs @ rhs`; "input_gradient" the sum over Z of `dout @ transposed(rhs)`; "weight_gradient"
        `transposed(lhs) @ dout`, of each group's rows.
      in_place: (not weight_gradient) the result is written into an array that is given, whose other rows stay as they are.
    """

    rows: int
    experts: int
    n_in: int
    n_out: int
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    num_matrices: int = 1
    activation: Activation | None = None
    role: str = "forward"
    in_place: bool = False

    @property
    def out_type(self) -> str:
        return self.out_dtype or self.dtype

    @property
    def contraction(self) -> int:
        """Terms of a sum (not of weight_gradient, where they are rows)."""
        return self.n_out if self.role == "input_gradient" else self.n_in

    @property
    def columns(self) -> int:
        """Columns of the result."""
        return self.n_in if self.role == "input_gradient" else self.n_out

    @property
    def num_inputs(self) -> int:
        """Arrays of rows that enter beside the weights: both products of the forward have the same one."""
        return self.num_matrices if self.role == "input_gradient" else 1

    @property
    def num_results(self) -> int:
        """Arrays of rows that come out (not of weight_gradient)."""
        return self.num_matrices if self.role == "forward" and self.activation is None else 1


def malformed(problem: Problem) -> str | None:
    """Why no chip could run this, or None."""
    p = problem
    for name in ("rows", "experts", "n_in", "n_out"):
        if getattr(p, name) < 1:
            return f"{name} must be at least 1, got {getattr(p, name)}"
    for name in ("n_in", "n_out"):
        if getattr(p, name) % LANES:
            return f"{name} {getattr(p, name)} is not a multiple of {LANES}; fill the weights up with zeros when they are loaded"
    for name, dtype in (("rows and weights", p.dtype), ("the result", p.out_type)):
        if dtype not in DTYPES:
            return f"{name} are of type {dtype!r}; known are {', '.join(DTYPES)}"
    if p.role not in ROLES:
        return f"role {p.role!r} is unknown; known are {', '.join(ROLES)}"
    if p.num_matrices not in (1, 2):
        return f"num_matrices must be 1 or 2, got {p.num_matrices}"
    if p.activation is not None and (p.num_matrices != 2 or p.role != "forward"):
        return "an activation is of the forward products of two matrices"
    if p.activation is not None and p.activation.name not in ACTIVATIONS:
        return f"activation {p.activation.name!r} is unknown; known are {', '.join(ACTIVATIONS)}"
    if p.in_place and p.role == "weight_gradient":
        return "weight_gradient writes all of its result and is not in place"
    return None
