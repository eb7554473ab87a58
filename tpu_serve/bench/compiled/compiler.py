"""Compiling a function ahead of time for chips that are not here."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class Compiled:
    """What the compiler said of one program.

    Attributes:
      seconds: to lower and compile, on this machine.
      error: None, or why the compiler refused, in one line; the bytes are then zero and `text` is empty.
      argument_bytes, output_bytes, temporary_bytes, alias_bytes: of one device's HBM.
      text: the optimised HLO.
    """

    seconds: float
    error: str | None
    argument_bytes: int = 0
    output_bytes: int = 0
    temporary_bytes: int = 0
    alias_bytes: int = 0
    text: str = ""


def one_line(error: BaseException, limit: int = 600) -> str:
    """An exception's kind and message on a line of at most `limit` characters, without the stack that JAX appends."""
    message = str(error).split("--------------------")[0]
    message = re.sub(r"\s+", " ", message).strip()
    line = f"{type(error).__name__}: {message}"
    return line if len(line) <= limit else line[: limit - 1] + "…"


def compile_here(function: Callable[..., Any], args: Sequence[Any], **jit_options: Any) -> Compiled:
    """Compiles `function` in this process for the devices that its arguments are placed on.

    Tracing happens on a CPU: kernels must be told their chip and not ask the device for it.

    Args:
      function: of arrays; may contain shard_map. A jitted function is taken as it is.
      args: `jax.ShapeDtypeStruct`s with shardings over devices of `topology.target_devices`.
      jit_options: for `jax.jit`.

    Returns:
      the compiler's figures, or its refusal. A mistake in the function (a TypeError, say) is a refusal too: the caller asks whether
      the program is legal.
    """
    start = time.perf_counter()
    try:
        jitted = function if hasattr(function, "lower") and not jit_options else jax.jit(function, **jit_options)
        program = jitted.lower(*args).compile()
    except Exception as error:
        return Compiled(time.perf_counter() - start, one_line(error))
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    return Compiled(
        seconds,
        None,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.alias_size_in_bytes,
        program.as_text(),
    )


def scoped_vmem_bytes(text: str) -> dict[str, int]:
    """VMEM that each instruction of an optimised HLO text takes for itself, where the compiler notes it.

    Buffers that XLA itself placed in VMEM, as it does with small operands, are not in it.
    """
    found: dict[str, int] = {}
    for name, instruction in _instructions(text):
        used = re.search(r'"used_scoped_memory_configs":\[([^\]]+)\]', instruction)
        sizes = re.findall(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', used.group(1)) if used else []
        if sizes:
            found[name] = max(map(int, sizes))
    return found


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    """(name, text) of the instructions that run for themselves, those inside of fusions left out. An instruction may have many lines."""
    for computation in re.split(r"\n(?=%|ENTRY )", text):
        if computation.startswith("%") and "fused" in computation.split(" ", 1)[0]:
            continue
        for instruction in re.split(r"\n(?=\s+(?:ROOT )?%[\w.\-]+ = )", computation)[1:]:
            name, rest = instruction.strip().removeprefix("ROOT ").split(" = ", 1)
            yield name.removeprefix("%"), rest


_SHAPE = re.compile(r"\b(?:pred|[a-z]+(\d+)\w*)\[(\d[\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")


def _shape_bytes(shape: re.Match[str]) -> int:
    """What an array takes with its innermost dimensions padded to its tile."""
    bits, sizes, order, layout = shape.groups()
    dims = [int(size) for size in sizes.split(",")]
    if order:
        dims = [dims[int(axis)] for axis in reversed(order.split(","))]
    tile = re.match(r"T\(([\d,]+)\)", layout or "")
    if tile:
        sides = [int(side) for side in tile.group(1).split(",")]
        dims = [1] * (len(sides) - len(dims)) + dims
        for place in range(1, len(sides) + 1):
            dims[-place] += -dims[-place] % sides[-place]
    return math.prod(dims) * int(bits or 8) // 8


def array_bytes(text: str) -> int:
    """What the arrays take that a shape of an HLO text names, one or a tuple, scalars left out."""
    return sum(map(_shape_bytes, _SHAPE.finditer(text)))


def copied_bytes(text: str) -> int:
    """Bytes read and written in HBM by the asynchronous copies and slices of an optimised HLO text, each run once.

    They are no kernels: their DMAs stand in the program that calls the kernels and run beside these, or, of arguments, even before the
    program starts. A copy between HBM and VMEM counts once, one within HBM twice.
    """
    total = 0
    for _, rest in _instructions(text):
        made = re.match(r"(\(.*?\)) (?:copy|slice|dynamic-slice)-start\(", rest, re.DOTALL)
        # Both ends; "S" is the memory space, HBM without one, and 2 that of the semaphore.
        ends = [end for end in _SHAPE.finditer(made.group(1)) if "S(2)" not in (end.group(4) or "")] if made else []
        if ends:
            num_in_hbm = sum("S(" not in (end.group(4) or "") for end in (ends[0], ends[-1]))
            total += num_in_hbm * min(map(_shape_bytes, ends))
    return total


def operations(text: str) -> dict[str, str]:
    """The operation ("custom-call", "all-gather", "copy") of each instruction of an optimised HLO text outside of fusions, by its name."""
    found = {
        name: re.match(r"(?:\(.*?\)|\S+) ([a-z][a-z\-]*)\(", rest, re.DOTALL) for name, rest in _instructions(text)
    }
    return {name: operation.group(1) for name, operation in found.items() if operation}
