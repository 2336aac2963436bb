"""Folders that hold no model, a broken one, or one whose chat template fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .bad_calls import ASK, ONE, WITH_DATA, Bad, instead


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
    "an empty object as config": _file("config.json", "{}"),
    "null as config": _file("config.json", "null"),
    "a cut config": _file("config.json", '{"model_type": "lla'),
    "a binary config": _file("config.json", bytes(range(256))),
    "an unknown kind": _config(model_type="guess"),
    "T5": _file("config.json", json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]})),
    "BERT": _config(model_type="bert"),
    "a picture model": _config(model_type="vit"),
    "a number as kind": _config(model_type=7),
    "heads that do not divide": _config(num_attention_heads=5, head_dim=None),
    "no heads": _config(num_attention_heads=0, head_dim=None),
    "groups that do not divide": _config(num_key_value_heads=3),
    "no layers": _config(num_hidden_layers=0),
    "negative layers": _config(num_hidden_layers=-1),
    "more layers": _config(num_hidden_layers=6),
    "another width": _config(hidden_size=64, head_dim=None),
    "no width": _config(hidden_size=0, head_dim=None),
    "a text as width": _config(hidden_size="wide"),
    "another vocabulary": _config(vocab_size=100),
    "an unknown activation": _config(hidden_act="guess"),
    "an unknown dtype": _config(dtype="guess", torch_dtype="guess"),
    "rope of no kind": _config(rope_parameters={"rope_type": "guess"}, rope_scaling={"rope_type": "guess"}),
    "code of its own": _config(auto_map={"AutoModelForCausalLM": "x.Y"}, model_type="custom"),
    "no config": _without("config.json"),
    "no weights": _without("model.safetensors"),
    "no tokenizer": _without("tokenizer.json"),
    "half the weights": _cut(0.5),
    "no bytes in the weights": _cut(0),
    "a stump of weights": _cut(0.001),
    "junk as weights": _file("model.safetensors", b"\xff" * 100),
    "an index without files": _renamed("model.safetensors", "model.safetensors.index.json"),
    "a broken tokenizer": _file("tokenizer.json", "{}"),
    "a cut tokenizer": _file("tokenizer.json", '{"version": "1.0", "mod'),
    "a list as tokenizer": _file("tokenizer.json", "[]"),
    "a broken tokenizer config": _file("tokenizer_config.json", "[]"),
}
TEMPLATES: dict[str, str] = {
    "a syntax error": "{% for m in messages %}{{ m.content }",
    "an unknown tag": "{% guess %}",
    "a huge range": "{% for i in range(10**9) %}x{% endfor %}{{ messages[0].content }}",
    "a range of 30 digits": "{{ range(10**30) }}",
    "the question left out": "{{ 'Say something. ' }}",
    "an empty one": "{% if false %}x{% endif %}",
    "a refusal": "{{ raise_exception('no such role') }}",
    "a division by zero": "{{ 1 / 0 }}{{ messages[0].content }}",
    "an index out of range": "{{ messages[7].content }}",
    "an unknown filter": "{{ messages | guess }}",
    "a call of nothing": "{{ nothing() }}",
    "an attribute of nothing": "{{ nothing.at.all }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a forbidden attribute": "{{ ''.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}",
    "a number for a text": "{{ messages[0].content + 1 }}",
}


def models() -> Iterator[Bad]:
    """Folders that hold no model, or a broken one, or one of another kind."""
    for name in MODELS:
        yield Bad(f"a model with {name}", instead(ASK, model=f"{{models}}/{name}"), (1,))
    for name in ("T5", "a list as config", "half the weights", "heads that do not divide", "another vocabulary"):
        for command, base in WITH_DATA.items():
            yield Bad(f"{command} a model with {name}", instead(base, model=f"{{models}}/{name}"), (1,))
    for name, path in {
        "empty": "", "blank": " ", "a file": "{in}/answers.jsonl", "a folder": "{in}", "none": "./nowhere",
        "a long name": "x" * 5000, "a long path": "./" + "x" * 5000, "a null": "a\0b", "a hub name": "nobody/nothing",
        "no name": "//", "three parts": "a/b/c", "a URL": "https://example.org/model", "dots": "a/../b",
        "a space": "a b",
        "a link to itself": "{in}/loop.jsonl", "a socket": "{in}/socket", "in Latin-1": "caf\udce9",
    }.items():  # fmt: skip
        yield Bad(f"the model is {name}", instead(ASK, model=path))
    nan = instead(ASK, model="{models}/NaN weights")
    yield Bad("ask a model of NaN", nan, (6,), "cannot be scored")
    yield Bad("ask a model of NaN for JSON", (*nan, "--json"), (6,), "cannot be scored")
    score = instead(ONE, model="{models}/NaN weights")
    yield Bad("score with a model of NaN", score, (6,), "has no score")
    yield Bad("score claims with a model of NaN", (*score, "--by", "sentence"), (6,), "has no score")
    for command, base in WITH_DATA.items():
        code = 1 if command == "probe" else 6
        yield Bad(f"{command} a model of NaN", instead(base, model="{models}/NaN weights"), (code,), keeps=True)


def templates() -> Iterator[Bad]:
    """Chat templates that fail, that never end, or that leave the question out."""
    for name in TEMPLATES:
        yield Bad(f"a template with {name}", instead(ASK, model=f"{{models}}/template {name}"), (1,))
    for name in ("a huge range", "the question left out", "a syntax error"):
        for command, base in WITH_DATA.items():
            call = instead(base, model=f"{{models}}/template {name}")
            yield Bad(f"{command} a template with {name}", call, (1,), keeps=True)


def break_models(folder: Path, good: Path, nan: Callable[[Path], None]) -> None:
    """Everything below `{models}`; `nan` fills a model's weights with NaN."""
    broken = {**MODELS, **{f"template {name}": _template(text) for name, text in TEMPLATES.items()}, "NaN weights": nan}
    for name, change in broken.items():
        change(shutil.copytree(good, folder / name))
