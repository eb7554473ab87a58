"""Reading safetensors files: types against hand-written bytes, layouts of files, and every way a file can be broken."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from tpu_serve.checkpoint.safetensors import DTYPES, INDEX, SafetensorsFolder
from tpu_serve.config import ConfigError

FIXTURE = Path(__file__).parent.parent / "fixtures" / "qwen3_moe"


def write_raw(path, header, data=b"", header_bytes=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if header_bytes is None else header_bytes) + text + data)
    return path.parent


def entry(kind, shape, start, end):
    return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}


def write_shards(folder, tensors, num_shards=3, index=True):
    """Deals tensors out to shards by turns; returns the weight map."""
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        shard = {name: tensors[name] for name in sorted(tensors)[number::num_shards]}
        safetensors.numpy.save_file(shard, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    if index:
        write_index(folder, weight_map)
    return weight_map


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


SMALL = {f"tensor.{number}": np.full((2, 3), number, np.float32) for number in range(7)}


def test_agrees_with_the_safetensors_package():
    ours, theirs = SafetensorsFolder(FIXTURE), safetensors.numpy.load_file(FIXTURE / "model.safetensors")
    assert set(ours.names) == set(theirs)
    for name, expected in theirs.items():
        assert ours.info(name) == (expected.dtype, expected.shape)
        assert ours.num_bytes(name) == expected.nbytes
        np.testing.assert_array_equal(ours.read(name), expected)


@pytest.mark.parametrize("index", [True, False])
def test_shards_are_one_folder(tmp_path, index):
    tensors = safetensors.numpy.load_file(FIXTURE / "model.safetensors")
    write_shards(tmp_path, tensors, index=index)
    folder = SafetensorsFolder(tmp_path)
    assert set(folder.names) == set(tensors)
    assert all(np.array_equal(folder.read(name), tensors[name]) for name in tensors)
    assert "lm_head.weight" in folder
    assert "lm_head.bias" not in folder


def test_one_file_wins_over_an_index(tmp_path):
    write_index(tmp_path, {"a": "not-there.safetensors"})
    safetensors.numpy.save_file(SMALL, tmp_path / "model.safetensors")
    assert set(SafetensorsFolder(tmp_path).names) == set(SMALL)


def test_arrays_are_views_of_the_file():
    array = SafetensorsFolder(FIXTURE).read("model.norm.weight")
    assert not array.flags.writeable
    assert not array.flags.owndata


BYTES = {
    # type: bytes of the values 1, -2 and 0.5 (or of the nearest that the type has)
    "F64": ("000000000000f03f 00000000000000c0 000000000000e03f", [1, -2, 0.5]),
    "F32": ("0000803f 000000c0 0000003f", [1, -2, 0.5]),
    "F16": ("003c 00c0 0038", [1, -2, 0.5]),
    "BF16": ("803f 00c0 003f", [1, -2, 0.5]),
    "F8_E4M3": ("38 c0 30 7e", [1, -2, 0.5, 448]),
    "F8_E5M2": ("3c c0 38 7b", [1, -2, 0.5, 57344]),
    "F8_E8M0": ("7f 80 7e 00", [1, 2, 0.5, 2.0**-127]),
    "I64": ("0100000000000000 feffffffffffffff", [1, -2]),
    "I32": ("01000000 feffffff", [1, -2]),
    "I16": ("0100 feff", [1, -2]),
    "I8": ("01 fe", [1, -2]),
    "U64": ("0100000000000000 ffffffffffffffff", [1, 2**64 - 1]),
    "U32": ("01000000 ffffffff", [1, 2**32 - 1]),
    "U16": ("0100 ffff", [1, 2**16 - 1]),
    "U8": ("01 ff", [1, 255]),
    "BOOL": ("01 00", [True, False]),
}


@pytest.mark.parametrize("kind", DTYPES)
def test_types_against_bytes_written_by_hand(tmp_path, kind):
    text, values = BYTES[kind]
    data = bytes.fromhex(text)
    # A header of odd length: nothing in a file has to be aligned.
    header = json.dumps({"x": entry(kind, [len(values)], 0, len(data))}).encode()
    header += b" " * (1 - len(header) % 2)
    folder = SafetensorsFolder(write_raw(tmp_path / "model.safetensors", header, data))
    array = folder.read("x")
    assert len(header) % 2 == 1
    assert array.tobytes() == data
    assert array.astype(object).tolist() == values if kind[0] in "IUB" else array.astype(np.float64).tolist() == values


def test_bf16_becomes_f32_exactly(tmp_path):
    every = np.arange(2**16, dtype=np.uint16)
    write_raw(tmp_path / "model.safetensors", {"x": entry("BF16", [2**16], 0, 2**17)}, every.tobytes())
    wide = SafetensorsFolder(tmp_path).read("x").astype(np.float32)
    expected = (every.astype(np.uint32) << 16).view(np.float32)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(wide.view(np.uint32)[numbers], expected.view(np.uint32)[numbers])
    assert np.isnan(wide[~numbers]).all()


def test_scalars_and_empty_tensors(tmp_path):
    header = {"empty": entry("F32", [0, 4], 0, 0), "scalar": entry("F32", [], 0, 4), "__metadata__": {"format": "pt"}}
    folder = SafetensorsFolder(write_raw(tmp_path / "model.safetensors", header, struct.pack("<f", 2.5)))
    assert folder.read("empty").shape == (0, 4)
    assert folder.read("scalar").shape == ()
    assert folder.read("scalar") == 2.5
    assert set(folder.names) == {"empty", "scalar"}


def test_a_file_without_data(tmp_path):
    write_raw(tmp_path / "model.safetensors", {})
    assert not SafetensorsFolder(tmp_path).names


@pytest.mark.parametrize("kept", [0, 5, 8, 60, -1000, -1])
def test_truncated_file_says_how_much_is_missing(tmp_path, kept):
    whole = (FIXTURE / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:kept])
    if kept in (0, 5):
        words = r"model\.safetensors is not a safetensors file"
    elif kept < 0:
        words = rf"model\.safetensors is truncated.* {-kept} are missing"
    else:
        header_bytes = int.from_bytes(whole[:8], "little")
        words = rf"model\.safetensors is truncated.* {8 + header_bytes - kept} are missing"
    with pytest.raises(ConfigError, match=words):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"{nonsense", b"", "its header is not JSON"),
        (b"[1]", b"", "its header is not a JSON object"),
        ({"x": 3}, b"", "entry for x has no dtype, shape and data_offsets"),
        ({"x": {"dtype": "F32", "shape": [1]}}, b"1234", "entry for x has no dtype"),
        ({"x": entry("F32", [1], 0, 8)}, b"12345678", r"x F32\[1\] takes 4 bytes, not 8"),
        ({"x": entry("F32", [-1], 0, 4)}, b"1234", "shape or the offsets of x are not whole numbers"),
        ({"x": entry("F32", [1], 4.0, 8)}, b"1234", "shape or the offsets of x are not whole numbers"),
        ({"x": entry("F4", [1], 0, 1)}, b"1", "x has type 'F4', which is not supported"),
        ({"x": entry("U8", [4], 0, 4), "y": entry("U8", [4], 2, 6)}, b"123456", "data of y overlaps"),
        ({"x": entry("U8", [2], 0, 2), "y": entry("U8", [2], 4, 6)}, b"123456", "data of y leaves a hole of 2 bytes"),
        ({"x": entry("U8", [2], 0, 2)}, b"123", "1 bytes after the last tensor"),
    ],
)
def test_broken_headers(tmp_path, header, data, words):
    with pytest.raises(ConfigError, match=rf"model\.safetensors.*{words}"):
        SafetensorsFolder(write_raw(tmp_path / "model.safetensors", header, data))


def test_things_that_are_not_weights(tmp_path):
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors file"):
        SafetensorsFolder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(ConfigError, match=r"Git LFS pointer.*git lfs pull"):
        SafetensorsFolder(tmp_path)
    write_raw(file, b"{}", header_bytes=2**40)
    with pytest.raises(ConfigError, match="is not a safetensors file"):
        SafetensorsFolder(tmp_path)


def test_index_is_checked(tmp_path):
    weight_map = write_shards(tmp_path, SMALL)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks 1 of the 3 files .* names: model-00002-of-00003\.safetensors"):
        SafetensorsFolder(tmp_path)
    write_shards(tmp_path, SMALL)
    write_index(tmp_path, weight_map | {"tensor.9": "model-00001-of-00003.safetensors"})
    with pytest.raises(
        ConfigError, match=r"says that tensor\.9 is in model-00001-of-00003\.safetensors, but it is not"
    ):
        SafetensorsFolder(tmp_path)
    write_index(tmp_path, {"tensor.0": "../outside.safetensors"})
    with pytest.raises(ConfigError, match="which is not a file name"):
        SafetensorsFolder(tmp_path)
    write_index(tmp_path, {})
    with pytest.raises(ConfigError, match="has no weight_map"):
        SafetensorsFolder(tmp_path)


def test_one_tensor_in_two_files(tmp_path):
    write_shards(tmp_path, SMALL, index=False)
    safetensors.numpy.save_file({"tensor.3": np.zeros(1, np.float32)}, tmp_path / "zzz.safetensors")
    with pytest.raises(ConfigError, match=r"holds tensor\.3 twice: in model-00001-of-00003\.safetensors and in zzz"):
        SafetensorsFolder(tmp_path)


def test_type_table_is_whole():
    assert set(BYTES) == set(DTYPES)
    assert DTYPES["F8_E4M3"] == ml_dtypes.float8_e4m3fn
