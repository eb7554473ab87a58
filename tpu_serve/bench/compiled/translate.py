"""Scalar instructions as Python statements.

A schedule can take millions of steps, so its blocks are turned into Python functions once instead of being interpreted. In the text
R is the list of values by number, S is scalar memory, E the execution, t the time at the start of the block.
"""

from __future__ import annotations

import re

import numpy as np

from tpu_serve.bench.compiled.memory import WORD, Memory
from tpu_serve.bench.compiled.schedule import Instruction, Schedule, UnsupportedSchedule

_ARITHMETIC = {
    "sadd": "({a}+{b})&{w}", "ssub": "({a}-{b})&{w}", "smul": "({a}*{b})&{w}", "smulhi": "{a}*{b}>>32",
    "sand": "{a}&{b}", "sor": "{a}|{b}", "sxor": "{a}^{b}", "sshll": "({a}<<({b}&31))&{w}", "sshrl": "{a}>>({b}&31)",
    "sshra": "(sg({a})>>({b}&31))&{w}",
}  # fmt: skip
_FLOATS = {"sadd": "+", "ssub": "-", "smul": "*"}
_COMPARE = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_LOGIC = {
    "pnand": "not ({a} and {b})", "por": "bool({a} or {b})", "pand": "bool({a} and {b})", "pnor": "not ({a} or {b})",
    "pxor": "bool({a})!=bool({b})",
}  # fmt: skip
_NOTHING = (
    "shalt",
    "sfence",
    "vtrace",
    "vsettm",
    "inlined_call",
    "compiler-scheduling-barrier",
    "set.",
    "vwait.eq",
    "vwait.ne",
)


