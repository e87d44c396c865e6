"""Imports point downwards, importing is light, and the wheel holds this package only."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "verl_sis"

MAY_IMPORT = {
    "": set(),
    "errors": set(),
    "console": {"errors"},
    "core": {"errors"},
    "config": {"core", "dump_config", "errors", "run_facts"},
    "dump_config": {"errors"},
    "run_facts": {"errors"},
    "verl_compat": {"errors", "core", "config", "integration"},
    "routing_replay": {"core", "errors", "run_facts", "verl_compat"},
    "records": {"errors"},
    "integration": {"", "config", "core", "errors", "records", "register", "routing_replay", "verl_compat", "cpu"},
    "register": {"", "core", "cpu", "errors", "integration", "verl_compat"},
    "study": {"", "console", "core", "cpu", "errors", "integration", "records", "routing_replay", "verl_compat"},
    "search": {"console", "errors", "rewards"},
    "cpu": {"errors", "cpu", "search"},
    "tables": {"console", "errors", "study"},
    "rewards": {"errors"},
    "data": {"", "console", "errors"},
    "__main__": {"data", "doctor", "search", "study", "tables"},
    "doctor": {"", "core", "cpu", "errors", "integration", "register", "routing_replay", "run_facts", "verl_compat"},
}
"""Which part of the package may import which; a part may always import itself."""


def parts_imported(file):
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "verl_sis" else [f"verl_sis.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] == "verl_sis":
                part = [*name.split("."), ""][1]
                yield part if (PACKAGE / part).exists() or (PACKAGE / f"{part}.py").exists() else ""
            elif name.split(".")[0] in ("tests", "recipes", "scripts"):
                yield name


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_point_downwards(file):
    part = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    part = "" if part == "__init__" else part
    assert set(parts_imported(file)) <= MAY_IMPORT[part] | {part}


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(file):
    text = file.read_text()
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documentation = ast.get_docstring(node, clean=False) or ""
            assert node.end_lineno - node.lineno - len(documentation.splitlines()) < 50, node.name


def test_core_knows_no_verl():
    for file in (PACKAGE / "core").glob("*.py"):
        assert "import verl" not in file.read_text().replace("verl_sis", "")
        assert "from verl." not in file.read_text()


def test_importing_the_package_is_light():
    code = "import sys, verl_sis; print(sorted({'torch', 'verl', 'hydra', 'omegaconf', 'vllm'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_wheel_holds_this_package_only(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", tmp_path, ROOT],
        check=True,
        cwd=tmp_path,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("verl_sis-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"verl_sis"}
    for preset in ("_base", "cispo", "dapo", "grpo", "gspo"):
        assert f"verl_sis/conf/sis/{preset}.yaml" in names
    for preset in ("_base", "r2", "r3", "r2_megatron", "r3_megatron", "r2_veomni", "r3_veomni"):
        assert f"verl_sis/conf/routing_replay/{preset}.yaml" in names
    assert "verl_sis/py.typed" in names
    entry_points = (
        zipfile.ZipFile(wheel).read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    )
    assert "[verl.plugins]\nverl_sis = verl_sis.register\n" in entry_points
