"""`tpu-serve tune experts`: which path runs a model's experts on this CPU."""

from __future__ import annotations

import argparse
import sys

from tpu_serve.cli.layers import layer_of_checkpoint
from tpu_serve.config import ConfigError

NUM_ITERS = 9
HONOURED = frozenset({"kernel", "model", "format", "num_tokens", "output_dir"})


def run_experts(arguments: argparse.Namespace) -> int:
    """Measures, writes the rows and prints them."""
    parser = arguments.parser
    for action in parser._actions:
        name = action.dest
        if hasattr(arguments, name) and name not in HONOURED and getattr(arguments, name) != parser.get_default(name):
            raise ConfigError(
                f"{action.option_strings[0]} is for kernels: tune experts times XLA's own paths on this CPU."
            )
    if arguments.format is not None and len(arguments.format) > 1:
        raise ConfigError("--format: tune experts takes one.")

    from tpu_serve.cli.progress import Progress
    from tpu_serve.moe_plan.key import BUCKETS
    from tpu_serve.tuner.experts import TOKENS, check, tune_experts
    from tpu_serve.tuner.jobs import known

    tokens = tuple(dict.fromkeys(arguments.num_tokens or TOKENS))
    known("--num-tokens", tokens, BUCKETS)
    format = arguments.format[0] if arguments.format else None
    layers = [layer_of_checkpoint(model, format) for model in arguments.model or (None,)]
    for name, layer in layers:
        check(name, layer)
    with Progress(len(layers) * len(tokens) * (NUM_ITERS + 1), "rounds") as progress:
        path, rows = tune_experts(layers, tokens, NUM_ITERS, arguments.output_dir, progress.advance)
    for row in rows:
        key = row.key
        print(
            f"{key.num_experts} experts, {key.top_k} of them a token, hidden {key.hidden}, intermediate {key.intermediate}, {key.format}, "
            f"{key.num_tokens} tokens: {row.value.path} ({row.provenance.us:.0f} us)"
        )
    print(f"wrote {path}", file=sys.stderr)
    return 0
