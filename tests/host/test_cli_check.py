"""`tpu-serve check`: its numbers against those of published models and of the engine, what it advises, and how it ends."""

import dataclasses
import json
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from cases import FIXTURES

from tpu_serve.cli import main as cli
from tpu_serve.config import EngineConfig
from tpu_serve.engine import build
from tpu_serve.engine.placement import Placement
from tpu_serve.engine.plan import EnginePlan

PUBLISHED = runpy.run_path(str(Path(__file__).parents[1] / "models" / "published_configs.py"))["PUBLISHED"]
GIB = 2**30


def run(capsys, *words):
    code = cli.main(["check", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def check(capsys, tmp_path):
    """A published model with changes to its config, what is found out about it, and the exit code."""

    def ask(name, *words, **changes):
        config = {"architectures": ["AnyForCausalLM"], **PUBLISHED[name].config, **changes}
        (tmp_path / "config.json").write_text(json.dumps(config))
        code, out, err = run(capsys, tmp_path, "--json", *words)
        assert code in (0, 2)
        found = json.loads(out)
        assert (code == 0) == found["fits"]
        assert err == ("" if found["fits"] else f"tpu-serve: error: {found['problem']}\n")
        return found

    return ask


def test_qwen3_30b_on_eight_devices(check):
    """4 KV heads are there twice each, one on each of 8 devices; query heads, experts and vocabulary are split."""
    found = check("Qwen3-30B-A3B", "--chip", "v6e", "-tp", 8)
    layers, hidden = 48, 2048
    assert found["param_bytes_by_kind"] == {
        "embedding and head": 2 * (151936 * hidden) * 2 // 8,
        "experts": layers * 128 * 3 * hidden * 768 * 2 // 8,
        "attention": layers * 2 * hidden * (4096 // 8 + 128) * 2,
        "norms, routers and others": (layers * (2 * hidden + 2 * 128 + hidden * 128) + hidden) * 2,
    }
    assert found["param_bytes"] == sum(found["param_bytes_by_kind"].values())
    (cache,) = found["caches"]
    assert (cache["window"], cache["num_layers"]) == (None, layers)
    assert (cache["token_bytes"], cache["token_bytes_on_device"]) == (2 * 98_304, 24_576)
    assert cache["sequence_pages"] == 40960 // 128
    assert cache["sequence_bytes_on_device"] == 40960 * 24_576
    of_sampler = 256 * (2 * 151936 + 512 * 12)  # a count for each token and a table of biases, for two slots a sequence
    assert found["plan"]["sampler_bytes"] == of_sampler
    assert found["figures"] == "calculated"
    free = int(32 * GIB * 0.9) - found["param_bytes"] - of_sampler - found["temporary_bytes"] - found["code_bytes"]
    assert found["temporary_bytes"] > 2048 * 2048 * 2
    assert cache["num_pages"] == free // (128 * 24_576)
    assert found["concurrency"] == pytest.approx((cache["num_pages"] - 1) / 320)
    assert found["state"] is None


def test_qwen3_30b_on_four_devices(check):
    found = check("Qwen3-30B-A3B", "--chip", "v6e", "-tp", 4, "--kv-cache-dtype", "int8")
    (cache,) = found["caches"]
    values, scales = 48 * 2 * 4 * 128, 48 * 2 * 4 * 4
    assert (cache["token_bytes"], cache["token_bytes_on_device"]) == (values + scales, (values + scales) // 4)
    split = {line["path"]: line["split"] for line in found["weights"]}
    assert split["layers.*.attention.q_proj"] == ["heads"]
    assert split["layers.*.attention.v_proj"] == ["kv_heads"]
    assert split["layers.*.experts.down"] == ["experts"]
    assert split["layers.*.router"] == []
    assert {line["count"] for line in found["weights"] if line["path"].startswith("layers")} == {48}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-30B-A3B", 3.35),
        ("Qwen3-235B-A22B", 22.19),
        ("Qwen3-Next-80B-A3B", 3.87),
        ("Qwen3.5-35B-A3B", 3.45),
        ("gemma-4-26B-A4B", 3.82),
        ("gpt-oss-20b", 4.19),
        ("Mixtral-8x7B", 12.88),
    ],
)
def test_parameters_that_a_token_meets(check, name, billions):
    found = check(name, "--chip", "v5p", "-tp", 64)
    assert found["num_active_params"] / 1e9 == pytest.approx(billions, rel=0.003)
    assert found["num_params"] / 1e9 == pytest.approx(PUBLISHED[name].billions, rel=0.005)


@pytest.mark.parametrize(
    "name",
    [
        "Qwen1.5-MoE-A2.7B",
        "Qwen3-30B-A3B",
        "Qwen3-8B",
        "Qwen3-Next-80B-A3B",
        "Qwen3.5-35B-A3B",
        "Mixtral-8x7B",
        "gpt-oss-20b",
        "gemma-4-26B-A4B",
        "gemma-3-4b",
    ],
)
def test_every_weight_has_a_kind_and_few_lines(check, name):
    found = check(name, "--chip", "v5p", "-tp", 1)
    kinds = found["param_bytes_by_kind"]
    assert sum(kinds.values()) == found["param_bytes"]
    assert kinds["norms, routers and others"] < 0.01 * found["param_bytes"]
    assert len(found["weights"]) < 40
    assert sum(cache["token_bytes"] for cache in found["caches"]) == PUBLISHED[name].kv_bytes


def test_windows_of_gemma_4(check):
    found = check("gemma-4-26B-A4B", "--chip", "v6e", "-tp", 2, "--max-model-len", "32k")
    everything, near = found["caches"]
    assert (everything["window"], everything["num_layers"], everything["token_bytes"]) == (None, 5, 20_480)
    assert (near["window"], near["num_layers"], near["token_bytes"]) == (1024, 25, 204_800)
    assert (everything["sequence_pages"], near["sequence_pages"]) == (256, 9), "1024 tokens may touch nine pages"
    assert near["token_bytes_on_device"] == 102_400
    assert [everything["num_pages"], near["num_pages"]] == found["plan"]["num_pages"]
    shapes = {tuple(line["shape"]): line for line in found["weights"] if line["path"].endswith("q_proj")}
    assert {shape: line["count"] for shape, line in shapes.items()} == {(2816, 4096): 25, (2816, 8192): 5}
    (experts,) = (line for line in found["weights"] if line["path"].endswith("experts.down"))
    assert (experts["unpadded"], experts["shape"]) == ([128, 704, 2816], [128, 768, 2816])


def test_state_of_qwen3_next(check):
    found = check("Qwen3-Next-80B-A3B", "--chip", "v6e", "-tp", 8)
    delta, tail = 32 * 128 * 128 * 4, (2 * 16 * 128 + 32 * 128) * 3 * 2
    assert found["state"]["num_layers"] == 36
    assert found["state"]["sequence_bytes"] == 36 * (delta + tail)
    assert found["state"]["sequence_bytes_on_device"] == 36 * (delta + tail) // 8
    assert found["state"]["num_slots"] == 256
    rows = 256 + found["plan"]["num_snapshots"]
    pages = found["plan"]["num_pages"][0] * 128 * 12_288  # one of two KV heads, which four devices have each
    assert found["cache_bytes"] == rows * 36 * (delta + tail) // 8 + pages


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}


@pytest.mark.parametrize(
    ("words", "format", "bits"),
    [
        (("--chip", "v6e"), "int8_channel", 8),
        (("--chip", "v6e", "--requantize", "off"), "mxfp4", 4),
        (("--chip", "tpu7x"), "fp4_block512", 4),
        (("--chip", "cpu"), "bfloat16", 16),
    ],
)
def test_format_of_gpt_oss(check, words, format, bits):
    found = check("gpt-oss-20b", *words, quantization_config=MXFP4)
    assert found["experts"]["format"] == format
    (down,) = (line for line in found["weights"] if line["path"].endswith("experts.down"))
    (num_experts, inner, hidden), (_, own_inner, _) = down["shape"], down["unpadded"]
    assert (num_experts, own_inner) == (32, 2880)
    scale_rows = {"int8_channel": 1, "mxfp4": -(-inner // 32), "fp4_block512": -(-inner // 512)}.get(format, 0)
    expected = num_experts * (inner * hidden * bits // 8 + scale_rows * hidden * 4)
    assert down["bytes_on_device"] == 24 * expected


def test_advice_is_tried_and_as_small_as_it_can_be(check):
    words = ("Qwen3-30B-A3B", "--chip", "v6e", "-tp", 2, "--max-model-len", 2048)
    found = check(*words)
    *advice, fewer = (one["flags"] for one in found["remedies"])
    assert advice == ["--quantization int8", "--quantization fp8", "--tensor-parallel-size 4"]
    assert re.search(r"Steps of 2048 tokens need .* \(calculated\).* Lower --max-num-batched-tokens", found["problem"])
    for flags in (*advice, fewer):
        assert check(*words, *flags.split())["fits"], flags
    flag, tokens = fewer.split()
    assert flag == "--max-num-batched-tokens"
    assert not check(*words, flag, int(tokens) + 1)["fits"]


def test_weights_that_no_slice_can_hold(check, capsys, tmp_path):
    found = check("Qwen3-235B-A22B", "--chip", "v5e", "-tp", 32, moe_intermediate_size=30720)
    assert "The weights need 265.09 GiB on each device" in found["problem"]
    assert (found["plan"], found["remedies"], found["moe_plans"]) == (None, [], [])
    _, out, _ = run(capsys, tmp_path, "--chip", "v5e", "-tp", 32)
    assert "No change of types, sequences, their length or devices was found that would fit" in out


def test_the_next_slice_is_advised_and_fits(check):
    found = check("Qwen3-235B-A22B", "--chip", "v5p", "-tp", 4)
    by_devices = [one for one in found["remedies"] if "tensor_parallel_size" in one["options"]]
    assert [one["flags"] for one in by_devices] == ["--tensor-parallel-size 8"]
    assert check("Qwen3-235B-A22B", "--chip", "v5p", "-tp", 8)["fits"]
    (many,) = check("Qwen3-235B-A22B", "--chip", "v6e", "-tp", 8)["remedies"]
    assert many["flags"] == "--tensor-parallel-size 32"
    assert "several hosts are not supported" in many["note"]


def test_two_changes_where_one_host_needs_them(check):
    words = ("Qwen3-Next-80B-A3B", "--chip", "v5e", "--max-model-len", "8k", "--max-num-seqs", 64, "-tp", 4)
    advice = {one["flags"]: one for one in check(*words)["remedies"]}
    alone = [one for one in advice.values() if len(one["options"]) == 1]
    assert [one["flags"] for one in alone] == ["--tensor-parallel-size 16"]
    both = advice["--quantization int8 --tensor-parallel-size 8"]
    assert (both["factor"], both["note"]) == (4, "")
    assert check(*words[:-1], 8, "--quantization", "int8")["fits"]
    assert not check(*words[:-1], 8)["fits"]
    assert not check(*words, "--quantization", "int8")["fits"]


def test_too_many_sequences_for_their_state(check):
    words = ("Qwen3-Next-80B-A3B", "--chip", "v6e", "-tp", 8, "--max-model-len", "8k")
    found = check(*words, "--max-num-seqs", 2000)
    (fewer,) = (one["options"]["max_num_seqs"] for one in found["remedies"] if "max_num_seqs" in one["options"])
    assert check(*words, "--max-num-seqs", fewer)["fits"]
    assert not check(*words, "--max-num-seqs", fewer + 1)["fits"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("--num-pages", 100_000), "without --num-pages"),
        (("--kv-cache-memory-bytes", "1m"), "without --kv-cache-memory-bytes"),
        (("--device-memory-utilization", 0.2), "without --device-memory-utilization"),
        (("--num-state-snapshots", 3), "without --num-state-snapshots"),
        (("--max-model-len", "100k"), "--max-model-len 40960"),
        (("--max-num-seqs", 64, "--max-num-batched-tokens", 32), "--max-num-seqs 32"),
    ],
)
def test_what_was_asked_for_is_the_first_to_go(check, words, advice):
    found = check("Qwen3-30B-A3B", "--chip", "v6e", "-tp", 8, *words)
    assert found["remedies"][0]["flags"] == advice


@pytest.mark.parametrize("gib", [3, 30])
def test_compiled_figures_take_the_place_of_calculated_ones(check, capsys, tmp_path, monkeypatch, gib):
    """A compiler that says of every step that it takes so much beside its arguments, and 7 MiB of code."""

    def compiler(config, hf_config, chip):
        def largest(plan):
            held = found["param_bytes"] + plan.sampler_bytes + plan.cache_bytes
            figures = {"argument": held, "output": 0, "alias": 0, "temp": gib * GIB, "generated_code": 7 * 2**20}
            told = types.SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in figures.items()})
            return types.SimpleNamespace(memory_analysis=lambda: told)

        return largest

    words = ("Qwen3-30B-A3B", "--chip", "v6e", "-tp", 8)
    found = check(*words)
    monkeypatch.setattr("tpu_serve.cli.check._compiler", compiler)
    compiled = check(*words, "--compile")
    _, out, _ = run(capsys, tmp_path, *words[1:], "--compile")
    if gib == 3:
        assert (compiled["figures"], compiled["temporary_bytes"]) == ("compiled", 3 * GIB)
        fewer = found["caches"][0]["num_pages"] - compiled["caches"][0]["num_pages"]
        more = 3 * GIB + compiled["code_bytes"] - found["temporary_bytes"] - found["code_bytes"]
        assert fewer == pytest.approx(more / (128 * 24_576), abs=2)
        assert "steps, compiled: 3.000 GiB of temporary arrays of the largest" in out
    else:
        assert "(compiled)" in compiled["problem"]
        assert "Steps of 2048 tokens need 30.00 GiB" in compiled["problem"]


