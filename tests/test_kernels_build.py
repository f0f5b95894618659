"""The compiled form: units that cannot leak their instruction set, and flags that survive the environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "kernels_cpp"


def _object(unit: str) -> Path:
    built = sorted((ROOT / "build").glob(f"*/CMakeFiles/_native.dir/src/{unit}.cpp.o"), key=lambda p: p.stat().st_mtime)
    built = [p for p in built if p.parents[3].name != "emulated"]
    if not built:
        pytest.skip("no build folder beside the sources: the package was installed from a wheel")
    return built[-1]


@pytest.mark.parametrize("unit", ["scalar", "avx2", "avxvnni", "avx512", "avx512vnni"])
def test_an_instruction_set_unit_defines_nothing_that_could_be_linked_for_all(unit):
    """A weak symbol, such as an inline of the standard library, may be the copy every other unit then calls."""
    if shutil.which("nm") is None:
        pytest.skip("no nm")
    listing = subprocess.run(["nm", "-C", str(_object(unit))], capture_output=True, text=True, check=True).stdout
    kinds = [(line[17], line[19:]) for line in listing.splitlines()]
    assert [name for kind, name in kinds if kind in "wWvVu"] == []
    assert [name for kind, name in kinds if kind in "TDBR"] == [f"sluice::{unit}_ops()"]
    allowed = {"fmaf", "sqrtf", "memcpy", "memset", "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"}
    assert {name for kind, name in kinds if kind == "U"} <= allowed


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="x86-64 flags")
def test_flags_of_the_units_win_over_the_environment(tmp_path):
    """Distributions build with their own CFLAGS; ours must come later on the command line than any of them."""
    pybind11 = pytest.importorskip("pybind11")
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if cmake is None or shutil.which("c++") is None:
        pytest.skip("no cmake or compiler")
    hostile = "-O0 -march=native -ffast-math -mavx512f -ffp-contract=fast -flto"
    env = os.environ | {"CFLAGS": hostile, "CXXFLAGS": hostile}
    python = [f"-D{name}={sys.executable}" for name in ("Python_EXECUTABLE", "PYTHON_EXECUTABLE")]
    subprocess.run(
        [cmake, "-S", str(SOURCE), "-B", str(tmp_path), f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", *python],
        env=env,
        check=True,
        capture_output=True,
        timeout=120,
    )
    commands = {
        Path(c["file"]).stem: c["command"] for c in json.loads((tmp_path / "compile_commands.json").read_text())
    }
    assert set(commands) >= {"scalar", "avx2", "avx512", "driver", "pool", "dispatch", "bindings"}
    for unit, command in commands.items():
        ours = command[command.rindex("-ffp-contract=fast") + len("-ffp-contract=fast") :]
        for flag in ("-O3", "-fno-fast-math", "-ffp-contract=off", "-fno-lto", "-march=x86-64"):
            assert flag in ours, (unit, flag)
        features = set(re.findall(r"-m(avx\S*|fma|f16c|no-\S+)", ours))
        expected = {
            "avx2": {"avx2", "fma", "f16c", "no-avx512f"},
            "avxvnni": {"avx2", "fma", "f16c", "no-avx512f", "avxvnni"},
            "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
            "avx512vnni": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni"},
        }.get(unit, {"no-avx"})
        assert features >= expected, unit
        if "avx" not in unit:
            assert features == {"no-avx"}, unit


def test_the_environment_chooses_the_instruction_set():
    code = "from sluice import kernels; print(kernels.isa())"
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"SLUICE_ISA": "scalar"}, capture_output=True, text=True
    )
    assert run.stdout.strip() == "scalar", run.stderr
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"SLUICE_ISA": "altivec"}, capture_output=True, text=True
    )
    assert run.returncode == 1
    assert "ValueError: instruction set 'altivec'" in run.stderr
