"""One compilation in a process of its own, read and reported: `python -m tpu_serve.bench.compiled.worker REQUEST ANSWER`.

REQUEST and ANSWER are JSON files, see `report.py`, which starts this. The compiler reads LIBTPU_INIT_ARGS once in a process, hence
a process for each program.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tpu_serve.bench.compiled.topology import environment, target_devices, topology

_DUMP_FLAGS = (
    "--xla_jf_dump_hlo_text=true --xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true "
    "--xla_jf_dump_llo_pass_label_regex=packed-bundles-post-ra"
)
# Marks the scopes of `jax.named_scope` inside of kernels, at the price of barriers in the schedule.
_SCOPE_FLAGS = "--xla_enable_custom_call_region_trace=true --xla_xprof_register_llo_debug_info=true"
_DUMP = re.compile(r"\d+-(.+)-\d\d-packed-bundles-post-ra\.txt")
# Operations of XLA's own that cost something.
_OUTSIDE = (
    "copy", "copy-start", "fusion", "all-gather", "all-gather-start", "all-reduce", "all-reduce-start", "all-to-all",
    "reduce-scatter", "collective-permute", "collective-permute-start", "while", "conditional", "custom-call", "call-start",
    "async-start", "slice-start", "dynamic-slice-start",
)  # fmt: skip


def read_dump(
    folder: Path, chip: str, grid: tuple[int, ...], scalars: Mapping[str, Mapping[int, Any]]
) -> dict[str, Any]:
    """The findings about every kernel and XLA fusion whose schedule lies in `folder`, by name. One that cannot be read has only
    an "error"."""
    from tpu_serve.bench.compiled.execution import Execution
    from tpu_serve.bench.compiled.findings import Findings
    from tpu_serve.bench.compiled.machine import CORES
    from tpu_serve.bench.compiled.schedule import parse

    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        match = _DUMP.fullmatch(path.name)
        # The top-level program and its prologue only call the others.
        if (
            match is None
            or "schedule-analysis" in path.name
            or match.group(1) == "TLP"
            or match.group(1).startswith("<")
        ):
            continue
        name = match.group(1)
        given: dict[int, Any] = {}
        for pattern, operands in scalars.items():
            if re.search(pattern, name):
                given.update(operands)
        try:
            execution = Execution(parse(path.read_text(errors="replace")), CORES[chip], grid, given)
            execution.run()
            found[name] = Findings(execution).summary()
            found[name]["depends_on_unknown"] = execution.depends_on_unknown()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found[name] = {
                "error": f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"[:400]
            }
    return found


def answer(request: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Compiles the request's program, with the dump going to `folder`, and reads it. See `report.report` for the fields."""
    from tpu_serve.bench.compiled.compiler import compile_here, copied_bytes, operations, scoped_vmem_bytes
    from tpu_serve.bench.compiled.program import Program

    wanted = topology(request["chip"], request["num_devices"])
    devices = target_devices(wanted)
    module, name = request["target"].split(":")
    program = getattr(importlib.import_module(module), name)(devices, **request["kwargs"])
    if not isinstance(program, Program):
        raise TypeError(f"{request['target']} returned {type(program).__name__} instead of a Program")
    compiled = compile_here(program.function, program.args, **program.jit_options)
    by_name = operations(compiled.text)
    counts = Counter(by_name.values())
    found: dict[str, Any] = {
        "topology": wanted.name,
        "error": compiled.error,
        "compile_seconds": round(compiled.seconds, 2),
        "argument_bytes": compiled.argument_bytes,
        "output_bytes": compiled.output_bytes,
        "temporary_bytes": compiled.temporary_bytes,
        "alias_bytes": compiled.alias_bytes,
        "analytic": dict(program.analytic),
        "kernels": {},
        "outside": {name: counts[name] for name in _OUTSIDE if counts[name]},
        "copied_bytes": copied_bytes(compiled.text),
    }
    if compiled.error is None:
        found["kernels"] = read_dump(folder, wanted.chip, wanted.grid, program.scalars)
        vmem = scoped_vmem_bytes(compiled.text)
        for kernel, facts in found["kernels"].items():
            facts |= {"vmem_bytes": vmem.get(kernel, 0), "operation": by_name.get(kernel, "")}
        if request.get("keep_text"):
            (folder / "hlo.txt").write_text(compiled.text)
    return found


def main(
    request_path: str, answer_path: str, answer: Callable[[Mapping[str, Any], Path], dict[str, Any]] = answer
) -> None:
    """Answers a request with the compiler's dump switched on.

    Args:
      answer: makes the answer of the request and the folder of the dump.
    """
    request = json.loads(Path(request_path).read_text())
    folder = Path(request["dump_folder"])
    flags = f"--xla_jf_dump_to={folder} {_DUMP_FLAGS} {_SCOPE_FLAGS if request.get('scopes') else ''}"
    # The persistent cache would answer without compiling, and nothing would be dumped.
    with environment(
        LIBTPU_INIT_ARGS=f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}", JAX_ENABLE_COMPILATION_CACHE="false"
    ):
        import jax

        jax.config.update("jax_enable_compilation_cache", False)
        found = answer(request, folder)
    Path(answer_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
