"""The gated delta rule on the states of all sequences, by the kernel or by XLA."""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal

import jax

from tpu_serve.device.batch import Batch
from tpu_serve.device.chip import Chip
from tpu_serve.kernels.context import Context
from tpu_serve.kernels.gated_delta_rule.op import gated_delta_rule, problem_of
from tpu_serve.kernels.gated_delta_rule.problem import Problem, supported
from tpu_serve.layers.delta_rule import delta_rule
from tpu_serve.layers.state_pool import read_rows, write_rows

logger = logging.getLogger(__name__)

Backend = Literal["kernel", "xla"]


@functools.cache  # logged once for all layers and all traces of a program
def choose(problem: Problem, chip: Chip) -> Backend:
    """What computes a problem on a chip: the kernel wherever it runs, because XLA moves the states of all rows of the bucket three times."""
    reason = supported(problem, chip) if chip.is_tpu else f"{chip.name} is not a TPU"
    if reason is None:
        logger.info("Gated delta rule of %d tokens: the kernel", problem.num_tokens)
        return "kernel"
    level = logging.WARNING if chip.is_tpu else logging.INFO
    logger.log(level, "Gated delta rule of %d tokens: XLA, because %s", problem.num_tokens, reason)
    return "xla"


def update_states(
    chip: Chip,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    batch: Batch,
    *,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """`delta_rule` for the rows of a batch, and the pool f32[rows, Hv, Dk, Dv] with their states after this step.

    Args:
      chip: what the device is that holds these arrays.
      interpret: parameters of the simulation, in which the kernel runs whatever the chip; False to compile.
    """
    if interpret is not False or choose(problem_of(q, v, batch.state_read), chip) == "kernel":
        rows = batch.cu_q_lens, batch.state_read, batch.state_write, batch.snapshot_write
        return gated_delta_rule(Context(chip, interpret), q, k, v, log_decay, beta, pool, *rows)
    states = read_rows(pool, batch)
    out, states = delta_rule(q, k, v, log_decay, beta, states, batch.seq_of_token, batch.cu_q_lens)
    return out, write_rows(pool, states, batch)
