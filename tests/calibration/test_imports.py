"""The room stays light: deciding needs no tensor library."""

import subprocess
import sys


def test_calibration_imports_neither_torch_nor_the_engine() -> None:
    heavy = ["torch", "transformers", "sklearn", "mapie", "scipy.stats", "scipy.optimize", "semgrad_guard.engine"]
    code = f"import semgrad_guard.calibration\nsys.exit(', '.join(sorted({{*{heavy!r}}} & set(sys.modules))) or 0)"
    path = [*sys.path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n{code}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