@pytest.mark.parametrize("num_pages", range(5, 12))
def test_the_longest_length_that_fits(capsys, num_pages):
    """The embedded model keeps 16 KiB of each page of 16 tokens; one page is for padding."""
    words = ("--load-format", "dummy", "--chip", "cpu", "--json", "--kv-cache-memory-bytes", num_pages * 16 * 1024)
    code, out, _ = run(capsys, *words)
    advice = [one["options"] for one in json.loads(out)["remedies"]]
    assert code == 2
    assert [one["max_model_len"] for one in advice if "max_model_len" in one] == [(num_pages - 1) * 16]


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"tensor_parallel_size": 3, "max_num_seqs": 5}),
        ("qwen3_moe", {"quantization": "int8", "tensor_parallel_size": 2, "kv_cache_dtype": "fp8", "page_size": 32}),
        ("qwen3_moe_fp8", {"requantize": "off"}),
        ("gpt_oss_mxfp4", {"tensor_parallel_size": 2}),
        ("gemma4", {"num_pages": 99, "max_model_len": 256}),
        ("qwen3_next", {"tensor_parallel_size": 2, "max_num_seqs": 7}),
        ("qwen3", {"dtype": "float32"}),
    ],
)
def test_it_says_what_the_server_does(capsys, monkeypatch, name, options):
    """The engine is built up to where it reads weights, on simulated devices."""
    seen = []
    monkeypatch.setattr(build, "_report", lambda *everything: seen.extend(everything))

    def stop(phase, share):
        if phase == "weights":
            raise Stop

    config = EngineConfig.from_options(model=str(FIXTURES / name), **options)
    with pytest.raises(Stop):
        build.build_engine(config, stop)
    (plan,) = (one for one in seen if isinstance(one, EnginePlan))
    (placement,) = (one for one in seen if isinstance(one, Placement))
    flags = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", value)]
    code, out, _ = run(capsys, FIXTURES / name, "--json", *flags)
    found = json.loads(out)
    assert code == 0
    assert (found["chip"], found["num_devices"]) == ("cpu", placement.mesh.size)
    assert found["plan"] == json.loads(json.dumps(dataclasses.asdict(plan)))
    assert found["param_bytes"] == placement.param_bytes
    assert found["memory_bytes"] == placement.chip.memory_bytes
    assert found["num_params"] == seen[0].num_params
    layout = placement.cache_on_one_device
    assert [one["token_bytes_on_device"] * plan.page_size for one in found["caches"]] == [
        layout.page_bytes(plan.page_size, window) for window in layout.windows
    ]
    tokens = [size for line in found["moe_plans"] for size in line["num_tokens"]]
    assert sorted(tokens) == ([] if name == "qwen3" else list(plan.buckets))


