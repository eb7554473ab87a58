"""The text of an optimised, scheduled HLO module: its computations, in the order in which their instructions run."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(
    r"(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|\S+) (?P<operation>[a-z][a-z\-]*)\((?P<rest>.*)", re.DOTALL
)
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|branch_computations|true_computation|false_computation)=(\{[^}]*\}|%[\w.\-]+)"
)
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_BODY = re.compile(r'"body":"([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
      shape: of the result, as written, layouts and memory spaces included.
      operands: names, of values in the same computation.
      called: names of computations by the role in which they are named: "calls", "to_apply", "body", "condition", and "branches" in the
        order of the index that chooses.
      op_name: JAX's path of operations, "" without one.
      frame: number in `Module.frames`, None without one.
      num_trips: of a loop, where the compiler knows; None where it does not.
      estimated_cycles: XLA's own guess, None without one.
      target: of a custom call, otherwise "".
      kernel: of a custom call, a number that is the same where the compiler is given the same kernel; otherwise 0.
    """

    name: str
    operation: str
    shape: str
    operands: tuple[str, ...]
    called: Mapping[str, tuple[str, ...]]
    op_name: str
    frame: int | None
    num_trips: int | None
    estimated_cycles: int | None
    target: str
    kernel: int


@dataclass(frozen=True, slots=True)
class Module:
    """Attributes:
    computations: instructions by computation, in order; those inside of fusions included.
    entry: name of the computation that runs.
    frames: by number the functions that were being run when an instruction was traced, the innermost first: (file, function).
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str
    frames: Mapping[int, tuple[tuple[str, str], ...]] = field(default_factory=dict)

    def likeness(self) -> dict[str, Hashable]:
        """By name of every instruction outside of fusions what it shares with others that are the same to the compiler: operation, shapes with
        layouts and memory spaces, and what is inside of it. The compiler makes one schedule for all of these."""
        shapes = {one.name: one.shape for some in self.computations.values() for one in some}
        found: dict[str, Hashable] = {}
        for some in self.computations.values():
            for one in some:
                inside = one.called.get("calls", ())
                found[one.name] = (
                    one.operation, one.shape, one.kernel, tuple(shapes.get(operand, "") for operand in one.operands),
                    tuple(self._inside(called) for called in inside),
                )  # fmt: skip
        return found

    def _inside(self, computation: str) -> Hashable:
        """What a computation does, whatever its values are called."""
        numbers: dict[str, int] = {}
        made = []
        for one in self.computations.get(computation, ()):
            operands = tuple(numbers.get(operand, -1) for operand in one.operands)
            nested = tuple(self._inside(called) for called in one.called.get("calls", ()))
            made.append((one.operation, one.shape, operands, nested))
            numbers[one.name] = len(numbers)
        return tuple(made)


def parse(text: str) -> Module:
    """The module in a text of `jax.stages.Compiled.as_text`.

    Raises:
      ValueError: it has no entry.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = None
    for piece in re.split(r"\n(?=%|ENTRY )", text)[1:]:
        head = re.match(r"(ENTRY )?%([\w.\-]+) ", piece)
        if head is None:
            continue
        computations[head.group(2)] = tuple(_instructions(piece))
        if head.group(1):
            entry = head.group(2)
    if entry is None:
        raise ValueError("the text has no entry computation")
    return Module(computations, entry, _frames(text))


def _instructions(piece: str) -> Iterator[Instruction]:
    for line in re.split(r"\n(?=\s+(?:ROOT )?%[\w.\-]+ = )", piece)[1:]:
        found = _INSTRUCTION.match(line.strip())
        if found is None:
            continue
        rest = found["rest"]
        operands = rest[: _closing(rest)]
        attributes = rest[len(operands) :]
        called: dict[str, tuple[str, ...]] = {}
        for role, names in _CALLED.findall(attributes):
            role = "branches" if role.endswith(("computations", "_computation")) else role
            # true_computation is written before false_computation, and the index of true is 1.
            made = tuple(re.findall(r"%([\w.\-]+)", names))
            called[role] = made + called.get(role, ()) if role == "branches" else made
        op_name, frame = _OP_NAME.search(attributes), _FRAME.search(attributes)
        body = _BODY.search(attributes)
        trips, cycles, target = _TRIPS.search(attributes), _CYCLES.search(attributes), _TARGET.search(attributes)
        yield Instruction(
            found["name"],
            found["operation"],
            found["shape"],
            tuple(re.findall(r"%([\w.\-]+)", operands)),
            called,
            op_name.group(1) if op_name else "",
            int(frame.group(1)) if frame else None,
            int(trips.group(1)) if trips else None,
            int(cycles.group(1)) if cycles else None,
            target.group(1) if target else "",
            hash(body.group(1)) if body else 0,
        )


def _closing(text: str) -> int:
    """Where the bracket ends that was opened just before."""
    depth = 0
    for place, letter in enumerate(text):
        if letter == "(":
            depth += 1
        elif letter == ")":
            if depth == 0:
                return place
            depth -= 1
    return len(text)


def _table(text: str, name: str) -> list[str]:
    found = re.search(rf"^{name}\n((?:\d+ .*\n)*)", text, re.MULTILINE)
    return found.group(1).splitlines() if found else []


def _frames(text: str) -> dict[int, tuple[tuple[str, str], ...]]:
    files, functions = ({int(line.split(" ", 1)[0]): line.split('"')[1] for line in _table(text, name)} for name in ("FileNames", "FunctionNames"))  # fmt: skip

    def numbers(line: str) -> Sequence[int]:
        return [int(number) for number in re.findall(r"=(\d+)", line)]

    places: dict[int, tuple[str, str]] = {}
    for line in _table(text, "FileLocations"):
        file, function = numbers(line)[:2]
        places[int(line.split(" ", 1)[0])] = files[file], functions[function]
    links = {
        int(line.split(" ", 1)[0]): (numbers(line)[0], numbers(line)[1] if len(numbers(line)) > 1 else 0)
        for line in _table(text, "StackFrames")
    }
    # A frame comes after the one that it was called from. Some versions count parents from one, so that 1 stands for none.
    shift = any(parent >= frame for frame, (_, parent) in links.items())

    def chain(frame: int) -> tuple[tuple[str, str], ...]:
        found: list[tuple[str, str]] = []
        while frame in links:
            place, parent = links[frame]
            found.append(places[place])
            frame = parent - shift
        return tuple(found)

    return {frame: chain(frame) for frame in links}
