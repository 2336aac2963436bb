"""Folders that hold no model, a broken one, or one whose chat template fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .bad_calls import ASK, ONE, WITH_DATA, Bad, over


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def _file(name: str, content: str | bytes) -> Callable[[Path], object]:
    written = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(written)


def _without(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _renamed(name: str, other: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).rename(folder / other)


def _cut(share: float) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * share)])

    return cut


def _template(text: str) -> Callable[[Path], object]:
    return _file("chat_template.jinja", text)


MODELS: dict[str, Callable[[Path], object]] = {
    "a list as config": _file("config.json", "[]"),
    "an empty config": _file("config.json", ""),
    "an unknown kind": _config(model_type="guess"),
    "T5": _file("config.json", json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})),
    "a picture model": _config(model_type="vit"),
    "heads that do not divide": _config(num_attention_heads=5, head_dim=None),
    "no layers": _config(num_hidden_layers=0),
    "more layers": _config(num_hidden_layers=6),
    "another vocabulary": _config(vocab_size=100),
    "an unknown dtype": _config(dtype="guess", torch_dtype="guess"),
    "code of its own": _config(auto_map={"AutoModelForCausalLM": "x.Y"}, model_type="custom"),
    "no weights": _without("model.safetensors"),
    "no tokenizer": _without("tokenizer.json"),
    "half the weights": _cut(0.5),
    "junk as weights": _file("model.safetensors", b"\xff" * 100),
    "a cut tokenizer": _file("tokenizer.json", '{"version": "1.0", "mod'),
}
TEMPLATES: dict[str, str] = {
    "a syntax error": "{% for m in messages %}{{ m.content }",
    "a huge range": "{% for i in range(10**9) %}x{% endfor %}{{ messages[0].content }}",
    "the question left out": "{{ 'Say something. ' }}",
    "a refusal": "{{ raise_exception('no such role') }}",
    "a division by zero": "{{ 1 / 0 }}{{ messages[0].content }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a forbidden attribute": "{{ ''.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
}


def models() -> Iterator[Bad]:
    """Folders that hold no model, or a broken one, or one of another kind."""
    for name in MODELS:
        yield Bad(f"a model with {name}", over(ASK, "--model", f"{{models}}/{name}"), (1,))
    for name in ("T5", "a list as config", "half the weights", "heads that do not divide", "another vocabulary"):
        for command, base in WITH_DATA.items():
            yield Bad(f"{command} a model with {name}", over(base, "--model", f"{{models}}/{name}"), (1,))
    for name, path in {
        "a long name": "x" * 5000, "a long path": "./" + "x" * 5000, "a null": "a\0b", "in Latin-1": "caf\udce9",
    }.items():  # fmt: skip
        yield Bad(f"the model is {name}", over(ASK, "--model", path))
    nan = over(ASK, "--model", "{models}/NaN weights")
    yield Bad("ask a model of NaN", nan, (6,), "cannot be scored")
    yield Bad("ask a model of NaN for JSON", (*nan, "--json"), (6,), "cannot be scored")
    score = over(ONE, "--model", "{models}/NaN weights")
    yield Bad("score with a model of NaN", score, (6,), "has no score")
    yield Bad("score claims with a model of NaN", (*score, "--by", "sentence"), (6,), "has no score")
    for command, base in WITH_DATA.items():
        code = 1 if command == "probe" else 6
        yield Bad(f"{command} a model of NaN", over(base, "--model", "{models}/NaN weights"), (code,), keeps=True)


def templates() -> Iterator[Bad]:
    """Chat templates that fail, that never end, or that leave the question out."""
    for name in TEMPLATES:
        yield Bad(f"a template with {name}", over(ASK, "--model", f"{{models}}/template {name}"), (1,))
    for name in ("a huge range", "the question left out", "a syntax error"):
        for command, base in WITH_DATA.items():
            call = over(base, "--model", f"{{models}}/template {name}")
            yield Bad(f"{command} a template with {name}", call, (1,), keeps=True)


def break_models(folder: Path, good: Path, nan: Callable[[Path], None]) -> None:
    """Everything below `{models}`; `nan` fills a model's weights with NaN."""
    broken = {**MODELS, **{f"template {name}": _template(text) for name, text in TEMPLATES.items()}, "NaN weights": nan}
    for name, change in broken.items():
        change(shutil.copytree(good, folder / name))


ALL = (models, templates)
