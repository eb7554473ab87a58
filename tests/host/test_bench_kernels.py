"""`bench kernels`: what may be asked for, and what its table says."""

import dataclasses

import pytest

from tpu_serve.bench import fused_moe_cells, kernel_rows, kernels
from tpu_serve.bench.compiled.report import CompileWorkerFailed
from tpu_serve.bench.fused_moe import config_of
from tpu_serve.bench.fused_moe_cells import FusedMoe
from tpu_serve.bench.kernel_cells import Case, Cell
from tpu_serve.bench.kernel_rows import Row, sweep
from tpu_serve.bench.kernel_table import columns, line, text
from tpu_serve.cli.main import main
from tpu_serve.config import ConfigError
from tpu_serve.device.chip import TPU_CHIPS
from tpu_serve.kernels.fused_moe_v2.cases import WORKLOADS
from tpu_serve.kernels.fused_moe_v2.config import Config
from tpu_serve.moe_plan import lookup
from tpu_serve.moe_plan.key import key_of
from tpu_serve.tuning_tables.table import Entry, Provenance, Table

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
            "hbm_bytes": 150e6,
            "ici_bytes": 5e5,
            "mxu_busy": 0.1,
            "hottest_loop": {"mxu_busy": 0.25, "spills": 3},
        },
        "fusion.1": {"error": "not read"},
    },
    "copied_bytes": 1000000,
    "main_kernel": "fused_moe_d",
    "modelled_us": 203.6,
    "bound_us": 102.0,
    "analytic": {"limit": "hbm"},
    "untimed": {"unread": ["fusion.1"]},
    "temporary_bytes": 2**20,
    "compile_seconds": 12.0,
}


def rows(monkeypatch, answer):
    def report(*arguments, **options):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(kernel_rows, "report", report)
    return list(sweep(kernels.check(kernels.Selection(**SMALL)), None, 60, 2))


@dataclasses.dataclass(frozen=True)
class Rows:
    rows: int


class Gather(kernels.Kernel):
    """A kernel on one device that replaces a program of XLA's."""

    name = "gather"
    workloads = ("Qwen3-30B-A3B",)
    formats = ("bfloat16",)
    tokens = (8, 16)
    device_counts = known_device_counts = (1,)
    modes = ()
    columns = ("rows",)

    def cases(self, chip, workloads, formats, tokens, device_counts):
        for workload in workloads:
            for rows in tokens:
                for backend in ("tc", "xla") if 1 in device_counts and formats != () else ():
                    yield Case(f"{workload}-{chip}-R{rows}-{backend}", workload, chip, 1, Rows(rows), backend)

    def refusal(self, case, mode):
        return "too many" if case.problem.rows > 8 and case.backend == "tc" else None

    def config(self, case, mode):
        return {"rows": case.problem.rows}

    def target(self, case, mode):
        return f"gathers:{case.backend}", {"rows": case.problem.rows}

    def figures(self, case, config, found):
        return (str(config["rows"]),)


def pair(xla_us, untimed=()):
    """Rows of a case and of XLA's program for it."""
    monkeyed = FOUND | {"untimed": {}}
    found = {"tc": monkeyed, "xla": monkeyed | {"modelled_us": xla_us, "untimed": dict.fromkeys(untimed, 1)}}
    kernel = Gather()
    return [
        Row(Cell(kernel, case), None, "compiled", "", {"rows": 8}, found[case.backend])
        for case in kernel.cases("v6e", kernel.workloads, None, (8,), (1,))
    ]


def cells_of(lines, name):
    """The column `name` of a printed table, by label."""
    head = next(line for line in lines if line.startswith("cell"))
    place, width = head.index(f"  {name}") + 2, len(name)
    return {row.split()[0]: row[place : place + width].strip() for row in lines if row.startswith("Qwen")}


def test_the_table_has_the_figures_and_says_what_they_are(monkeypatch):
    (row,) = rows(monkeypatch, FOUND)
    shown = text([row])
    cells = dict(zip(columns(row.cell.kernel), line(row), strict=True))
    assert row.outcome == "compiled"
    assert (cells["model us"], cells["bound us"], cells["ratio"], cells["by"]) == ("204", "102", "2.00", "hbm")
    assert (cells["HBM MB"], cells["MXU"], cells["hot MXU"], cells["hot spills"]) == ("151.0", "10%", "25%", "3")
    assert (cells["mode"], cells["untimed"]) == ("D", "u")
    assert "1 compiled, 0 refused, 0 failed" in shown
    assert "untimed u: kernels whose schedule could not be read" in shown
    assert "untimed c" not in shown
    assert "nothing here was measured on a TPU" in shown
    assert "of tc" not in shown


def test_the_program_that_a_kernel_replaces_is_compared_with_it():
    lines = text(pair(407.2)).splitlines()
    tc, xla = (f"Qwen3-30B-A3B-v6e-R8-{backend}" for backend in ("tc", "xla"))
    assert cells_of(lines, "model us") == {tc: "204", xla: "407"}
    assert cells_of(lines, "of tc") == {tc: "-", xla: "2.00"}
    assert cells_of(lines, "rows") == {tc: "8", xla: "8"}
    assert "untimed" not in "".join(lines)


@pytest.mark.parametrize(
    ("untimed", "shown", "ratio", "letters"),
    [
        (["copies"], ">407", ">2.00", "c"),
        (["sparse core"], "-", "-", "s"),
        (["copies", "unknown"], "-", "-", "oc"),
    ],
)
def test_a_program_of_which_parts_are_not_timed_has_no_time(untimed, shown, ratio, letters):
    first, second = pair(407.2, untimed)
    own = {("gather", "Qwen3-30B-A3B-v6e-R8"): first}
    cells = dict(zip(columns(second.cell.kernel), line(second, own), strict=True))
    assert (cells["model us"], cells["of tc"], cells["untimed"]) == (shown, ratio, letters)
    assert (cells["HBM MB"], cells["bound us"]) == ("151.0", "102"), "bytes are shown all the same"


