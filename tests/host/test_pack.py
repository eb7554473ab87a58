"""What the host writes is what the compiled step reads."""

import jax
import numpy as np
from packing_reference import check_packed

from tpu_serve.request import Bias, Request, SamplingParams
from tpu_serve.runner.pack import Packer, PackLayout, pack_masks
from tpu_serve.runner.slot_rows import MOST_REPETITION
from tpu_serve.scheduler.sequence import Sequence
from tpu_serve.scheduler.step import Scheduled

LAYOUT = PackLayout(num_tokens=16, num_rows=4, max_pages=8, page_size=4, num_slots=10)
UNPACK = jax.jit(LAYOUT.unpack)


def scheduled(start, length, tokens, pages, slot, samples=True, num_prompt=None, request=None, **values):
    """A row whose sequence knows `tokens`; further ones are in flight."""
    num_prompt = len(tokens) if num_prompt is None else num_prompt
    request = Request(
        id="x",
        prompt_token_ids=tuple(tokens[:num_prompt]),
        params=SamplingParams(max_tokens=9, **values),
        seed=-2,
        choice=3,
        **(request or {}),
    )
    sequence = Sequence(request, 99)
    sequence.tokens, sequence.pages, sequence.slot = list(tokens), [list(pages)], slot
    return Scheduled(sequence, start, length, samples, is_first=True)


def read(*rows):
    flat = Packer(LAYOUT).pack((rows,), LAYOUT)
    check_packed(flat, rows, LAYOUT)
    assert flat.dtype == np.int32
    assert flat.shape == (LAYOUT.size,)
    return jax.tree.map(np.asarray, UNPACK(flat))


def test_decode_in_flight_and_chunks():
    batch = read(
        scheduled(5, 1, [10, 11, 12, 13, 14], [3, 7], slot=6, num_prompt=4, temperature=0.0),  # token 5 is in flight
        scheduled(
            4,
            1,
            [20, 21, 22, 23, 24],
            [5, 6],
            slot=2,
            num_prompt=4,
            temperature=0.5,
            top_k=9,
            top_p=0.75,
            min_p=0.25,
            logprobs=2,
        ),
        scheduled(2, 4, list(range(30, 40)), [8, 1, 2], slot=9, samples=False),
    )
    assert batch.num_seqs == 3
    assert batch.num_tokens == 6
    assert batch.token_ids.tolist()[1:6] == [24, 32, 33, 34, 35]
    assert batch.from_slot.tolist() == [6] + [-1] * 15
    assert batch.positions.tolist()[:6] == [5, 4, 2, 3, 4, 5]
    assert batch.seq_of_token.tolist() == [0, 1, 2, 2, 2, 2] + [-1] * 10
    assert batch.kv_index[0].tolist()[:6] == [7 * 4 + 1, 6 * 4, 8 * 4 + 2, 8 * 4 + 3, 4, 5]
    assert all(index < 4 for index in batch.kv_index[0][6:]), "padding writes to page 0"
    assert batch.page_table[0].tolist() == [[3, 7] + [0] * 6, [5, 6] + [0] * 6, [8, 1, 2] + [0] * 5, [0] * 8]
    assert batch.kv_lens.tolist() == [6, 5, 6, 0]
    assert batch.cu_q_lens.tolist() == [0, 1, 2, 6, 6]
    assert batch.sample_at.tolist() == [0, 1, 5, 0]
    assert batch.slots.tolist() == [6, 2, 10, 10], "rows that sample nothing name no slot"
    sampling = batch.sampling
    assert sampling.temperature.tolist() == [0, 0.5, 0, 0]
    assert sampling.top_p.tolist() == [1, 0.75, 1, 1]
    assert sampling.min_p.tolist() == [0, 0.25, 0, 0]
    assert sampling.top_k.tolist() == [0, 9, 0, 0]
    assert sampling.choice.tolist() == [0, 3, 0, 0]
    assert sampling.seed_low.tolist() == [0, -2, 0, 0]
    assert sampling.seed_high.tolist() == [0, -1, 0, 0]
    assert sampling.output_position.tolist() == [2, 1, 0, 0]
    assert (sampling.any_random, sampling.any_filter, sampling.any_logprobs) == (1, 1, 1)
    assert (sampling.any_biases, sampling.any_masks, sampling.any_penalties, batch.any_prompt_logprobs) == (0, 0, 0, 0)
    assert sampling.repetition_penalty.tolist() == [1] * 4
    assert sampling.forced_id.tolist() == [-1] * 4
    assert batch.prompt_targets.tolist() == [-1] * 16


class Mask:
    """Allows ids 0 and 33 of 40."""

    follows, is_finished, mask = False, False, bytes([1, 0, 0, 0, 2, 0, 0, 0])

    def copy(self):
        return self


