"""Dependencies point one way: conf -> pipeline -> keyformer -> mlx-lm, mlx; and each outside library has its place."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
FILES = sorted(p for package in ("keyformer", "pipeline", "hydra_plugins") for p in (PROJECT / package).rglob("*.py"))
PLACES: dict[str, tuple[str, ...]] = {  # files and folders
    "dask": (),
    "distributed": (
        *(f"hydra_plugins/dask_launcher/_{part}.py" for part in ("core", "host", "job")),
        "pipeline/cluster/",
    ),
    "lm_eval": ("pipeline/load.py", "pipeline/score.py", "pipeline/language_model.py", "pipeline/tasks/"),
    "mlflow": tuple(f"pipeline/{name}.py" for name in ("tracking_server", "leases", "tracking", "doctor", "report")),
}


def imported(path: Path) -> set[str]:
    """Top-level names of the packages that a file imports, wherever in the file."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def where(path: Path) -> str:
    return path.relative_to(PROJECT).as_posix()


@pytest.mark.parametrize("path", FILES, ids=where)
def test_imports_point_one_way(path: Path) -> None:
    names = imported(path)
    if where(path).startswith("keyformer/"):
        assert names <= {"mlx", "mlx_lm", "numpy", "keyformer"} | set(sys.stdlib_module_names)
    for library, places in PLACES.items():
        assert library not in names or where(path).startswith(places)


def test_a_sweep_on_one_machine_does_without_dask() -> None:
    program = """
import sys
from pipeline.__main__ import main
assert main(["-m", "--cfg", "policy=full,h2o"]) == 0
import pipeline.run, pipeline.tracking
assert "hydra_plugins.dask_launcher.dask_launcher" in sys.modules
print(*{"dask", "distributed", "pipeline.cluster"} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stderr.strip() == ""


def test_only_the_hook_reaches_into_mlx_lms_modules() -> None:
    patching = [
        where(p) for p in FILES if "setattr(" in p.read_text(encoding="utf-8") and "sys.modules" in p.read_text()
    ]
    assert patching == ["keyformer/hook.py"]


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by name alone, and would refuse the second."""
    names = [path.name for path in (PROJECT / "tests").rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert len(names) == len(set(names)) > 20