def test_the_page_to_read(capsys):
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "Qwen3MoeForCausalLM on 1 x cpu"
    assert "  4 x  layers.*.attention.q_proj     [128, 128]        bfloat16  128.0 KiB" in lines
    assert "134 tensors of 3,943,168 bytes, whose headers agree with config.json" in out
    assert (
        "8 tokens: gathered (gathered by rule, not measured; not fused: on a CPU the kernel is only simulated)" in out
    )
    assert "256 tokens: ragged (ragged by rule, not measured; not fused: on a CPU the kernel is only simulated)" in out
    assert "64.0 sequences of 2,048 tokens at a time" in out
    assert out == "".join(f"{line.rstrip()}\n" for line in lines)


def test_headers_of_another_model_are_refused(capsys, tmp_path):
    shutil.copytree(FIXTURES / "qwen3_moe", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, "num_hidden_layers": config["num_hidden_layers"] - 1}))
    code, out, err = run(capsys, tmp_path)
    assert (code, out) == (2, "")
    assert "holds tensors that the model does not know" in err
    assert run(capsys, tmp_path, "--load-format", "dummy")[0] == 0
    file.write_text(json.dumps(config))
    assert run(capsys, tmp_path, "--hf-overrides", '{"num_hidden_layers": 1}')[0] == 0


