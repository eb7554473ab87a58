"""`bench kernels`: what may be asked for, and what its table says."""

import pytest

from tpu_serve.bench import kernels
from tpu_serve.bench.compiled.report import CompileWorkerFailed
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError

SMALL = {
    "chips": ("v6e",),
    "workloads": ("Qwen3-30B-A3B",),
    "formats": ("bfloat16",),
    "tokens": (64,),
    "device_counts": (8,),
}
FOUND = {
    "error": None,
    "kernels": {
        "fused_moe_d": {
            "hbm_bytes": 151e6,
            "ici_bytes": 5e5,
            "mxu_busy": 0.1,
            "hottest_loop": {"mxu_busy": 0.25, "spills": 3},
        },
        "fusion.1": {"error": "not read"},
    },
    "main_kernel": "fused_moe_d",
    "modelled_us": 203.6,
    "temporary_bytes": 2**20,
    "compile_seconds": 12.0,
}


def rows(monkeypatch, answer):
    def report(*arguments):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(kernels, "report", report)
    told = []
    found = list(kernels.sweep(kernels.check(kernels.Selection(**SMALL)), None, 60, 2, told.append))
    assert told == found
    return found


def test_the_table_has_the_figures_and_says_what_they_are(monkeypatch):
    (row,) = rows(monkeypatch, FOUND)
    text = kernels.text([row])
    cells = dict(zip(kernels.COLUMNS, kernels.line(row), strict=True))
    assert row.outcome == "compiled"
    # 204 us over the calculated bound of 102 us.
    assert (cells["model us"], cells["bound us"], cells["ratio"], cells["by"]) == ("204", "102", "2.00", "hbm")
    assert (cells["HBM MB"], cells["MXU"], cells["hot MXU"], cells["hot spills"]) == ("151.0", "10%", "25%", "3")
    assert cells["mode"] == "D"
    assert "1 compiled, 0 refused, 0 failed" in text
    assert "nothing here was measured on a TPU" in text


@pytest.mark.parametrize(
    ("answer", "words"),
    [(FOUND | {"error": "MosaicError: no"}, "MosaicError: no"), (CompileWorkerFailed("it died"), "it died")],
)
def test_what_the_compiler_refuses_is_in_the_table(monkeypatch, answer, words):
    (row,) = rows(monkeypatch, answer)
    assert (row.outcome, row.reason) == ("failed", words)
    assert f"failed: {words}" in kernels.text([row])


def test_what_the_kernel_refuses_is_not_compiled(monkeypatch):
    monkeypatch.setattr(kernels, "supports", lambda problem, chip: "because")
    (row,) = rows(monkeypatch, AssertionError("never asked"))
    assert (row.outcome, row.reason) == ("refused", "because")


def test_every_cell_is_there_once():
    cells = kernels.check(kernels.Selection())
    assert len({cell.label for cell in cells}) == len(cells) > 500


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "needs --compiled"),
        (["--compiled", "--chip", "v9"], "--chip v9 is unknown; known are v5e, v5p, v6e, tpu7x"),
        (["--compiled", "--workload", "GPT"], "--workload GPT is unknown"),
        (["--compiled", "--format", "fp3"], "--format fp3 is unknown"),
        (["--compiled", "--num-devices", "5"], "--num-devices 5 is unknown"),
        (["--compiled", "--chip", "v6e", "--format", "mxfp4"], "nothing to do"),
        (["--compiled", "--output-json", "/nowhere/file.json"], "--output-json /nowhere/file.json cannot be written"),
    ],
)
def test_wrong_choices_are_named(capsys, options, words):
    assert main(["bench", "kernels", *options]) == 2
    assert words in capsys.readouterr().err


def test_a_failed_cell_is_an_exit_code(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(kernels, "report", lambda *arguments: FOUND | {"error": "MosaicError: no"})
    file = tmp_path / "table.json"
    choice = [
        "--chip",
        "v6e",
        "--workload",
        "Qwen3-30B-A3B",
        "--format",
        "bfloat16",
        "--num-tokens",
        "64",
        "--num-devices",
        "8",
    ]
    assert main(["bench", "kernels", "--compiled", *choice, "--output-json", str(file)]) == 1
    assert '"outcome": "failed"' in file.read_text()
    assert "failed: MosaicError: no" in capsys.readouterr().out


def test_an_empty_selection_is_an_error():
    with pytest.raises(ConfigError, match="nothing to do"):
        kernels.check(kernels.Selection(chips=("v5e",), formats=("fp8_channel",)))
