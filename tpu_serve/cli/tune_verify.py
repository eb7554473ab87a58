"""`tpu-serve tune --verify`: the rows of a folder, compiled again."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING

from tpu_serve.config import ConfigError

if TYPE_CHECKING:
    from tpu_serve.tuner.trial import Executor


def run_verify(arguments: argparse.Namespace, compilers: Callable[[threading.Event], Callable[[], Executor]]) -> int:
    """Compiles rows and tells which are no longer good; 1 when one is not.

    Args:
      compilers: what makes an executor that only compiles, given the event that stops it.

    Raises:
      ConfigError: a flag has no meaning here, or a table makes no sense.
    """
    from tqdm import tqdm

    from tpu_serve.device.chip import TPU_CHIPS
    from tpu_serve.moe_plan.key import KERNEL
    from tpu_serve.tuner import rows
    from tpu_serve.tuner.jobs import known
    from tpu_serve.tuner.trial import WORKED
    from tpu_serve.tuner.verify import label, spread, verify
    from tpu_serve.tuning_tables.files import table_path

    if not arguments.compile_only:
        raise ConfigError("--verify needs --compile-only: rows are compiled again, not measured.")
    others = (
        "workload",
        "model",
        "format",
        "num_devices",
        "num_tokens",
        "score",
        "routing_counts",
        "journal",
        "report",
    )
    for name in others:
        if getattr(arguments, name) is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no meaning with --verify, which takes the rows that DIR holds."
            )
    for name in ("resume", "missing"):
        if getattr(arguments, name):
            raise ConfigError(f"--{name} has no meaning with --verify, which looks for no rows.")
    known("--chip", arguments.chip, tuple(TPU_CHIPS))
    if not arguments.output_dir.is_dir():
        raise ConfigError(f"--output-dir {arguments.output_dir} is not a folder.")
    chips = [TPU_CHIPS[name] for name in arguments.chip or TPU_CHIPS]
    held = [(chip, row) for chip in chips for row in rows.read(arguments.output_dir, chip).entries]
    if not any(table_path(arguments.output_dir, name, KERNEL).is_file() for name in TPU_CHIPS):
        raise ConfigError(f"--output-dir {arguments.output_dir} holds no tables (as v6e/{KERNEL}.json).")
    chosen, stop = spread(held, arguments.sample), threading.Event()
    num_bad, made = 0, verify(chosen, compilers(stop), arguments.jobs, stop)
    with tqdm(total=len(chosen), unit="row", disable=None) as progress, closing(made):
        for subject, trial in made:
            if trial.outcome != WORKED:
                num_bad += 1
                tqdm.write(f"{label(subject)}  {trial.outcome}: {trial.reason}", file=sys.stderr)
            progress.update()
    print(f"{len(chosen)} of {len(held)} rows: {len(chosen) - num_bad} compile, {num_bad} do not")
    return int(num_bad > 0)
