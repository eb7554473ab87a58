"""The text of a compiled schedule, parsed: bundles of instructions, one bundle a cycle.

The text is the compiler's pass `packed-bundles-post-ra`. It still holds the empty bundles in which the core waits for results of
its units; the later `final_bundles` has them removed and says nothing about time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_BUNDLE = re.compile(r"^[ \t]*(0x[0-9a-f]+|0)[ \t]+(?:[A-Z]{2})?[ \t]*:[ \t]*(>*)[ \t]*\{", re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_KEPT_COMMENT = re.compile(
    r"\b([a-z]+-to-[a-z]+(?= \*/)|kDivAndRem|kRem|kDiv|TraceMe(?:Start|End)\([^)]*\)"
    r"|BoundsCheck \d+ [^@]*? for %\d+ = [\w.]+|Semaphore \([^)]*\) has a nonzero value)"
)
_INSTRUCTION = re.compile(r"(?:(%\w+)\s*=\s*)?([a-z][\w.\-]*)\s*(.*)$", re.DOTALL)
_ATTRIBUTE = re.compile(r"\[(?:thread:\$\d+|resolvable:\$\w+)\]\s*")
_GUARD = re.compile(r"\(\s*(!?)(%p\w+)\s*(?:,\s*(%\w+)\s*)?\)\s*,?\s*")
_OPERAND = re.compile(
    r"inlined_call_operand\.\s*(<no memory space>|\w+)?.*?shape: (\w+)\[([\d,]*)\], index: (-?\d+)", re.DOTALL
)
# Instructions of the vector half that the scalar program depends on.
_SCALAR_VECTOR = ("vsync", "vwait", "vdelay", "vpop.sfrf", "vtrace")


class UnsupportedSchedule(Exception):
    """The text has a form that this reader does not know; it says which."""


@dataclass(slots=True)
class Instruction:
    """One slot of a bundle.

    Attributes:
      name: operation with its suffixes, for example "sadd.s32".
      result: the value it defines, for example "%s12_s3" (value 12 in scalar register 3), or None.
      operands: as written, without the guard. Empty for the vector half, whose operands nobody needs.
      guard, negated: the predicate that lets it happen, if any.
      otherwise: the value the result keeps when the guard forbids, if any.
      note: what the compiler's comment adds: "hbm-to-vmem", "kRem", a trace mark, what is checked.
      target: of a branch, the bundle it goes to.
      scalar: whether the scalar program depends on it.
      spill: a vector register written to or read back from a spill slot.
    """

    name: str
    result: str | None = None
    operands: tuple[str, ...] = ()
    guard: str | None = None
    negated: bool = False
    otherwise: str | None = None
    note: str = ""
    target: int | None = None
    scalar: bool = True
    spill: bool = False


@dataclass(frozen=True, slots=True)
class Operand:
    """A kernel's operand: where it lies ("hbm", "vmem", "smem" or "value"), its type and shape as in "s32", (4, 8).

    A fusion with dozens of operands gets them in a table in SMEM instead, a word each: the table's index is -1.
    """

    index: int
    space: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class Schedule:
    """A kernel's program: `bundles[address]` are the instructions of a cycle, `operands` its operands by value name."""

    bundles: list[list[Instruction]] = field(default_factory=list)
    operands: dict[str, Operand] = field(default_factory=dict)


def split_operands(text: str) -> tuple[str, ...]:
    """Parts between commas that stand outside of brackets."""
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        if character in "[(":
            depth += 1
        elif character in "])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:position].strip())
            start = position + 1
    parts.append(text[start:].strip())
    return tuple(part for part in parts if part)


def _keep_note(comment: re.Match[str]) -> str:
    found = _KEPT_COMMENT.search(comment.group())
    return f" @{found.group(1)}@ " if found else ""


def parse_instruction(text: str) -> Instruction | None:
    """One slot's text, its comments already reduced to notes between @ signs; None if it holds no instruction."""
    note = ""
    if "@" in text:
        before, note, after = text.split("@", 2)
        text = before + after
    match = _INSTRUCTION.match(text.strip())
    if match is None:
        return None
    result, name, rest = match.groups()
    if name.startswith("v") and not name.startswith(_SCALAR_VECTOR) and not (result or "").startswith(("%s", "%p")):
        return Instruction(name, result, scalar=False, spill=name[:3] in ("vld", "vst") and "_spill" in rest)
    made = Instruction(name, result, note=note)
    if name.startswith("inlined_call_operand"):
        return made
    rest = _ATTRIBUTE.sub("", rest)
    guard = _GUARD.search(rest)
    if guard is not None:
        made.negated, made.guard, made.otherwise = bool(guard.group(1)), guard.group(2), guard.group(3)
        rest = rest[: guard.start()] + rest[guard.end() :]
    if name.startswith("sbr"):
        target = re.search(r"target bundleno = (\d+)", rest)
        if target is None:
            raise UnsupportedSchedule(f"a branch without a target: {text[:100]!r}")
        made.target = int(target.group(1))
    elif name == "sst":
        stored = re.match(r"(\[.*\])[,\s]+(\S+)\s*$", rest, re.DOTALL)
        if stored is None:
            raise UnsupportedSchedule(f"a store of an unknown form: {text[:100]!r}")
        made.operands = stored.groups()
    else:
        made.operands = split_operands(rest.strip())
    return made


def _parse_operand(name: str, text: str) -> tuple[str, Operand]:
    match = _OPERAND.search(text)
    if match is None:
        raise UnsupportedSchedule(f"an operand of an unknown form: {text[:100]!r}")
    space, dtype, shape, index = match.groups()
    sizes = tuple(int(size) for size in shape.split(",") if size)
    return name, Operand(int(index), "value" if space in (None, "<no memory space>") else space, dtype, sizes)


def parse(text: str) -> Schedule:
    """The schedule in a dump of the compiler.

    Raises:
      UnsupportedSchedule: the text is not such a dump, or has an instruction in a form this reader does not know.
    """
    schedule = Schedule()
    text = _COMMENT.sub(_keep_note, text)
    heads = list(_BUNDLE.finditer(text))
    if not heads:
        raise UnsupportedSchedule("no bundles in the text")
    ends = [head.start() for head in heads[1:]] + [len(text)]
    for address, (head, end) in enumerate(zip(heads, ends, strict=True)):
        if int(head.group(1), 16) != address:
            raise UnsupportedSchedule(f"bundle {head.group(1)} stands where {address:#x} is expected")
        body = text[head.end() : end]
        bundle = []
        for slot in body[: body.rfind("}")].split(";;"):
            instruction = parse_instruction(slot) if slot.strip() else None
            if instruction is None:
                continue
            if instruction.result and instruction.name.startswith("inlined_call_operand"):
                name, operand = _parse_operand(instruction.result, slot)
                schedule.operands[name] = operand
            bundle.append(instruction)
        schedule.bundles.append(bundle)
    return schedule