def test_warnings_are_notes(capsys, caplog):
    code, out, err = run(capsys, FIXTURES / "qwen3_next", "--num-state-snapshots", 0)
    assert (code, err, caplog.records) == (0, "", [])
    assert out.count("The prefix cache has no room for recurrent state") == 1
    assert "There is no v6e slice of 3 devices" in run(capsys, "--chip", "v6e", "-tp", 3)[1]


def test_the_flags_of_serve_do(capsys):
    words = ("--max-model-len", "auto", "--num-pages", 20, "--port", 1, "--api-key", "secret", "--enforce-eager")
    code, out, err = run(capsys, "--chip", "cpu", *words)
    assert code == 0
    assert "1.0 sequences of 304 tokens at a time" in out
    assert "secret" not in out + err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--chip", "cpu", "--compile"), "--compile is for TPUs: name one with --chip"),
        (("--chip", "v6f"), "--chip v6f is unknown; known are v5e, v5p, v6e, tpu7x, cpu"),
        (("--prot", 1), "unknown flag --prot"),
        (("--page-size", 24), "--page-size must be a power of two"),
        (("no/such/model",), "no/such/model"),
        ((FIXTURES / "qwen3", "--quantization", "int8"), "has no experts, which --quantization would be about"),
        ((FIXTURES / "qwen3_moe_fp8", "--quantization", "int8"), "is for checkpoints that are not quantised"),
        (("--chip", "v6e", "-tp", 2, "--moe-strict-tables"), "--moe-strict-tables: no row of"),
    ],
)
def test_what_cannot_be_checked(capsys, words, message):
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("tpu-serve: error: ")
    assert message in err


def test_no_device_is_asked_for_when_the_chip_is_named():
    program = (
        "import sys; from tpu_serve.cli.main import main; code = main(['check', '--chip', 'v6e', '-tp', '64', '--json'])\n"
        "from jax.extend import backend; import jax._src.xla_bridge as bridge\n"
        "sys.exit(code or bridge.backends_are_initialized())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["num_devices"] == 64
