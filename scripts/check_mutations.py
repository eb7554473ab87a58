"""Shows that a fixture's golden values notice mistakes: what each does to the logits of transformers.

Run by hand as make_goldens.py: `python scripts/check_mutations.py qwen2_moe gpt_oss`. For each mistake it prints the
largest change of a logit over all prompts, and how many of their tokens would be continued otherwise. It fails if a change
is too small, or if the checkpoint under either dialect of config.json does not give the golden values.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
from golden_checkpoints import text_config, write_file, write_json
from golden_mutations import CONFIG_EDITS, FILE_EDITS, MODEL_EDITS, Edit, unread
from make_goldens import FIXTURES, PROMPTS, forward, load_model

LEAST = 0.02
"""Smallest change of a logit that counts as noticed; tests allow 5e-4."""
NOISE = 1e-4
"""Largest change of a logit from running a prompt without its continuation, which changes the order of float32 sums."""


def family(name: str) -> str:
    """The variant whose mistakes a quantised one shares."""
    return name.removesuffix("_mxfp4").removesuffix("_fp8")


def logits(model: Any, golden: Any) -> np.ndarray:
    """[tokens of all prompts, V]."""
    found = [forward(model, golden[f"prompt_{number}"].tolist()).logits[0] for number in range(len(PROMPTS))]
    return torch.cat(found).numpy()


def load_edited(folder: Path, config: dict[str, Any] | None = None, edit: Edit | None = None) -> Any:
    """The folder's weights under another config.json, or with other tensors in its only file."""
    with tempfile.TemporaryDirectory() as scratch:
        copied = Path(scratch) / "model"
        shutil.copytree(folder, copied)
        if config is not None:
            write_json(copied / "config.json", config)
        if edit is not None:
            tensors = safetensors.torch.load_file(copied / "model.safetensors")
            edit(tensors)
            write_file(copied / "model.safetensors", tensors)
        return load_model(copied)


def mutants(folder: Path, model: Any) -> Iterator[tuple[str, Any]]:
    for label, edit in CONFIG_EDITS.get(family(folder.name), {}).items():
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        edit(text_config(config))
        yield label, load_edited(folder, config)
    for label, edit in FILE_EDITS.get(folder.name, {}).items():
        yield label, load_edited(folder, edit=edit)
    for label, edit in [*MODEL_EDITS.get(family(folder.name), {}).items(), *unread(model)]:
        mutant = copy.deepcopy(model)
        edit(mutant)
        yield label, mutant


@torch.no_grad()
def check(folder: Path) -> bool:
    golden = np.load(folder / "golden.npz")
    expected = np.concatenate([golden[f"logits_{number}"] for number in range(len(PROMPTS))])
    model = load_model(folder)
    resaved = load_edited(folder, json.loads((folder / "v5_style" / "config.json").read_text(encoding="utf-8")))
    good = True
    for label, again in (("as published", model), ("as transformers 5 writes it", resaved)):
        difference = float(np.abs(logits(again, golden) - expected).max())
        print(f"{folder.name:16} {label:50} {difference:.1e}", flush=True)
        good &= difference < NOISE
    for label, mutant in mutants(folder, model):
        found = logits(mutant, golden)
        difference, moved = float(np.abs(found - expected).max()), int((found.argmax(-1) != expected.argmax(-1)).sum())
        noticed = difference > LEAST or bool(np.isnan(difference))
        good &= noticed
        print(
            f"{folder.name:16} {label:50} {difference:8.4f}  {moved:3d}/{len(found)}{'' if noticed else '  UNNOTICED'}",
            flush=True,
        )
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="+", help="folders under tests/fixtures")
    parser.add_argument("--fixtures", type=Path, default=FIXTURES, help="the folder that holds them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    if not all([check(options.fixtures / name) for name in options.names]):
        raise SystemExit("a mistake goes unnoticed, or a checkpoint gives other values")


if __name__ == "__main__":
    main()
