"""Compiling a function ahead of time for chips that are not here."""

from __future__ import annotations

import re
import time
from collections import Counter
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


def operation_counts(text: str) -> Counter[str]:
    """How often each operation ("custom-call", "all-gather", "copy") stands in an optimised HLO text, outside of fusions."""
    operations = (re.match(r"(?:\(.*?\)|\S+) ([a-z][a-z\-]*)\(", rest, re.DOTALL) for _, rest in _instructions(text))
    return Counter(operation.group(1) for operation in operations if operation)
