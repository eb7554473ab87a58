"""`tpu-serve convert`: a copy of a checkpoint with its experts in another layout."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from tpu_serve.config import ConfigError
from tpu_serve.option import parse_count

LAYOUTS = ("per-expert", "fused", "split")
_SHARD_SIZE = "5g"


def register(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "convert",
        help="copy a checkpoint with its experts in another layout",
        description="Copies a checkpoint folder with the weights of its routed experts in another layout, bit for bit. All layouts are served alike. "
        "DST appears only when it is complete. What the layouts are: per-expert, the tensors gate, up and down of each expert, as checkpoints are "
        "published; fused, one wi [E, H, 2I] and one wo [E, I, H] per layer; split, the same with wi as [2, E, H/2, 2I], half of the experts in each half.",
    )
    add = parser.add_argument
    add("source", metavar="SRC", help="a folder of safetensors files with a config.json, or a hub id")
    add("target", metavar="DST", type=Path, help="the folder to write, in one that exists")
    add("--moe-layout", required=True, choices=LAYOUTS, help="layout of the routed experts' weights in DST")
    add(
        "--max-shard-size",
        type=_size,
        default=_SHARD_SIZE,
        metavar="SIZE",
        help="bytes of weights in one file, as in 500m; a bigger tensor has a file to itself (default: %(default)s)",
    )
    add("--overwrite", action="store_true", help="replace DST where it is a model folder")
    parser.set_defaults(run=run, parser=parser)


def run(arguments: argparse.Namespace) -> int:
    """Converts and prints what was written."""
    from tqdm import tqdm

    from tpu_serve.checkpoint.convert import convert_folder
    from tpu_serve.checkpoint.folder import resolve

    source = resolve(arguments.source)
    with tqdm(unit="B", unit_scale=True, unit_divisor=1024, disable=None, file=sys.stderr) as bar:

        def show(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        converted = convert_folder(
            source,
            arguments.target,
            arguments.moe_layout,
            max_shard_bytes=arguments.max_shard_size,
            overwrite=arguments.overwrite,
            progress=show,
        )
    if converted.kept:
        print(
            f"tpu-serve: {len(converted.kept)} other tensors of experts are copied as they are, such as {converted.kept[0]}",
            file=sys.stderr,
        )
    print(
        f"wrote {arguments.target}: {converted.num_groups} groups of routed experts in the {arguments.moe_layout} layout, "
        f"{tqdm.format_sizeof(converted.num_bytes, 'B', 1024)} in {converted.num_files} file{'s' if converted.num_files > 1 else ''}"
    )
    return 0


def _size(text: str) -> int:
    """An argparse type: a number of bytes, at least one."""
    try:
        size = parse_count(text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: at least 1 byte")
    return size
