"""What a compiled program sends between devices and copies within one, read from its optimised HLO text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction of interest, with how often it runs.

    Attributes:
      name: in the text.
      operation: one of `COLLECTIVES`, "copy" or "transpose"; what is asynchronous goes by the plain name.
      arrays: types and shapes on one device of what it makes, as in `bf16[64,2048]`.
      num_bytes: of those on one device, without the padding of tiles.
      num_devices: that take part together; 1 for a copy.
      scope: the functions that it comes from, from the outermost in, and JAX's primitive; those without a name of their own left out.
      is_conditional: it stands in a branch and runs only when that is taken.
      num_loops: around it. How often they turn is not in the text.
      is_asynchronous: other work may run between its start and its end.
    """

    name: str
    operation: str
    arrays: tuple[str, ...]
    num_bytes: int
    num_devices: int
    scope: str
    is_conditional: bool
    num_loops: int
    is_asynchronous: bool

    @property
    def always_runs(self) -> bool:
        """Once in every execution."""
        return not self.is_conditional and not self.num_loops

    def __str__(self) -> str:
        when = ["asynchronous"] * self.is_asynchronous
        when += ["in a branch"] * self.is_conditional + [f"in {self.num_loops} loops"] * bool(self.num_loops)
        return (
            f"{self.operation} {' '.join(self.arrays)} of {self.num_devices} in {self.scope} {' '.join(when)}".rstrip()
        )


def collectives(text: str) -> list[Instruction]:
    """All collectives of a program, wherever they stand: in branches, loops, fusions."""
    return [one for one in _instructions(text) if one.operation in COLLECTIVES]


def copies(text: str, at_least_bytes: int) -> list[Instruction]:
    """The copies and transpositions of arrays of at least this size, those inside of other fusions left out: they are no passes of their own.

    A prefetch into VMEM is a copy as well; its result lies in another memory space and is not counted.
    """
    found = (one for one in _instructions(text) if one.operation in ("copy", "transpose"))
    return [one for one in found if one.num_bytes >= at_least_bytes]


_LINE = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([a-z][a-z\-]*)\(")
_CALLED = re.compile(
    r"(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=\{?((?:%[\w.\-]+(?:, )?)+)"
)
_ARRAY = re.compile(r"\b(?:pred|[a-z]+\d+\w*)\[[\d,]*\](?:\{[^}]*\})?")


def _instructions(text: str) -> Iterator[Instruction]:
    computations, entry = _computations(text)
    todo = [(entry, False, 0, False)]
    while todo:
        name, is_conditional, num_loops, is_asynchronous = todo.pop()
        in_fusion = "fused" in name or "fusion" in name
        for line in computations.get(name, ()):
            made = _LINE.match(line)
            if made is None:
                continue
            own, result, operation = made.groups()
            for kind, names in _CALLED.findall(line):
                if kind == "to_apply" and operation not in ("call", "call-start"):
                    continue  # how a reduction adds
                branches = kind.endswith(("computation", "computations"))
                loops = num_loops + (kind in ("body", "condition"))
                apart = is_asynchronous or operation in ("call-start", "async-start")  # of a TPU: on its SparseCore
                for called in re.findall(r"%([\w.\-]+)", names):
                    todo.append((called, is_conditional or branches, loops, apart))
            plain = operation.removesuffix("-start")
            if plain == "copy" and (in_fusion or "S(" in _arrays(result)[-1]):
                continue
            if plain == "transpose" and in_fusion:
                continue
            if plain not in (*COLLECTIVES, "copy", "transpose"):
                continue
            if name.startswith("all-reduce-scatter"):  # the TPU compiler's form: an all-reduce of which a slice is kept
                plain = "reduce-scatter"
                result = next(
                    (kept.group(2) for kept in map(_LINE.match, reversed(computations[name])) if kept), result
                )
            arrays = _results(plain, operation, _arrays(result))
            yield Instruction(
                own,
                plain,
                tuple(array.split("{")[0] for array in arrays),
                sum(map(_num_bytes, arrays)),
                _num_devices(line) if plain in COLLECTIVES else 1,
                _scope(line),
                is_conditional,
                num_loops,
                is_asynchronous or operation.endswith("-start"),
            )


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the one that begins. An instruction of many lines has its name in the first."""
    found: dict[str, list[str]] = {}
    entry, lines = "", None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head is not None and not line.startswith(" "):
            lines = found.setdefault(head.group(2), [])
            entry = head.group(2) if head.group(1) else entry
        elif lines is not None:
            if line.startswith("  ") and _LINE.match(line) is None and lines:
                lines[-1] += line
            else:
                lines.append(line)
    return found, entry


def _arrays(result: str) -> list[str]:
    return _ARRAY.findall(result) or [result]


def _results(plain: str, operation: str, arrays: list[str]) -> list[str]:
    """What comes out: the start of an asynchronous operation names what goes in as well, and words that count."""
    if not operation.endswith("-start") or plain == "all-reduce":
        return arrays
    real = [array for array in arrays if "[]" not in array]
    return real[len(real) // 2 :] or arrays


def _num_bytes(array: str) -> int:
    shape = re.match(r"(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]", array)
    if shape is None:
        return 0
    bits, sizes = shape.groups()
    return math.prod(map(int, filter(None, sizes.split(",")))) * int(bits or 8) // 8


def _num_devices(line: str) -> int:
    """Devices of the first group: they are written in full, as an iota, or as axes of a mesh."""
    if groups := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return len(groups.group(1).split(","))
    if iota := re.search(r"replica_groups=\[([\d,]+)\]<=", line):
        return int(iota.group(1).split(",")[-1])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", line):
        sizes = dict(re.findall(r"'([^']+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", mesh.group(2)))
    if pairs := re.search(r"source_target_pairs=\{(.*?)\}\}", line):
        return len(pairs.group(1).split("},{"))
    return 0


def _scope(line: str) -> str:
    name = re.search(r'op_name="([^"]*)"', line)
    if name is None:
        return ""
    parts = re.sub(r"<[^>]*>", "", name.group(1)).split("/")
    anonymous = re.compile(r"jit\(.*\)$|closed_call|branch_\d+_fun|body|shard_map|vmap\(\)")
    return "/".join(part for part in parts if not anonymous.match(part))
