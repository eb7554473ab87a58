"""What `tpu-serve check` prints."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from tpu_serve.config import EngineConfig
from tpu_serve.device.chip import GIB, MIB
from tpu_serve.engine.memory import COMPILED
from tpu_serve.engine.placement import REPEATED
from tpu_serve.engine.remedies import Remedy
from tpu_serve.engine.report import CacheLine, Report, WeightLine, bytes_by_kind, num_active_params


def text(
    report: Report, config: EngineConfig, checkpoint: str, notes: Sequence[str], remedies: Sequence[Remedy]
) -> str:
    """A page to read.

    Args:
      config: options of the report.
      checkpoint: what is known of the weights' files.
      notes: what else the user should know.
      remedies: what would fit, where the report says that it does not.
    """
    blocks = [
        [_title(report), *_model(report, checkpoint)],
        *_weights(report),
        list(_caches(report)),
        list(_memory(report, config)),
        _experts(report),
        ["Notes", *(f"  {note}" for note in notes)] if notes else [],
        [] if report.fits else list(_remedies(remedies)),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _title(report: Report) -> str:
    placement = report.design.placement
    return f"{report.design.hf_config.architecture} on {placement.mesh.size} x {placement.chip.name}"


def _model(report: Report, checkpoint: str) -> Iterator[str]:
    design = report.design
    active = num_active_params(design)
    yield (
        f"  parameters  {_count(design.num_params)}, {_count(active)} of them for each token; {design.dtype.name}"
        if active != design.num_params
        else f"  parameters  {_count(active)}, all of them for each token; {design.dtype.name}"
    )
    if design.experts is not None:
        yield f"  experts     {design.format.name or design.dtype.name}: {design.format.reason}"
    yield f"  checkpoint  {checkpoint}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"


def _size(num_bytes: int) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:,.{3 if unit == GIB else 1}f} {name}"
    return f"{num_bytes} B"


def _weights(report: Report) -> Iterator[list[str]]:
    lines = report.weights
    sizes = {kind: _size(size) for kind, size in {**bytes_by_kind(lines), "all": report.design.param_bytes}.items()}
    yield ["Weights on each device", *_aligned([(kind, size) for kind, size in sizes.items()], right={1})]
    rows = [
        (
            f"{line.count} x" if "*" in line.path else "",
            line.path,
            str(list(line.shape)),
            line.format or line.dtype,
            _size(line.bytes_on_device),
            _where(line, report),
        )
        for line in lines
    ]
    yield ["Weights one by one, with what all layers have of them on each device", *_aligned(rows, right={0, 4})]


def _aligned(rows: Sequence[tuple[str, ...]], right: Collection[int]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if at in right else cell.ljust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _where(line: WeightLine, report: Report) -> str:
    count = report.design.placement.mesh.size
    if count == 1:
        where = ""
    elif line.split:
        where = f"split over {', '.join(line.split)}"
    elif line.whole:
        where = f"whole on each: {count} devices cannot share out its {', '.join(line.whole)}"
    else:
        where = "whole on each"
    if line.repeats > 1:
        what = " and ".join(axis for axis in line.split if axis in REPEATED)
        return f"{where}; each of its {what} {line.repeats} times, in the checkpoint {list(line.unpadded)}"
    padding = "" if line.shape == line.unpadded else f"padded from {list(line.unpadded)}"
    return "; ".join(filter(None, (where, padding)))


def _caches(report: Report) -> Iterator[str]:
    demand, layout = report.demand, report.design.placement.cache_layout
    if demand is None:
        return
    if report.caches:
        yield f"KV cache in {layout.stored or report.design.dtype.name}, pages of {demand.page_size} tokens"
        yield from (f"  {_cache(line, demand.max_model_len)}" for line in report.caches)
    state = report.state
    if state is not None:
        snapshots = "" if state.num_snapshots is None else f" and {state.num_snapshots} snapshots for the prefix cache"
        yield "Recurrent state"
        yield (
            f"  {state.num_layers} layers: {_size(state.sequence_bytes)} a sequence, "
            f"{_size(state.sequence_bytes_on_device)} on each device; {state.num_slots} slots{snapshots}"
        )


def _cache(line: CacheLine, max_model_len: int) -> str:
    what = "everything" if line.window is None else f"{line.window} tokens"
    return (
        f"{line.num_layers} layers that see {what}: {line.token_bytes:,} bytes a token, {line.token_bytes_on_device:,} on each device; "
        f"a sequence of {max_model_len:,} tokens takes {line.sequence_pages:,} pages, {_size(line.sequence_bytes_on_device)} on each device"
    )


def _memory(report: Report, config: EngineConfig) -> Iterator[str]:
    chip, plan = report.design.placement.chip, report.plan
    share = config.cache.device_memory_utilization
    usable = int(share * chip.memory_bytes)
    yield f"Memory of each device: {_size(chip.memory_bytes)}, of which {_size(usable)} may be taken"
    if plan is None or report.cache_bytes is None:
        yield f"  it does not fit: {report.problem}"
        return
    of_steps = plan.temporary_bytes + plan.code_bytes
    taken = report.design.param_bytes + report.cache_bytes + plan.sampler_bytes + of_steps
    yield (
        f"  it fits: {_size(report.design.param_bytes)} of weights, {_size(report.cache_bytes)} of caches, {_size(plan.sampler_bytes)} of the "
        f"sampler and {_size(of_steps)} of steps, {_size(taken)} in all"
    )
    yield (
        f"  steps, {plan.figures}: {_size(plan.temporary_bytes)} of temporary arrays of the largest, {_size(plan.code_bytes)} of programs"
        + (" estimated from its own" if plan.figures == COMPILED else "")
    )
    for line in report.caches:
        seeing = "" if line.window is None else f" for layers that see {line.window} tokens"
        pages = (line.num_pages or 1) - 1
        yield f"  {pages:,} pages, {pages * plan.page_size:,} tokens{seeing}"
    yield (
        f"  {report.concurrency:.1f} sequences of {plan.max_model_len:,} tokens at a time; "
        f"at most {plan.max_num_seqs} sequences and {plan.max_num_batched_tokens} tokens in a step"
    )


def _experts(report: Report) -> list[str]:
    lines = report.experts
    return ["Experts", *(
        f"  {', '.join(map(str, line.num_tokens))} tokens: {' '.join(filter(None, (line.way, line.tiles)))}"
        f"{f', {line.origin}' if line.origin else ''} ({line.reason})" for line in lines
    )] if lines else []  # fmt: skip


def _remedies(remedies: Sequence[Remedy]) -> Iterator[str]:
    if not remedies:
        yield "No change of types, sequences, their length or devices was found that would fit, nor any two of them."
        return
    yield "Each of these lines would fit, the smallest change first"
    yield from (f"  {one.flags}{f'  ({one.note})' if one.note else ''}" for one in remedies)


def as_json(
    report: Report, config: EngineConfig, checkpoint: str, notes: Sequence[str], remedies: Sequence[Remedy]
) -> dict[str, Any]:
    """The same for programs. Bytes are those on each device where the name does not say otherwise."""
    design, placement, state = report.design, report.design.placement, report.state
    return {
        "model": config.model.served_name, "architecture": design.hf_config.architecture, "chip": placement.chip.name,
        "num_devices": placement.mesh.size, "dtype": design.dtype.name, "num_params": design.num_params,
        "num_active_params": num_active_params(design),
        "experts": None if design.experts is None else {
            "format": design.format.name or design.dtype.name, "reason": design.format.reason,
        },
        "checkpoint": checkpoint, "memory_bytes": placement.chip.memory_bytes,
        "usable_bytes": int(config.cache.device_memory_utilization * placement.chip.memory_bytes),
        "param_bytes": design.param_bytes, "param_bytes_by_kind": bytes_by_kind(report.weights),
        "cache_bytes": report.cache_bytes, "concurrency": report.concurrency,
        "temporary_bytes": report.plan and report.plan.temporary_bytes, "code_bytes": report.plan and report.plan.code_bytes,
        "figures": report.plan and report.plan.figures,
        "weights": [{"kind": line.kind, **dataclasses.asdict(line)} for line in report.weights],
        "caches": [dataclasses.asdict(line) for line in report.caches],
        "state": None if state is None else dataclasses.asdict(state),
        "plan": None if report.plan is None else dataclasses.asdict(report.plan),
        "moe_plans": [dataclasses.asdict(line) for line in report.experts],
        "notes": list(notes), "fits": report.fits, "problem": report.problem,
        "remedies": [{"flags": one.flags, "options": one.options, "factor": one.factor, "note": one.note} for one in remedies],
    }  # fmt: skip
