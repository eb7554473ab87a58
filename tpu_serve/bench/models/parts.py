"""Which part of a model an instruction belongs to, from the functions that were being run when it was traced."""

from __future__ import annotations

from collections.abc import Mapping

from tpu_serve.bench.models.hlo import Instruction, Module

MOE, ATTENTION, RECURRENT, MLP, OUTPUT, REST = PARTS = (
    "MoE", "attention", "recurrent layers", "dense MLP", "head and sampling", "rest"
)  # fmt: skip
"""Router and experts; projections, rotation, cache and attention; the same of recurrent layers; what every token passes beside experts; logits
and what is sampled from them; embedding, norms and residuals between the layers' parts, and what the host sent."""

_FILES = {
    "/layers/moe/": MOE,
    "/kernels/fused_moe": MOE,
    "/kernels/moe_combine": MOE,
    "/kernels/grouped_matmul": MOE,
    "/layers/attention": ATTENTION,
    "/layers/gated_attention": ATTENTION,
    "/kernels/ragged_paged_attention": ATTENTION,
    "/layers/delta_rule": RECURRENT,
    "/layers/convolution": RECURRENT,
    "/layers/gated_delta_net": RECURRENT,
    "/kernels/gated_delta_rule": RECURRENT,
    "/layers/shared_expert": MLP,
    "/layers/sampler": OUTPUT,
    "/layers/logit_edits": OUTPUT,
    "/layers/logprobs": OUTPUT,
}
_FUNCTIONS = {
    "mixture": MOE, "route": MOE, "attention": ATTENTION, "attend": ATTENTION, "_attend": ATTENTION, "mixer": ATTENTION,
    "gated_mlp": MLP, "logits": OUTPUT, "project_logits": OUTPUT,
}  # fmt: skip
_KERNELS = {"fused_moe": MOE, "moe_combine": MOE, "grouped_": MOE, "ragged_paged": ATTENTION, "gated_delta": RECURRENT}


def part_of_frames(frames: tuple[tuple[str, str], ...]) -> str | None:
    """Of the innermost function that says it; None without functions, `REST` where none does."""
    for file, function in frames:
        for piece, part in _FILES.items():
            if piece in file:
                return part
        for name in reversed(function.split(".")):
            if name in _FUNCTIONS:
                return _FUNCTIONS[name]
    return REST if frames else None


def parts_of(module: Module, computation: str, around: str = REST) -> Mapping[str, str]:
    """The part of every instruction of a computation, by name.

    What has no functions of its own, such as the compiler's copies, belongs to what uses its result first, else to what it is made from.

    Args:
      around: the part that the computation is called from.
    """
    instructions = module.computations[computation]
    found = {one.name: part for one in instructions if (part := _own(module, one)) is not None}
    known = frozenset(found)
    for one in reversed(instructions):  # so that of several users the first is the last to speak
        for operand in one.operands:
            if one.name in found and operand not in known:
                found[operand] = found[one.name]
    for one in instructions:
        if one.name not in found:
            found[one.name] = next((found[operand] for operand in one.operands if operand in found), around)
    return found


def _own(module: Module, one: Instruction) -> str | None:
    if one.operation in ("parameter", "constant", "tuple", "get-tuple-element"):
        return None
    for prefix, part in _KERNELS.items():
        if one.name.startswith(prefix):
            return part
    return None if one.frame is None else part_of_frames(module.frames.get(one.frame, ()))
