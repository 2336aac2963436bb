"""A rehearsal of a release: `make release-check`.

Builds the wheel and the partner distributions of `integrations`. Installs the partners into an empty environment, then
the wheel with its extras, and runs the README's code and commands there.
Nothing of the checkout is on the path.

    python scripts/release_check.py [--torch-index URL] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNNER = "import sys; exec(compile(open(sys.argv[1], encoding='utf-8').read(), 'README.md', 'exec'))"
ABSTAINED = 3


def run(command: Sequence[str | Path], *, cwd: Path, allowed: Sequence[int] = (0,)) -> str:
    """Run a command without the checkout's paths; SystemExit with its output if it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    print("$", *command, flush=True)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode not in allowed:
        raise SystemExit(f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}\nfailed with status {done.returncode}")
    return done.stdout


def environment(folder: Path) -> Path:
    """An empty virtual environment; the folder of its programs."""
    venv.create(folder, with_pip=True, symlinks=os.name != "nt")
    return folder / ("Scripts" if os.name == "nt" else "bin")


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """(language, code) of each code block."""
    yield from ((found[1], found[2]) for found in BLOCK.finditer(page))


def python_of(page: str) -> str:
    """The page's Python blocks as one program."""
    return "\n".join(code for language, code in blocks(page) if language == "python")


def shown_by(page: str) -> str:
    """The output that the page shows for its programs."""
    return "".join(code for language, code in blocks(page) if language == "text")


def commands_of(page: str) -> Iterator[list[str]]:
    """The page's commands of ours."""
    for language, code in blocks(page):
        for line in code.splitlines() if language == "console" else ():
            if line.startswith("$ semgrad-guard"):
                yield shlex.split(line.removeprefix("$ "), comments=True)


def words(text: str) -> list[str]:
    """Without numbers, whose last digits differ between machines."""
    return re.sub(r"\d+(\.\d+)?", "#", text).split()


def rehearse(work: Path, *, torch_index: str | None) -> None:
    """Build, install, run; SystemExit at the first thing that fails."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    builder = environment(work / "builder")
    run([builder / "python", "-m", "pip", "install", "--quiet", "build", "hatchling"], cwd=work)
    partners = [path.parent for path in sorted(ROOT.glob("integrations/*/pyproject.toml"))]
    for project_folder in (ROOT, *partners):
        run(
            [builder / "python", "-m", "build", "--no-isolation", "--wheel", "--outdir", work, project_folder], cwd=work
        )
    (wheel,) = work.glob("semgrad_guard-*.whl")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.2f} MB")

    programs = environment(work / "empty")
    index = ["--index-url", torch_index] if torch_index else []
    pip = [programs / "python", "-m", "pip", "install", "--quiet"]
    run([*pip, *index, "-c", ROOT / "constraints.txt", "torch"], cwd=work)
    names = [path.name for path in partners]
    run([*pip, "-c", ROOT / "constraints.txt", "--find-links", work, *names], cwd=work)
    run([programs / "python", "-c", "import langchain_semgrad_guard, llama_index.llms.semgrad_guard"], cwd=work)
    run([*pip, "-c", ROOT / "constraints.txt", f"{wheel}[all]"], cwd=work)
    where = run([programs / "python", "-c", "import semgrad_guard; print(semgrad_guard.__file__)"], cwd=work)
    if str(work) not in str(Path(where.strip()).resolve()):
        raise SystemExit(f"the wheel is not what is imported: {where}")
    if run([programs / "semgrad-guard", "--version"], cwd=work).split()[-1] != project["version"]:
        raise SystemExit("the command's version is not the project's")

    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (work / "readme.py").write_text(python_of(page), encoding="utf-8")
    printed = run([programs / "python", "-c", RUNNER, "readme.py"], cwd=work)
    if words(printed) != words(shown_by(page)):
        raise SystemExit(f"README.md shows something else than is printed:\n{printed}")
    for command in commands_of(page):
        run([programs / command[0], *command[1:]], cwd=work, allowed=(0, ABSTAINED))


def main() -> None:
    """Rehearse in a temporary folder, or in the one given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--torch-index", help="where torch comes from; by default pip's own index")
    parser.add_argument("--keep", type=Path, help="work in this new folder and leave it behind")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True)
        rehearse(options.keep.resolve(), torch_index=options.torch_index)
    else:
        with tempfile.TemporaryDirectory() as folder:
            rehearse(Path(folder).resolve(), torch_index=options.torch_index)
    print("The wheel installs into an empty environment, and the README runs from it.")


if __name__ == "__main__":
    sys.exit(main())