def test_what_rows_change_about_their_logits():
    penalised = scheduled(
        0, 2, [1, 2], [1], 0, presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1e-300
    )
    biased = scheduled(1, 1, [1, 2], [1], 3, request={"biases": (Bias(7, 1.0),), "forced_token_ids": (9,)})
    masked = scheduled(1, 1, [1, 2], [1], 5, request={"constraint": Mask()}, repetition_penalty=2.0)
    batch = read(biased, masked, penalised)
    sampling = batch.sampling
    assert (sampling.any_biases, sampling.any_masks, sampling.any_penalties) == (1, 1, 1)
    assert sampling.is_biased.tolist() == [1, 0, 0, 0]
    assert sampling.forced_id.tolist() == [9, -1, -1, -1]
    assert sampling.presence_penalty.tolist() == [0, 0, 0.5, 0]
    assert sampling.frequency_penalty.tolist() == [0, 0, -0.25, 0]
    np.testing.assert_allclose(sampling.repetition_penalty, [1, 2, 1 / MOST_REPETITION, 1], rtol=1e-6)
    rows = (biased, masked, penalised)
    words = pack_masks((rows,), 4, 40)
    assert words.dtype == np.uint32
    assert words.tolist() == [[2**32 - 1] * 2, [1, 2], [2**32 - 1] * 2, [2**32 - 1] * 2]
    assert pack_masks(((biased, penalised),), 4, 40) is None


def test_rows_that_sample_nothing_change_nothing():
    row = scheduled(0, 1, [1, 2], [1], 5, samples=False, request={"constraint": Mask(), "forced_token_ids": (3,)})
    sampling = read(row).sampling
    assert (sampling.any_masks, sampling.forced_id.tolist()) == (0, [-1] * 4)
    assert pack_masks(((row,),), 4, 40) is None


def test_a_script_ends_with_the_smallest_end():
    def at(position, **request):
        row = scheduled(position + 1, 1, [1] * (position + 2), [1, 2], 0, num_prompt=2, request=request)
        return read(row).sampling.forced_id[0]

    assert [at(place, forced_token_ids=(4, 6), eos_token_ids=frozenset({9, 8})) for place in range(4)] == [4, 6, 8, 8]
    assert at(2, forced_token_ids=(4, 6)) == -1


def test_the_next_tokens_of_a_prompt_are_what_is_reported():
    chunk = scheduled(2, 4, [10, 11, 12, 13, 14, 15, 16], [1, 2], 0, samples=False, prompt_logprobs=0)
    end = scheduled(5, 2, [20, 21, 22, 23, 24, 25, 26], [3, 4], 1, prompt_logprobs=3)
    single = scheduled(0, 1, [30, 31], [5], 2, samples=False, prompt_logprobs=1)
    answer = scheduled(3, 2, [40, 41, 42, 43, 44], [6, 7], 3, num_prompt=4, prompt_logprobs=1)
    batch = read(single, chunk, end, answer)
    assert batch.any_prompt_logprobs == 1
    assert batch.prompt_targets.tolist() == [31, 13, 14, 15, 16, 26, -1, -1, -1] + [-1] * 7
    assert read(answer).any_prompt_logprobs == 0


def test_flags_ask_only_for_work_that_is_needed():
    flags = ("any_random", "any_filter", "any_logprobs")

    def of(**values):
        sampling = read(scheduled(0, 2, [1, 2], [1], 0, **values)).sampling
        return tuple(int(getattr(sampling, flag)) for flag in flags)

    assert of(temperature=0.0, top_k=5) == (0, 0, 0)
    assert of(temperature=1.0) == (1, 0, 0)
    assert of(temperature=1.0, top_k=-1, top_p=1.0) == (1, 0, 0)
    for filters in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}):
        assert of(temperature=1.0, **filters) == (1, 1, 0)
    assert of(temperature=0.0, logprobs=0) == (0, 0, 1)
    assert read(scheduled(0, 1, [1, 2], [1], 0, samples=False, logprobs=3)).sampling.any_logprobs == 0


def test_seeds_keep_all_64_bits():
    row = scheduled(0, 1, [1], [1], 0)
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0):
        object.__setattr__(row.sequence.request, "seed", seed)
        sampling = read(row).sampling
        low, high = int(sampling.seed_low.view(np.uint32)[0]), int(sampling.seed_high.view(np.uint32)[0])
        assert (high << 32 | low) == seed % 2**64


def test_empty_batch_is_all_padding():
    batch = read()
    assert batch.num_tokens == 0
    assert (batch.seq_of_token == -1).all()
    assert (batch.slots == 10).all()
