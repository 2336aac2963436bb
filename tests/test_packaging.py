"""The built distributions, not the editable install: their contents, the wheel on its own, the lowest bounds."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from .warm_python import WarmPython

ROOT = Path(__file__).parent.parent
PARTNERS = {
    "langchain-semgrad-guard": "from langchain_semgrad_guard import ChatSemGrad",
    "llama-index-llms-semgrad-guard": "from llama_index.llms.semgrad_guard import SemGradLLM",
}
"""The distributions in `integrations`, and an import that each of them promises."""


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first of the workers which need it has filled, for all of them."""
    shared = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    folder, done = shared / name, shared / f"{name}.done"
    with FileLock(shared / f"{name}.lock"):
        if not done.exists():
            make(folder)
            done.touch()
    return folder


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
        subprocess.run(command, check=True, capture_output=True)

    return made_once(tmp_path_factory, "distributions", make)


@pytest.fixture(scope="module")
def wheel_names(distributions: Path) -> list[str]:
    (wheel,) = distributions.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


@pytest.fixture(scope="module")
def unpacked(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (wheel,) = distributions.glob("*.whl")
    return made_once(tmp_path_factory, "unpacked", zipfile.ZipFile(wheel).extractall)


def test_the_wheel_holds_the_import_packages_and_nothing_else(wheel_names: list[str]) -> None:
    top = {name.split("/")[0] for name in wheel_names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "semgrad_guard",
        "langchain_semgrad_guard",
        "llama_index_semgrad_guard",
        "llama_index",
    }


def test_the_wheel_leaves_llama_index_a_namespace(wheel_names: list[str], unpacked: Path, tmp_path: Path) -> None:
    """An `__init__.py` in `llama_index` or `llama_index/llms` would hide LlamaIndex itself and every other package."""
    ours = {name for name in wheel_names if name.startswith("llama_index/")}
    assert ours == {"llama_index/llms/semgrad_guard/__init__.py"}
    other = tmp_path / "llama_index" / "llms" / "another" / "__init__.py"
    other.parent.mkdir(parents=True)
    other.write_text("NAME = 'another'")
    partner = ROOT / "integrations" / "llama-index-llms-semgrad-guard" / "pyproject.toml"
    listed = tomllib.loads(partner.read_text())["tool"]["llamahub"]
    names = ", ".join(listed["class_authors"])
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r});"
        "import llama_index.core; from llama_index.llms.another import NAME;"
        f"from {listed['import_path']} import {names};"
        "import llama_index_semgrad_guard; assert SemGradLLM is llama_index_semgrad_guard.SemGradLLM; print(NAME)"
    )
    environment = {**os.environ, "PYTHONPATH": str(unpacked)}
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=unpacked, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "another"


@pytest.mark.parametrize(
    "needed",
    [
        "semgrad_guard/py.typed",
        "langchain_semgrad_guard/py.typed",
        "llama_index_semgrad_guard/py.typed",
        "semgrad_guard/pocket/weights/model.safetensors",
        "semgrad_guard/pocket/weights/tokenizer.json",
        "semgrad_guard/pocket/calibration.json",
        "semgrad_guard/pocket/questions.jsonl",
        "semgrad_guard/paper/report.html.jinja",
        "semgrad_guard/pocket/MODEL_CARD.md",
        "langchain_semgrad_guard/demo/documents.jsonl",
    ],
)
def test_the_wheel_holds_its_data(wheel_names: list[str], needed: str) -> None:
    assert needed in wheel_names


def test_the_wheel_is_small(distributions: Path) -> None:
    (wheel,) = distributions.glob("*.whl")
    size = wheel.stat().st_size  # of which the embedded weights take 7.9 MB
    assert size <= 9_100_000, f"{size / 1e6:.1f} MB: material of trainings and studies belongs into research/"


def test_the_sdist_holds_what_a_developer_needs(distributions: Path) -> None:
    (archive,) = distributions.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.split("/", 1)[-1] for name in opened.getnames()}
    assert {"pyproject.toml", "constraints.txt", "Makefile", "LICENSE", "README.md", "tests/conftest.py"} <= names
    assert {"mkdocs.yml", "SECURITY.md", "CITATION.cff", "docs/index.md", "scripts/check_words.py"} <= names


def test_the_wheel_answers_on_its_own(warm_python: WarmPython, unpacked: Path) -> None:
    code = (
        "import semgrad_guard, langchain_semgrad_guard, sys;"
        "assert semgrad_guard.__file__.startswith(sys.argv[1]);"
        "model = semgrad_guard.LanguageModel.from_pretrained('pocket');"
        "print(model.generate('What is the capital of France?').text)"
    )
    found = warm_python.run(["-c", code, str(unpacked)], folder=unpacked)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == "Paris"


@pytest.fixture(scope="module")
def partners(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of the partner distributions."""

    def make(folder: Path) -> None:
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder)]
        for partner in PARTNERS:
            subprocess.run([*build, str(ROOT / "integrations" / partner)], check=True, capture_output=True)

    return made_once(tmp_path_factory, "partners", make)


@pytest.fixture(scope="module")
def elsewhere(distributions: Path, partners: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of its own with all wheels, where nothing but the libraries is at hand and no index is asked."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder, symlinks=os.name != "nt")
    install = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-index", "--no-compile"]
    subprocess.run([*install, "--no-deps", *map(str, distributions.glob("*.whl"))], check=True)
    (packages,) = folder.rglob("site-packages")
    (packages / "libraries.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    subprocess.run([*install, *map(str, partners.glob("*.whl"))], check=True)
    return folder


@pytest.mark.parametrize("partner", PARTNERS)
def test_a_partner_distribution_holds_no_code(partners: Path, partner: str) -> None:
    described = tomllib.loads((ROOT / "integrations" / partner / "pyproject.toml").read_text())["project"]
    assert described["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    (built,) = partners.glob(f"{partner.replace('-', '_')}-*.whl")
    assert {Path(name).parent.suffix for name in zipfile.ZipFile(built).namelist()} == {".dist-info"}


def test_partner_distributions_bring_the_integrations(elsewhere: Path) -> None:
    python = elsewhere / ("Scripts" if os.name == "nt" else "bin") / "python"
    code = f"import semgrad_guard; {'; '.join(PARTNERS.values())}; print(semgrad_guard.__file__)"
    found = subprocess.run([python, "-c", code], cwd=elsewhere, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(elsewhere)


def test_a_clone_needs_no_partner_distribution() -> None:
    """They are published after `semgrad-guard`, and an extra that names one could not be installed before."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert not [line for lines in extras.values() for line in lines if line.startswith(tuple(PARTNERS))]


def test_every_dependency_is_pinned_once(capsys: pytest.CaptureFixture[str]) -> None:
    """`make check-lowest` installs the stated versions: each dependency at its lower bound, torch as constrained."""
    runpy.run_path(str(ROOT / "scripts" / "lowest_bounds.py"))["main"]()
    pins = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [requirement for group in groups for requirement in group]
    names = {requirement.split(">=")[0].partition("[")[0] for requirement in wanted if ">=" in requirement}
    assert sorted(pin.split("==")[0] for pin in pins) == sorted(names)
    assert "torch==2.13.0" in pins
