"""The room stays light: deciding needs no tensor library."""

import subprocess
import sys

import semgrad_guard.calibration


def test_decision_imports_neither_torch_nor_the_engine() -> None:
    heavy = ["torch", "transformers", "sklearn", "mapie", "scipy.stats", "scipy.optimize", "semgrad_guard.engine"]
    code = (
        "import semgrad_guard.calibration as decision\n"
        "for name in decision.__all__: getattr(decision, name)\n"
        f"sys.exit(', '.join(sorted({{*{heavy!r}}} & set(sys.modules))) or 0)"
    )
    path = [*sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_names_are_sorted_and_exist() -> None:
    names = semgrad_guard.calibration.__all__
    assert names == sorted(names)
    assert all(hasattr(semgrad_guard.calibration, name) for name in names)
