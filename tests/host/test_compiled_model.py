"""The modelled half of a compiled schedule: addresses, DMA engines, links, slices, bounds."""

import os

import numpy as np
import pytest

from tpu_serve.bench.compiled.engines import Engines
from tpu_serve.bench.compiled.machine import CORES, DMA_LATENCY_SECONDS, HBM_EFFICIENCY, LINK_LATENCY_SECONDS
from tpu_serve.bench.compiled.memory import Memory, plain_flag, tiled
from tpu_serve.bench.compiled.report import bound
from tpu_serve.bench.compiled.schedule import parse
from tpu_serve.bench.compiled.topology import environment, topology
from tpu_serve.config import ConfigError

FLAG, OTHER = 1 << 26, 2 << 26
REMOTE = 0x4000


def engines(chip="v6e", grid=(2, 4)):
    return Engines(CORES[chip], grid, num_blocks=1)


def test_tiles():
    flat = np.arange(300)
    assert tiled(flat).tolist() == flat.tolist()
    assert tiled(np.array([-1, 2])).tolist() == [(1 << 32) - 1, 2]
    assert tiled(np.array([1.5], np.float32)).tolist() == [0x3FC00000]
    table = np.arange(16 * 200).reshape(16, 200)
    words = tiled(table)
    assert words.shape == (16 * 256,)
    for row, column in ((0, 0), (1, 2), (7, 127), (0, 128), (8, 0), (15, 199)):
        place = (row // 8 * 2 + column // 128) * 1024 + row % 8 * 128 + column % 128
        assert words[place] == table[row, column]
    assert tiled(np.arange(12).reshape(3, 4))[2 * 128 + 1] == 9, (
        "fewer than 8 rows are not padded beyond a power of two"
    )
    assert tiled(np.arange(12).reshape(3, 4)).shape == (512,)
    assert tiled(np.arange(24).reshape(2, 3, 4))[512 + 128 + 2] == 18


def test_flags_of_other_devices_are_this_ones_by_symmetry():
    memory = Memory(parse("  0 : { %1 = vsyncpa [#allocation3], 0 ;; %2 = vsyncpa [#allocation4], 0 }\n"), {})
    first, second = memory.symbol("#allocation3"), memory.symbol("#allocation4")
    assert first != second
    for bits in (0, 0x4000, 0x2000, 0x20000, 0x8000 | 37 << 17):
        assert plain_flag((first + 5) | bits) == first + 5
    assert memory.symbol("#allocation3") == first


def test_hbm_streams_at_its_rate_and_completes_after_the_latency():
    core, made = CORES["v6e"], engines()
    granules, number = 1 << 15, 10
    for _ in range(number):
        made.local(0.0, "hbm-to-vmem", granules, FLAG)
    stall = made.wait(0.0, FLAG, number * granules)
    size = number * granules * 32
    seconds = size / (1.64e12 * HBM_EFFICIENCY) + DMA_LATENCY_SECONDS
    assert stall == pytest.approx(core.cycles(seconds))
    assert (made.dma_counts["hbm-to-vmem"], made.dma_bytes["hbm-to-vmem"], made.hbm_bytes) == (number, size, [size])
    assert made.stall_dma == [stall]
    assert made.wait(stall, FLAG, number * granules) == 0, "waiting takes nothing away"
    made.signal(FLAG, (1 << 32) - number * granules)
    assert made.read(stall, FLAG) == 0


def test_small_dmas_are_limited_by_their_number():
    made = engines()
    for _ in range(1000):
        made.local(0.0, "hbm-to-vmem", 16, FLAG)
    assert made.wait(0.0, FLAG, 16000) == pytest.approx(CORES["v6e"].cycles(1000 * 20e-9 + DMA_LATENCY_SECONDS))


def test_copies_within_hbm_read_and_write_it():
    made = engines()
    made.local(0.0, "hbm-to-hbm", 1000, FLAG)
    assert made.hbm_bytes == [64000]


def test_nothing_is_copied_when_nothing_is_asked():
    made = engines()
    made.local(0.0, "hbm-to-vmem", 0, FLAG)
    made.general(0.0, "hbm-to-vmem", 0, FLAG, OTHER, REMOTE | 1)
    assert not made.dma_counts


def test_peers_answer_remote_copies():
    made = engines()
    made.general(0.0, "vmem-to-vmem", 1 << 15, FLAG | 0x4000, OTHER | 0x20000, REMOTE | 3)
    rate = CORES["v6e"].link_bytes_per_cycle((2, 4))
    left = (1 << 20) / rate
    assert made.wait(0.0, OTHER, 1 << 15) == pytest.approx(left + CORES["v6e"].cycles(DMA_LATENCY_SECONDS) / 2)
    assert made.stall_peer == [0.0], "that it has left is the device's own affair"
    arrived = left + CORES["v6e"].cycles(LINK_LATENCY_SECONDS)
    assert made.wait(0.0, FLAG, 1 << 15) == pytest.approx(arrived)
    assert made.stall_peer == [pytest.approx(arrived)]
    assert (dict(made.dma_bytes), made.peer_bytes) == ({"remote vmem-to-vmem": 1 << 20}, [1 << 20])


def test_a_remote_copy_to_itself_is_local():
    made = engines()
    made.general(0.0, "hbm-to-vmem", 64, FLAG, OTHER, REMOTE)
    assert dict(made.dma_counts) == {"hbm-to-vmem": 1}
    assert made.wait(0.0, OTHER, 64) == 0
    assert made.wait(0.0, FLAG, 64) > 0
    made = engines("tpu7x", (2, 2, 1))
    made.general(0.0, "hbm-to-vmem", 64, FLAG, OTHER, REMOTE | 1 << 26)
    assert dict(made.dma_counts) == {"sibling hbm-to-vmem": 1}, "the other device of the chip"


def test_barriers():
    made = engines()
    for device in range(1, 8):
        made.remote_signal(100.0, 0x8008 | device << 17, 1)  # a number that names none of the program's semaphores
    made.signal(FLAG, (1 << 32) - 7)
    assert made.wait(100.0, FLAG, 0) == pytest.approx(CORES["v6e"].cycles(LINK_LATENCY_SECONDS))
    assert made.read(1e9, FLAG) == 0
    made.signal(FLAG, (1 << 32) - 1)
    made.wait(200.0, FLAG, 0)
    assert made.unanswered == 1, "one more than was signalled"


def test_what_peers_send_too_much_is_seen():
    made = engines()
    made.general(0.0, "vmem-to-vmem", 64, FLAG, OTHER, REMOTE | 3)
    assert not made.has_surplus(0.0)
    assert made.has_surplus(1e9)
    made.signal(FLAG, (1 << 32) - 64)
    assert not made.has_surplus(1e9)


def test_operands_have_their_words_wherever_they_lie():
    text = "".join(
        f"  {index:#x} : {{ %s{index}_s{index} = inlined_call_operand.{space} [shape: s32[{shape}], index: {index}, kind: input] }}\n"
        for index, (space, shape) in enumerate((("vmem", "300"), ("hbm", "4000000"), ("hbm", "16,200")))
    )
    text = text.replace("0x0 ", "0 ", 1)
    table = np.arange(16 * 200).reshape(16, 200)
    for unit in (32, 512):
        memory = Memory(parse(text), {0: np.arange(300), 2: table}, hbm_address_bytes=unit)
        memory.fill((memory.operand("%s0_s0") << 4) + 2, 1000, 2)
        assert [memory.smem[1000 + i] for i in range(16)] == list(range(16, 32)), "granules of 8 words"
        if unit == 32:
            memory.fill(memory.operand("%s2_s2") + 3, 2000, 1)
        else:
            memory.fill((memory.operand("%s2_s2") << 4) + 3, 2000, 1)
            memory.fill(memory.operand("%s2_s2"), 3000, 1)
            assert [memory.smem[3000 + i] for i in range(8)] == list(range(8))
        assert [memory.smem[2000 + i] for i in range(8)] == list(range(24, 32))
        assert not memory.assumptions
        memory.fill(memory.operand("%s1_s1"), 4000, 1)
        assert dict(memory.assumptions) == {"operand 1, copied into SMEM, is 0": 1}
        memory.fill(1000, 5000, 1)
        assert memory.smem[5003] == 19, "from SMEM to SMEM"
        memory.fill(7777, 6000, 1)
        assert memory.assumptions["unknown, copied into SMEM, is 0"] == 1


def test_large_operands_have_addresses():
    text = "".join(
        f"  {index:#x} : {{ %s{index}_s{index} = inlined_call_operand.hbm [shape: {shape}, index: {index}, kind: input] }}\n"
        for index, shape in enumerate(("bf16[128,4096,8192]", "f8e4m3fn[128,4096,8192]", "s32[4]"))
    )
    for unit in (32, 512):
        memory = Memory(parse(text.replace("0x0 ", "0 ", 1)), {2: [1, 2, 3, 4]}, hbm_address_bytes=unit)
        small, first, second = (memory.operand(f"%s{index}_s{index}") for index in (2, 0, 1))
        assert small < first
        assert second == first + 128 * 4096 * 8192 * 2 // unit
        assert (second + 128 * 4096 * 8192 // unit) * (16 if unit == 512 else 1) < 1 << 31, "signed comparisons hold"


def test_links():
    def rate(chip, count):
        core = CORES[chip]
        return core.link_bytes_per_cycle(topology(chip, count).grid) * core.clock_hz

    assert rate("v6e", 2) == pytest.approx(1e11)
    assert rate("v6e", 4) == pytest.approx(1.5e11), "two links carry 2 devices' 2/3"
    assert rate("v6e", 8) == pytest.approx(2e11 / 4 / (4 / 7))
    assert rate("v5e", 8) == pytest.approx(rate("v6e", 8) / 2)
    assert rate("tpu7x", 8) == pytest.approx(1.5e11), "four links, of which 4 devices fill 4/6 each"


@pytest.mark.parametrize("chip", list(CORES))
def test_clocks_agree_with_peaks(chip):
    core = CORES[chip]
    rows = 16 / core.matmul_cycles[""]
    peak = core.clock_hz * core.cores * core.matrix_units * 2 * rows * core.chip.matrix_unit**2
    assert peak == pytest.approx(core.chip.peak_ops["bfloat16"], rel=0.005)


def test_slices():
    found = {
        (chip, n): topology(chip, n) for chip, n in (("v5e", 8), ("v6e", 1), ("v5p", 8), ("tpu7x", 1), ("tpu7x", 8))
    }
    names = {key: (slice_.name, slice_.host_bounds) for key, slice_ in found.items()}
    assert names == {
        ("v5e", 8): ("v5e:2x4", None),
        ("v6e", 1): ("v6e:1x1", (1, 1, 1)),
        ("v5p", 8): ("v5p:2x2x2", None),
        ("tpu7x", 1): ("tpu7x:1x1x1", (1, 1, 1)),
        ("tpu7x", 8): ("tpu7x:2x2x1", None),
    }


@pytest.mark.parametrize(
    ("chip", "count", "words"),
    [
        ("v9", 4, "known are v5e"),
        ("v6e", 3, "no slice of 3 devices; there are 1, 2, 4, 8"),
        ("tpu7x", 5, "no slice of 5"),
        ("tpu7x", 6, "no slice of 6"),
        ("v6e", 0, "no slice of 0"),
    ],
)
def test_impossible_slices_are_refused(chip, count, words):
    with pytest.raises(ConfigError, match=words):
        topology(chip, count)


def test_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "something")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    with environment(LIBTPU_INIT_ARGS="--flag"):
        assert (os.environ["JAX_PLATFORMS"], os.environ["TPU_SKIP_MDS_QUERY"]) == ("cpu", "1")
        assert os.environ["LIBTPU_INIT_ARGS"] == "--flag"
    assert os.environ["JAX_PLATFORMS"] == "something"
    assert "TPU_SKIP_MDS_QUERY" not in os.environ


def test_bounds():
    assert bound({}, "v6e", 1) is None
    assert bound({"flops": 9.2e14, "hbm_bytes": 1.64e12 * 2}, "v6e", 1) == (pytest.approx(2e6), "hbm")
    assert bound({"flops": 1.84e15, "peak": "int8"}, "v6e", 1) == (pytest.approx(1e6), "mxu")
    assert bound({"ici_bytes": 1.5e11}, "v6e", 4) == (pytest.approx(1e6), "ici")
    assert bound({"bound_us": 7, "flops": 1e20}, "v6e", 4) == (7.0, "given")
    with pytest.raises(ConfigError, match="no arithmetic of its own in 'float8_e4m3fn'"):
        bound({"flops": 1, "peak": "float8_e4m3fn"}, "v6e", 1)
