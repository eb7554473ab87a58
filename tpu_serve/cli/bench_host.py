"""`tpu-serve bench host`: what a step costs the scheduler, the packer and the commit, without a device."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tpu_serve.cli.bench_engine import check_writable, write_json
from tpu_serve.cli.options import not_negative, positive


def add(kinds: Any) -> None:
    """Adds `host` to the benchmarks."""
    host = kinds.add_parser(
        "host",
        help="what a step costs the host's CPU: scheduler, packing, commit; without a device",
        description="Microseconds that the host spends on a step of running sequences that each get one token: planning it, packing it for the device, "
        "reading what it sampled, and committing that. Tokens are made up, and steps overlap as in an engine; nothing is sent to a device.",
    )
    flag = host.add_argument
    flag("--num-seqs", metavar="N", type=positive, default=256, help="sequences that run (default: %(default)s)")
    flag("--context-len", metavar="N", type=positive, default=1024, help="tokens of a prompt (default: %(default)s)")
    flag("--num-steps", metavar="N", type=positive, default=500, help="steps measured (default: %(default)s)")
    flag("--end-percent", metavar="PERCENT", type=not_negative("percent"), default=0.0,
        help="how many of the sequences end in a step; as many prompts come in their place (default: %(default)g)")  # fmt: skip
    flag("--page-size", metavar="N", type=positive, default=64, help="tokens per page (default: %(default)s)")
    flag("--max-num-batched-tokens", metavar="N", type=positive, default=2048,
        help="most tokens of a step (default: %(default)s)")  # fmt: skip
    flag("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
        help="offer pages to the prefix cache; no two prompts are alike (default: yes)")  # fmt: skip
    flag("--repeat", metavar="N", type=positive, default=3, help="runs of all of it (default: %(default)s)")
    flag("--output-json", type=Path, metavar="FILE", help="write the figures and all samples to FILE")
    host.set_defaults(run=run, parser=host)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints and perhaps writes a file; returns the exit code."""
    check_writable(arguments.output_json)

    from tpu_serve.bench.host import HostPlan, bench_host
    from tpu_serve.cli.progress import Progress

    plan = HostPlan(
        num_seqs=arguments.num_seqs,
        context_len=arguments.context_len,
        num_steps=arguments.num_steps,
        page_size=arguments.page_size,
        budget=arguments.max_num_batched_tokens,
        enable_prefix_caching=arguments.enable_prefix_caching,
        end_percent=arguments.end_percent,
        num_runs=arguments.repeat,
    )
    with Progress(plan.num_runs, "runs") as progress:
        found = bench_host(plan, progress.advance)
    print(found.text())
    if arguments.output_json is not None:
        write_json(arguments.output_json, found.document())
    return 0