class Translator:
    """Writes statements for the instructions of one schedule.

    Attributes:
      num_values: size that R must have.
      assumptions: in `memory`, where instructions that are not understood are counted too; their results are its `unknown`.
    """

    def __init__(self, schedule: Schedule, memory: Memory) -> None:
        self._memory = memory
        self._numbers: dict[str, int] = {}
        self._joined = {
            operand
            for bundle in schedule.bundles
            for i in bundle
            if i.name in ("sphi", "pphi")
            for operand in i.operands
        }

    @property
    def num_values(self) -> int:
        return len(self._numbers)

    def number(self, name: str) -> int:
        """The place in R of a value or of a register."""
        return self._numbers.setdefault(name, len(self._numbers))

    def _register(self, value: str) -> int:
        """The place in R of the register that holds `value`: its name's last part. Values that meet in a phi share it."""
        return self.number(value.rsplit("_", 1)[-1])

    def expression(self, text: str) -> str:
        """An operand as a Python expression for an unsigned word.

        Raises:
          UnsupportedSchedule: not a form of operand that is known.
        """
        text = text.strip()
        while text.startswith("[") and text.endswith("]"):
            text = re.sub(r"^(smem|vmem|hbm|sflag):", "", text[1:-1].strip())
        if " + " in text:
            return "(" + "+".join(self.expression(part) for part in text.split(" + ")) + f"&{WORD})"
        if text.startswith("%"):
            return f"R[{self.number(text)}]"
        if text.startswith("#allocation"):
            return str(self._memory.symbol(text))
        literal = text.lstrip("$")
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", literal):
            return str(int(literal, 0) & WORD)
        try:
            return str(int(np.float32(float(literal)).view(np.uint32)))
        except ValueError:
            raise UnsupportedSchedule(f"operand {text!r}") from None

    def statements(self, instruction: Instruction, offset: int) -> list[str]:
        """What one instruction does, `offset` cycles into its block. Branches are left to the caller."""
        if instruction.name in ("sphi", "pphi"):
            if len({value.rsplit("_", 1)[-1] for value in (instruction.result or "", *instruction.operands)}) > 1:
                raise UnsupportedSchedule(f"{instruction.name} of values in different registers")
            return [f"R[{self.number(instruction.result or '')}]=R[{self._register(instruction.result or '')}]"]
        try:
            value, effect = self._meaning(instruction, offset)
        except UnsupportedSchedule as error:
            self._memory.assumptions[f"{instruction.name} ignored: {error}"] += 1
            value, effect = (str(self._memory.unknown) if instruction.result else None), None
        if value is not None:
            place = self.number(instruction.result or "")
            joined = f"R[{self._register(instruction.result)}]=" if instruction.result in self._joined else ""
            effect = f"{joined}R[{place}]={value}"
            if instruction.otherwise is not None:
                condition = f"{'not ' if instruction.negated else ''}R[{self.number(instruction.guard or '')}]"
                return [f"{joined}R[{place}]=({value}) if {condition} else {self.expression(instruction.otherwise)}"]
        if effect is None:
            return []
        if instruction.guard is None:
            return [effect]
        return [f"if {'not ' if instruction.negated else ''}R[{self.number(instruction.guard)}]: {effect}"]

    def _meaning(self, i: Instruction, offset: int) -> tuple[str | None, str | None]:
        """(expression for the result, None), or (None, a statement), or (None, None) for what has no effect here."""
        stem = i.name.split(".")[0]
        if i.name.startswith("inlined_call_operand"):
            return str(self._memory.operand(i.result or "")), None
        if i.name.startswith("dma."):
            return None, self._dma(i, offset)
        if i.name.startswith(("vsync", "vwait.ge", "vdelay", "vpop.sfrf")):
            return self._semaphore(i, offset)
        if i.name.startswith("vtrace"):
            return None, f"E.mark(t+{offset},{i.note!r})" if i.note.startswith("TraceMe") else None
        if i.name.startswith("shalt.err"):
            return None, f"E.halt(t+{offset},{i.note!r})" if i.guard else None
        if i.name.startswith(_NOTHING):
            return None, None
        if stem == "sst":
            return None, f"S[{self.expression(i.operands[0])}]={self.expression(i.operands[1])}"
        if stem == "sdivrem":
            a, b = map(self.expression, i.operands[:2])
            return None, f"E.divide({a},{b},{i.note!r},{i.name.endswith('s32')})"
        if i.result is None:
            raise UnsupportedSchedule("unknown")
        return self._value(i, stem), None

    def _value(self, i: Instruction, stem: str) -> str:
        if i.name == "spop.drf":
            return "E.quotients.popleft()"
        if stem == "spop":
            raise UnsupportedSchedule("a value of the vector unit")
        operands = [self.expression(re.sub(r"\s+\[#\w+\]$", "", operand)) for operand in i.operands]
        if stem in _ARITHMETIC and len(operands) == 2:
            a, b = operands
            if i.name.endswith(".f32"):
                if stem not in _FLOATS:
                    raise UnsupportedSchedule("unknown")
                return f"bits(fl({a}){_FLOATS[stem]}fl({b}))"
            if i.name == "smulhi.s32":
                return f"(sg({a})*sg({b})>>32)&{WORD}"
            return _ARITHMETIC[stem].format(a=a, b=b, w=WORD)
        if stem == "scmp":
            _, relation, kind = i.name.split(".")[:3]
            convert = (
                "fl" if kind.startswith("f") else "sg" if kind.startswith("s") and relation not in ("eq", "ne") else ""
            )
            return f"{convert}({operands[0]}){_COMPARE[relation]}{convert}({operands[1]})"
        if stem in ("smin", "smax"):
            key = "" if i.name.endswith("u32") else ",key=fl" if i.name.endswith("f32") else ",key=sg"
            return f"{stem[1:]}({operands[0]},{operands[1]}{key})"
        if stem in ("smov", "int_to_ptr"):
            return operands[0]
        if stem == "pmov":
            return f"bool({operands[0]})"
        if stem == "pneg":
            return f"not {operands[0]}"
        if stem in _LOGIC:
            return _LOGIC[stem].format(a=operands[0], b=operands[1])
        if stem == "scalar_select":
            return f"({operands[1]} if {operands[0]} else {operands[2]})"
        if stem == "scalar_lea":
            return f"({'+'.join(operands)})&{WORD}"
        if stem == "sld":
            return f"S.get({operands[0]},0)"
        raise UnsupportedSchedule("unknown")

    def _dma(self, i: Instruction, offset: int) -> str:
        operands = [self.expression(operand) for operand in i.operands[:7]]
        if i.name.startswith("dma.done.wait"):
            return f"t+=W(t+{offset},{operands[0]},{operands[1]})"
        source, size, destination, flag = operands[:4]
        if i.name == "dma.general":
            kind, call = i.note, f"E.engines.general(t+{offset},{i.note!r},{size},{flag},{operands[4]},{operands[6]})"
        else:
            kind = i.name.removeprefix("dma.").replace("_", "-")
            call = f"E.engines.local(t+{offset},{kind!r},{size},{flag})"
        return f"{call}; E.memory.fill({source},{destination},{size})" if kind.endswith("-to-smem") else call

    def _semaphore(self, i: Instruction, offset: int) -> tuple[str | None, str | None]:
        operands = [self.expression(operand) for operand in i.operands]
        if i.name.startswith("vpop.sfrf"):
            return "E.read_flags.popleft()", None
        if i.name.startswith("vwait.ge"):
            return None, f"t+=W(t+{offset},{operands[0]},{operands[1]})"
        if i.name.startswith(("vsyncadd.remote", "vsyncset.remote")):
            return None, f"E.engines.remote_signal(t+{offset},{operands[0]},{operands[1]})"
        if i.name.startswith("vsyncadd"):
            return None, f"E.engines.signal({operands[0]},{operands[1]})"
        if i.name.startswith(("vsyncpa", "vsyncset")):
            return None, f"E.engines.set({operands[0]},{operands[1]})"
        if i.name.startswith("vsyncmov"):
            return None, f"E.read_flags.append(E.engines.read(t+{offset},{operands[0]}))"
        if i.name.startswith("vdelay"):
            return None, f"t+={operands[0]}"
        raise UnsupportedSchedule("unknown")