def test_kernels_have_tables_of_their_own(monkeypatch):
    monkeypatch.setattr(kernels, "KERNELS", {**kernels.KERNELS, "gather": Gather()})
    monkeypatch.setattr(kernel_rows, "report", lambda *arguments, **options: FOUND)
    selection = kernels.Selection(kernels=("gather", "fused_moe_v2"), chips=("v6e",), workloads=("Qwen3-30B-A3B",))
    cells = kernels.check(selection)
    assert len(cells) == 4 + 3 * 3 * 6
    assert [cell.kernel.name for cell in cells[:5]] == ["gather"] * 4 + ["fused_moe_v2"]
    shown = text(list(sweep(cells[:5], None, 60, 1)))
    assert shown.startswith("gather:\ncell")
    assert "R16-tc  refused: too many" in shown
    assert "\nfused_moe_v2:\ncell" in shown


@pytest.mark.parametrize(
    ("answer", "words"),
    [(FOUND | {"error": "MosaicError: no"}, "MosaicError: no"), (CompileWorkerFailed("it died"), "it died")],
)
def test_what_the_compiler_refuses_is_in_the_table(monkeypatch, answer, words):
    (row,) = rows(monkeypatch, answer)
    assert (row.outcome, row.reason) == ("failed", words)
    assert f"failed: {words}" in text([row])


@pytest.mark.parametrize("asked", ["supports", "chosen"])
def test_what_the_kernel_refuses_is_not_compiled(monkeypatch, asked):
    def refuse(*arguments):
        if asked == "chosen":
            raise ValueError("because")
        return "because"

    monkeypatch.setattr(f"tpu_serve.bench.fused_moe_cells.{asked}", refuse)
    (row,) = rows(monkeypatch, AssertionError("never asked"))
    assert (row.outcome, row.reason) == ("refused", "because")


def test_a_cell_runs_what_the_tables_say(monkeypatch):
    """What a server would run; with a mode, the rule's for that mode."""
    problem = WORKLOADS["Qwen3-30B-A3B"].problem(64, 8, "bfloat16")
    row = Entry(key_of(problem), Config("D", 256, 4), Provenance("compiled", "2026-11-30"))
    known = lookup.Rows([Table("fused_moe_v2", "v6e", TPU_CHIPS["v6e"].vmem_bytes, (row,))])
    monkeypatch.setattr(fused_moe_cells, "_rows", lambda chip: known)
    case = next(iter(FusedMoe().cases("v6e", ("Qwen3-30B-A3B",), ("bfloat16",), (64,), (8,))))
    config = FusedMoe().config(case, None)
    assert (config["tile_columns"], config["ring_slots"], config["source"]) == (256, 4, "exact")
    assert config_of(problem, TPU_CHIPS["v6e"], {}) == row.value, "and so does its program"
    assert FusedMoe().config(case, "D")["source"] == "heuristic"
    assert FusedMoe().config(case, "D")["tile_columns"] == 768


def test_every_cell_is_there_once():
    cells = kernels.check(kernels.Selection())
    assert len({cell.key for cell in cells}) == len(cells) > 500
    assert len(kernels.check(kernels.Selection(**SMALL | {"chips": ("v6e", "v6e")}))) == 1


def test_no_more_compilers_start_when_nobody_wants_rows(monkeypatch):
    """As after Ctrl-C: those that run are told to stop."""
    asked = []

    def report(*arguments, stop):
        asked.append(stop)
        if len(asked) > 1:
            assert stop.wait(60)
        return FOUND

    monkeypatch.setattr(kernel_rows, "report", report)
    found = sweep(kernels.check(kernels.Selection(**SMALL | {"tokens": tuple(range(8, 80, 8))})), None, 60, 1)
    next(found)
    found.close()
    assert asked[0].is_set()
    assert len(asked) <= 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "needs --compiled"),
        (["--compiled", "--kernel", "attention"], "--kernel attention is unknown; known are fused_moe_v2"),
        (["--compiled", "--chip", "v9"], "--chip v9 is unknown; known are v5e, v5p, v6e, tpu7x"),
        (["--compiled", "--workload", "GPT"], "--workload GPT is unknown"),
        (["--compiled", "--format", "fp3"], "--format fp3 is unknown"),
        (["--compiled", "--num-devices", "5"], "--num-devices 5 is unknown"),
        (["--compiled", "--mode", "X"], "--mode X is unknown; known are D, G"),
        (["--compiled", "--kernel", "gather", "--mode", "D"], "--mode: gather has only one"),
        (["--compiled", "--kernel", "gather", "fused_moe_v2", "--num-devices", "8"], "nothing to do for gather"),
        (["--compiled", "--chip", "v6e", "--format", "mxfp4"], "nothing to do for fused_moe_v2"),
        (["--compiled", "--output-json", "/nowhere/file.json"], "--output-json /nowhere/file.json cannot be written"),
        (["--compiled", "--output-json", "/tmp"], "--output-json /tmp cannot be written"),
        (["--compiled", "--resume"], "--resume needs the --output-json FILE"),
    ],
)
def test_wrong_choices_are_named(monkeypatch, capsys, options, words):
    monkeypatch.setattr(kernels, "KERNELS", {**kernels.KERNELS, "gather": Gather()})
    assert main(["bench", "kernels", *options]) == 2
    assert words in capsys.readouterr().err


def test_an_empty_selection_is_an_error():
    with pytest.raises(ConfigError, match="nothing to do"):
        kernels.check(kernels.Selection(chips=("v5e",), formats=("fp8_channel",)))
