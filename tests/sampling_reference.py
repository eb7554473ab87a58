"""Sampling by definition, in numpy and float64, and the way of test rows to the device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tpu_serve.device.mesh import make_mesh
from tpu_serve.device.sampler_state import SamplerState
from tpu_serve.layers.logit_edits import count, edit, restrict
from tpu_serve.layers.sampler import sample
from tpu_serve.request import Request, SamplingParams
from tpu_serve.runner.pack import Packer, PackLayout, pack_masks
from tpu_serve.runner.slot_writer import SlotWriter
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.step import Scheduled

VOCABULARY, ROWS, SLOTS = 37, 5, 10
LAYOUT = PackLayout(num_tokens=32, num_rows=ROWS, max_pages=8, page_size=8, num_slots=SLOTS)


def mask_of(allowed, vocab_size):
    """The mask of a constraint that allows these ids."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


class Only:
    """A constraint that allows the same ids at every place."""

    follows, is_finished = False, False

    def __init__(self, allowed):
        self.mask = mask_of(allowed, VOCABULARY)

    def copy(self):
        return self


def make_row(slot, prompt, generated=(), biases=(), allowed=None, forced=(), eos=(), seed=0, **params):
    """A row that samples the token behind `generated`; all tokens are known."""
    request = Request(
        id=str(slot),
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=60, **params),
        eos_token_ids=frozenset(eos),
        seed=seed,
        biases=tuple(biases),
        constraint=None if allowed is None else Only(allowed),
        forced_token_ids=tuple(forced),
    )
    sequence = Sequence(request, 60)
    sequence.tokens = [*prompt, *generated]
    sequence.slot, sequence.pages = slot, [list(range(1, 9))]
    return Scheduled(sequence, len(sequence.tokens) - 1, 1, samples=True, is_first=True)


class Driver:
    """The device's part of sampling without a model. It compiles once for all tests."""

    def __init__(self):
        self.state, self.packer = SamplerState.allocate(SLOTS, VOCABULARY), Packer(LAYOUT)
        self.writer = SlotWriter(self.state, make_mesh(jax.devices()[:1]))
        self.state = self.writer.compile(self.state)

    @staticmethod
    @functools.partial(jax.jit, static_argnums=(4, 5))
    def _run(logits, packed, masks, state, num_valid, mode):
        batch = LAYOUT.unpack(packed)
        edited = edit(restrict(logits, num_valid), batch.sampling, batch.slots, masks, state)
        sampled = sample(logits, edited, batch.sampling, mode)
        return edited, sampled, count(state, batch.sampling, batch.slots, sampled.token_ids)

    def step(self, logits, rows, num_valid=VOCABULARY, mode="raw_logprobs"):
        """(edited logits, Sampled) of some rows, in this order; the state goes on."""
        rows = tuple(rows)
        self.state = self.writer.write(self.state, (rows,))
        masks = pack_masks((rows,), ROWS, VOCABULARY)
        if masks is None:
            masks = np.zeros((ROWS, -(-VOCABULARY // 32)), np.uint32)
        logits = jnp.asarray(np.resize(logits, (ROWS, VOCABULARY)))
        packed = self.packer.pack((rows,), LAYOUT)
        edited, sampled, self.state = self._run(logits, packed, masks, self.state, num_valid, mode)
        return np.asarray(edited)[: len(rows)], jax.tree.map(lambda x: np.asarray(x)[: len(rows)], sampled)


def after(row, token_id):
    """The same sequence one step on; the device has counted the token itself."""
    row.sequence.tokens.append(token_id)
    return dataclasses.replace(row, start=row.start + 1, is_first=False)


def edited_by_definition(logits, row, constraint=None, num_valid=None):
    """What one row's logits become: ids that do not exist, biases, mask, penalties."""
    request, params = row.sequence.request, row.sequence.request.params
    generated = row.sequence.tokens[len(request.prompt_token_ids) :]
    out = logits.astype(np.float64)
    out[len(out) if num_valid is None else num_valid :] = -np.inf
    for bias in request.biases:
        if len(generated) < bias.until:
            out[bias.token_id] += bias.value
    if constraint is not None:
        bits = np.unpackbits(np.frombuffer(constraint.mask, np.uint8), bitorder="little")
        out[bits[: len(out)] == 0] = -np.inf
    for token_id in set(row.sequence.tokens):
        out[token_id] = (
            out[token_id] / params.repetition_penalty
            if out[token_id] > 0
            else out[token_id] * params.repetition_penalty
        )
    for token_id in generated:
        out[token_id] -= params.frequency_penalty
    for token_id in set(generated):
        out[token_id] -= params.presence_penalty
    return out


def kept_by_sorting(logits, temperature, min_p, top_k, top_p):
    """Which tokens one row may sample: sort, cut, sum."""
    scaled = logits.astype(np.float64) / temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    kept = (probabilities >= min_p * probabilities.max()) & (probabilities > 0)
    if top_k > 0:
        kept &= probabilities >= np.sort(probabilities)[::-1][min(top_k, len(logits)) - 1]
    if top_p == 1:
        return kept
    left = np.where(kept, probabilities, 0)
    order = np.argsort(-left)
    mass = np.cumsum(left[order]) / left.sum()
    count = int(np.searchsorted(mass, top_p - 1e-6)) + 1  # the smallest set that reaches top_p
    nucleus = np.zeros(len(logits), bool)
    nucleus[order[:count]] = True
    return kept & nucleus
