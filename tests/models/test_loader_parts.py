"""Weights are read in parts: each device's share alone, and large shares in pieces."""

import collections
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from loader_checkpoints import EXPERTS, HIDDEN, INNER, LAYOUTS, PREFIX, as_tensors, made_experts, save, specs

from tpu_serve.checkpoint import loader, placing
from tpu_serve.checkpoint.loader import load_params
from tpu_serve.checkpoint.safetensors import SafetensorsFolder
from tpu_serve.device.mesh import DEFAULT_RULES, make_mesh
from tpu_serve.device.params import ParamSpec, Source, padded, transposed


def mesh(num_devices):
    return make_mesh(jax.devices()[:num_devices])


def shards(array):
    return {shard.device.id: (shard.index, np.asarray(shard.data)) for shard in array.addressable_shards}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_devices", [1, 3])
def test_every_layout_on_every_device(tmp_path, layout, num_devices):
    gate_up, down = made_experts()
    loaded = load_params(specs(), save(tmp_path, as_tensors(gate_up, down, layout)), mesh(num_devices), DEFAULT_RULES)[
        "experts"
    ]
    for name, expected in (("gate_up", gate_up), ("down", down)):
        assert loaded[name].dtype == jnp.bfloat16
        assert loaded[name].sharding.spec[0] == ("data", "model")
        parts = shards(loaded[name])
        assert len(parts) == num_devices
        for device, (index, values) in parts.items():
            share = EXPERTS // num_devices
            assert index[0].indices(EXPERTS)[:2] == (device * share, (device + 1) * share)
            np.testing.assert_array_equal(values, expected[device * share : (device + 1) * share])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_types_change_on_the_way(tmp_path, layout, dtype):
    gate_up, down = made_experts(dtype=dtype)
    loaded = load_params(specs(), save(tmp_path, as_tensors(gate_up, down, layout)), mesh(2), DEFAULT_RULES)["experts"]
    np.testing.assert_array_equal(np.asarray(loaded["gate_up"]), gate_up.astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(np.asarray(loaded["down"]), down.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_on_several_devices(tmp_path, layout):
    """6 experts become 8 on 4 devices: the last one has none of the checkpoint's. Both sizes of a matrix grow too."""
    gate_up, down = made_experts()
    wanted = padded(padded(padded(specs(), "experts", 4), "expert_inner", 128), "expert_hidden", 128)
    loaded = load_params(wanted, save(tmp_path, as_tensors(gate_up, down, layout)), mesh(4), DEFAULT_RULES)["experts"]
    for name, given, shape in (("gate_up", gate_up, (8, 2, 256, 128)), ("down", down, (8, 128, 256))):
        expected = np.zeros(shape, ml_dtypes.bfloat16)
        expected[tuple(map(slice, given.shape))] = given
        np.testing.assert_array_equal(np.asarray(loaded[name]), expected)


def linear(name, axes, shape=(24, 16)):
    return ParamSpec(shape, jnp.float32, axes, (Source((f"{name}.weight",), transposed, shape[::-1]),))


@pytest.mark.parametrize("limit", [None, 100])
def test_linear_weights_are_cut_along_either_axis(tmp_path, monkeypatch, limit):
    values = np.arange(24 * 16, dtype=np.float32).reshape(16, 24)
    save(tmp_path, {"q.weight": values, "o.weight": values, "e.weight": values, "n.weight": values[0]})
    if limit:
        monkeypatch.setattr(loader, "PIECE_BYTES", limit)
    wanted = {
        "q": linear("q", (None, "heads")),
        "o": linear("o", ("heads", None)),
        "e": ParamSpec((16, 24), jnp.float32, ("vocab", None), (Source(("e.weight",)),)),
        "n": ParamSpec((24,), jnp.float32, (None,), (Source(("n.weight",)),)),
    }
    loaded = load_params(wanted, tmp_path, mesh(4), DEFAULT_RULES)
    expected = {"q": values.T, "o": values.T, "e": values, "n": values[0]}
    for name, array in loaded.items():
        assert len(shards(array)) == 4
        for index, part in shards(array).values():
            np.testing.assert_array_equal(part, expected[name][index])


@pytest.fixture
def reads(monkeypatch):
    """(name, first element, number of elements) of every read, as they come."""
    seen = []
    part, whole = SafetensorsFolder.read_part, SafetensorsFolder.read

    def read_part(self, name, start, count):
        seen.append((name, start, count))
        return part(self, name, start, count)

    def read(self, name):
        seen.append((name, None, None))
        return whole(self, name)

    monkeypatch.setattr(SafetensorsFolder, "read_part", read_part)
    monkeypatch.setattr(SafetensorsFolder, "read", read)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_value_is_read_once_and_share_by_share(tmp_path, reads, monkeypatch, layout):
    save(tmp_path, as_tensors(*made_experts(), layout))
    progress = []
    load_params(specs(), tmp_path, mesh(3), DEFAULT_RULES, progress=lambda done, _: progress.append((done, len(reads))))
    count = collections.Counter()
    for name, start, size in reads:
        assert start is not None, f"all of {name} was read"
        count[name] += size
    files = SafetensorsFolder(tmp_path)
    assert count == {name: files.num_bytes(name) // 2 for name in files.names}
    # Two weights of three shares: nothing of a share is read before the one in front of it has been reported.
    total = 2 * 3 * EXPERTS * HIDDEN * INNER
    assert [done for done, _ in progress] == [0, *(total * share * 2 // 9 for share in (1, 2, 3)), *(
        total * 2 // 3 + total * share // 9 for share in (1, 2, 3))]  # fmt: skip
    for (_, before), (done, after) in itertools.pairwise(progress[:4]):
        names = {name for name, *_ in reads[before:after]}
        if layout == "single":
            share = (3 * done // (2 * total // 3)) - 1
            assert names == {
                f"{PREFIX}.{e}.{kind}.weight" for e in (2 * share, 2 * share + 1) for kind in ("gate_proj", "up_proj")
            }
        assert sum(size for *_, size in reads[before:after]) == 2 * 2 * HIDDEN * INNER


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_shares_go_in_pieces(tmp_path, monkeypatch, layout):
    """Three experts of each device make three pieces of the first weight; the host has no more than two at a time."""
    gate_up, down = made_experts()
    save(tmp_path, as_tensors(gate_up, down, layout))
    limit = 2 * 2 * HIDDEN * INNER
    monkeypatch.setattr(loader, "PIECE_BYTES", limit)
    sizes, writes = [], []
    put, write = placing.Transfers.put, placing._write

    def watched(self, host, devices):
        sizes.append(host.nbytes)
        return put(self, host, devices)

    monkeypatch.setattr(placing.Transfers, "put", watched)
    monkeypatch.setattr(placing, "_write", lambda *args: writes.append(args[2]) or write(*args))
    loaded = load_params(specs(), tmp_path, mesh(2), DEFAULT_RULES)["experts"]
    np.testing.assert_array_equal(np.asarray(loaded["gate_up"]), gate_up)
    np.testing.assert_array_equal(np.asarray(loaded["down"]), down)
    assert max(sizes) == limit
    assert writes == [0, 1, 2] * 2 + [0, 2] * 2


def test_transfers_wait_for_the_oldest_ones():
    transfers = placing.Transfers(limit_bytes=100)
    waited = []

    class Array:
        def __init__(self, name):
            self.name = name

        def block_until_ready(self):
            waited.append(self.name)

    transfers._under_way.extend([(60, [Array("a")]), (40, [Array("b"), Array("c")])])
    transfers._num_bytes = 100
    transfers.put(np.zeros(10, np.float32), jax.devices()[:1])
    assert waited == ["a"]
    transfers.wait()
    assert waited == ["a", "b", "c"]


def test_a_source_without_rows_is_still_read(tmp_path):
    """A transform that needs all of its tensors is called once, whatever the number of shares."""
    values = np.arange(32, dtype=np.float32).reshape(8, 4)
    save(tmp_path, {"a": values[:4], "b": values[4:]})
    calls = []

    def interleave(arrays):
        calls.append(len(arrays))
        return np.stack(arrays, 1).reshape(8, 4)

    spec = ParamSpec((8, 4), jnp.float32, ("experts", None), (Source(("a", "b"), interleave),))
    loaded = load_params({"x": spec}, tmp_path, mesh(4), DEFAULT_RULES)["x"]
    np.testing.assert_array_equal(np.asarray(loaded), values[[0, 4, 1, 5, 2, 6, 3, 7]])
    assert calls == [2]


def test_scalars_and_empty_weights(tmp_path):
    save(tmp_path, {"s": np.float32(3), "e": np.zeros((0, 4), np.float32)})
    wanted = {
        "s": ParamSpec((), jnp.float32, (), (Source(("s",)),)),
        "e": ParamSpec((0, 4), jnp.float32, (None, None), (Source(("e",)),)),
    }
    loaded = load_params(wanted, tmp_path, mesh(2), {})
    assert float(loaded["s"]) == 3
    assert loaded["e"].shape == (0, 4)


class View:
    """Tensors as float32, some of them read by rows: what a view of a quantised checkpoint offers."""

    def __init__(self, files):
        self.files, self.folder, self.names, self.reads = files, files.folder, files.names, []

    def __contains__(self, name):
        return name in self.files

    def info(self, name):
        return np.dtype(np.float32), self.files.info(name)[1]

    def path(self, name):
        return self.files.path(name)

    def num_bytes(self, name):
        return self.files.num_bytes(name)

    def read(self, name, rows=None):
        self.reads.append((name, rows))
        return self.files.read(name)[slice(None) if rows is None else rows].astype(np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_takes_the_place_of_the_folder(tmp_path, layout):
    gate_up, down = made_experts()
    view = View(SafetensorsFolder(save(tmp_path, as_tensors(gate_up, down, layout))))
    loaded = load_params(specs(), view, mesh(3), DEFAULT_RULES)["experts"]
    np.testing.assert_array_equal(np.asarray(loaded["gate_up"]), gate_up)
    np.testing.assert_array_equal(np.asarray(loaded["down"]), down)
    if layout == "fused":
        assert sorted((rows.start, rows.stop) for name, rows in view.reads if name.endswith("gate_up_proj")) == [
            (0, 2), (2, 4), (4, 6)]  # fmt: skip


@pytest.mark.parametrize("axes", [(None, "heads"), ("heads", None)])
def test_a_linear_weight_of_a_view_is_decoded_once(tmp_path, axes):
    values = np.arange(24 * 16, dtype=np.float32).reshape(16, 24)
    view = View(SafetensorsFolder(save(tmp_path, {"q.weight": values})))
    loaded = load_params({"q": linear("q", axes)}, view, mesh(4), DEFAULT_RULES)["q"]
    np.testing.assert_array_equal(np.asarray(loaded), values.T)
    rows = sum(16 if rows is None else rows.stop - rows.start for _, rows in view.reads)
    assert rows == 16
