"""The other tests of `ragged_paged_attention` can fail: small faults, planted while the kernel is traced, and what must notice each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_inputs import NUM_PAGES, Case, expected, simulated, written
from simulator import FaultKind, KernelFault

from tpu_serve.kernels.ragged_paged_attention.config import Config
from tpu_serve.kernels.ragged_paged_attention.decode import Decode
from tpu_serve.kernels.ragged_paged_attention.softmax import Softmax
from tpu_serve.kernels.ragged_paged_attention.stream import Stream
from tpu_serve.kernels.ragged_paged_attention.write import Writer
from tpu_serve.kernels.ragged_paged_attention.write_decode import TokenWriter

# Sequences of several pieces, one behind the other in the same group.
CASE = Case(2, 1, 8, num_tokens=32, config=Config(16, 1, 1, 2, 2, 2))
DECODES = [(7, 1), (20, 1), (3, 1)]
CHUNKS = [(0, 9), (13, 20)]


def values_off(spans, nan_behind=False, modes=("eager",)):
    """Largest difference of a value from the reference's; infinite where one is no number."""
    batch, (q, k, v, cache) = CASE.batch(spans), CASE.arrays(4)
    right = written(CASE, k, v, cache, batch)
    wanted = expected(CASE, q, jnp.asarray(right), batch)
    if nan_behind:
        hidden = np.ones((NUM_PAGES, CASE.page_size), bool)
        for row, (before, _) in enumerate(spans):
            for position in range(before):
                hidden[batch.page_table[0, row, position // CASE.page_size], position % CASE.page_size] = False
        cache = jnp.where(hidden[:, None, :, None], jnp.nan, cache)
    traced = simulated.__wrapped__(CASE)  # not from the cache, which holds kernels without a fault
    found = [out for out, _ in traced.run(q, k, v, cache, batch, modes=modes, allow_nan=True)]
    return max(float(np.nan_to_num(np.abs(np.asarray(out) - wanted), nan=np.inf).max()) for out in found)


@pytest.mark.parametrize(
    ("where", "name", "spans"),
    [
        (Decode, "wait", DECODES),
        (TokenWriter, "_wait", DECODES),
        (Stream, "wait", CHUNKS),
        (Stream, "wait_queries", CHUNKS),
        (Writer, "wait_written", CHUNKS),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_a_wait_less_is_noticed(monkeypatch, where, name, spans):
    monkeypatch.setattr(where, name, lambda *arguments: None)
    with pytest.raises(KernelFault) as caught:
        values_off(spans)
    assert caught.value.kind is FaultKind.RACE


def test_without_zeros_where_nothing_is_seen_nan_gets_into_results(monkeypatch):
    assert values_off(DECODES, nan_behind=True) < 1e-5
    monkeypatch.setattr(Decode, "_silence", lambda *arguments: None)
    assert values_off(DECODES, nan_behind=True) == np.inf


def test_a_sequence_must_forget_the_one_before(monkeypatch):
    span = Decode.span
    monkeypatch.setattr(Decode, "span", lambda self, at: span(self, at)._replace(is_first=jnp.bool_(False)))
    assert values_off(DECODES) > 0.1


def test_a_length_too_long_by_one_is_noticed(monkeypatch):
    seen = Decode._seen
    longer = lambda self, at, span: seen(self, at, span._replace(length=span.length + 1))  # noqa: E731
    monkeypatch.setattr(Decode, "_seen", longer)
    assert values_off(DECODES) > 1e-3


def test_tokens_of_a_tile_must_not_see_what_comes_later(monkeypatch):
    monkeypatch.setattr(Softmax, "sees_all", lambda *arguments: jnp.bool_(True))
    assert values_off(CHUNKS) > 0.1
    assert jax.devices()[0].platform == "cpu"
