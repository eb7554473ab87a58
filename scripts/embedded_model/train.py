"""Trains the embedded model from nothing, on text that `text.py` makes, with the server's own code of the Qwen3-MoE family.

    pip install -e '.[train]'
    python scripts/embedded_model/train.py OUT [--resume] [--tokens 12m] [--more-tokens 1600k]

Most of the training reads conversations only; the last `--more-tokens` have plain text among them, so that the model can also go on with a text.

The forward pass is `models/qwen3_moe.py` under `jax.grad`; see `objective.py`.
OUT becomes a folder in the published Hugging Face layout; OUT/training holds the state to resume from and the log (a line of JSON every 100 steps).
The seed is fixed: the same machine and versions give the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# One thread: small products gain nothing from several, and other work goes on beside a training of an hour.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from folder import SEED, export, make_tokenizer, sample_texts, write_folder
from objective import loss
from rows import NUM_ROWS, ROW, Rows
from score import score, served
from tqdm import tqdm

from tpu_serve.device.mesh import make_mesh
from tpu_serve.device.params import random_init
from tpu_serve.hf_config import read_config
from tpu_serve.models.qwen3_moe import Qwen3Moe

FIRST_SEED, HELD_OUT_SEED = 10_000_000, 9_000_000
WARM_UP = 100
PEAK_RATE, SECOND_PEAK_RATE, LAST_RATE = 4e-3, 1.5e-3, 1e-4
PLAIN_SHARE = 0.2
"""Of documents in the second part of the training."""


@dataclass
class Training:
    """Everything that a checkpoint of the training holds."""

    params: Any
    optimiser: Any
    step: int = 0


def save(training: Training, folder: Path) -> None:
    """Writes the state so that a killed training leaves the one before."""
    state = {"params": training.params, "optimiser": training.optimiser}
    values = {name: jax.tree.map(np.asarray, tree) for name, tree in state.items()}
    (folder / "state.new").write_bytes(pickle.dumps(values | {"step": training.step}))
    (folder / "state.new").replace(folder / "state.pickle")


def num_steps_of(tokens: str) -> int:
    """Steps for a number of tokens, which may end in k or m."""
    factor = {"k": 10**3, "m": 10**6}.get(tokens[-1].lower(), 1)
    return int(float(tokens.rstrip("kmKM")) * factor) // (ROW * NUM_ROWS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--tokens", default="12m", help="tokens to train on, with k and m (default: 12m)")
    parser.add_argument("--more-tokens", default="1600k", help="tokens of the second part (default: 1600k)")
    parser.add_argument("--resume", action="store_true", help="go on from OUT/training")
    given = parser.parse_args()
    first_steps = num_steps_of(given.tokens)
    num_steps = first_steps + num_steps_of(given.more_tokens)
    if first_steps <= WARM_UP or num_steps == first_steps:
        parser.error(
            f"--tokens must make more than {WARM_UP} steps of {ROW * NUM_ROWS} tokens, and --more-tokens at least one"
        )
    state_folder = given.out / "training"
    if given.resume and not (state_folder / "state.pickle").is_file():
        sys.exit(f"--resume: {state_folder} holds no state; leave it out to start.")

    if not given.resume:
        write_folder(given.out, make_tokenizer(sample_texts()))
    model = Qwen3Moe.from_config(read_config(given.out, {}))
    mesh = make_mesh(jax.devices()[:1])
    params = random_init(model.param_specs(jnp.float32), mesh, {}, SEED)
    params["embedding"] = params["embedding"] * 0.08  # tied to the output, so it starts small
    parts = [
        optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, WARM_UP, first_steps, LAST_RATE),
        optax.cosine_decay_schedule(SECOND_PEAK_RATE, num_steps - first_steps, LAST_RATE / SECOND_PEAK_RATE),
    ]
    schedule = optax.join_schedules(parts, [first_steps])
    optimiser = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=0.05, mask=jax.tree.map(lambda x: x.ndim > 1, params)),
    )
    training = Training(params, optimiser.init(params))
    if given.resume:
        training = Training(**pickle.loads((state_folder / "state.pickle").read_bytes()))
    print(
        f"{sum(x.size for x in jax.tree.leaves(params)) / 1e6:.2f}M parameters, {num_steps} steps of {ROW * NUM_ROWS} tokens"
    )

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array, weights: jax.Array) -> tuple[Any, Any, jax.Array]:
        gradients, written = jax.grad(lambda p: loss(model, p, tokens, weights), has_aux=True)(params)
        updates, state = optimiser.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, written

    evaluate = jax.jit(lambda params, tokens, weights: loss(model, params, tokens, weights)[1])
    rows = Rows(given.out)
    held_out = rows.take(HELD_OUT_SEED)
    state_folder.mkdir(parents=True, exist_ok=True)
    log = (state_folder / "log.jsonl").open("a" if given.resume else "w")
    bar = tqdm(total=num_steps, initial=training.step, unit="step", mininterval=10)
    started, recent = time.time(), []
    while training.step < num_steps:
        # A seed for each step: a resumed training reads the same text.
        share = PLAIN_SHARE if training.step >= first_steps else 0.0
        tokens, weights = rows.take(FIRST_SEED + training.step, share)
        training.params, training.optimiser, written = step(training.params, training.optimiser, tokens, weights)
        training.step += 1
        recent.append(float(written))
        bar.update()
        if training.step % 100 == 0 or training.step == num_steps:
            line = {
                "step": training.step, "tokens": training.step * ROW * NUM_ROWS, "loss": round(float(np.mean(recent)), 4),
                "held_out": round(float(evaluate(training.params, *held_out)), 4), "seconds": round(time.time() - started),
            }  # fmt: skip
            recent.clear()
            print(json.dumps(line), file=log, flush=True)
            bar.set_postfix(loss=line["loss"], held_out=line["held_out"])
        if training.step % 100 == 0 or training.step == num_steps:
            save(training, state_folder)
            export(training.params, model, given.out / "model.safetensors")
    bar.close()
    print(f"held-out loss {float(evaluate(training.params, *held_out)):.4f} nats a token")
    with served(str(given.out)) as url:
        score(url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
