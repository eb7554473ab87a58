"""What gets installed: every module and data file of the package, and nothing else."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tpu_serve"


def package_files():
    """Paths of all files of the package relative to the root, by kind."""
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    return {path.relative_to(ROOT).as_posix() for path in files}


def settings():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_folder_with_modules_is_a_package():
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_data_globs_match_exactly_the_data_files():
    globs = settings()["package-data"]["tpu_serve"]
    matched = {path.relative_to(ROOT).as_posix() for glob in globs for path in PACKAGE.glob(glob) if path.is_file()}
    data = {name for name in package_files() if not name.endswith(".py")}
    assert matched == data, "a data file is not installed: extend package-data in pyproject.toml"
    assert {"tpu_serve/py.typed", "tpu_serve/embedded/tiny-chat/model.safetensors"} <= data


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_only_that(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "tpu_serve", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "tests", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--wheel-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("tpu_serve-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        entry_points = next(name for name in names if name.endswith("entry_points.txt"))
        assert "tpu-serve = tpu_serve.cli.main:console" in archive.read(entry_points).decode()
    assert {name for name in names if ".dist-info/" not in name} == package_files()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
