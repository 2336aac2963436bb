"""Loading checkpoints: what is found, and what is refused with a message that names the fault."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

from semgrad_guard import LanguageModel
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.errors import InputError, ModelError, ModelNotFoundError, UnsupportedModelError
from tests.cli.helpers import saved
from tests.random_llama import byte_tokenizer, random_llama

from .gguf_files import tiny, write
from .oracle import reference_scores, worst_relative_error

Break = Callable[[Path], object]


def removing(*names: str) -> Break:
    return lambda folder: [(folder / name).unlink() for name in names]


def writing(name: str, content: str) -> Break:
    return lambda folder: (folder / name).write_text(content)


def setting(name: str, **changes: Any) -> Break:
    def edit(folder: Path) -> None:
        settings = json.loads((folder / name).read_text()) | changes
        (folder / name).write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))

    return edit


def losing_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {
        "model.norm.weight": "model-00001-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def putting_weights_in_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()


def cutting_the_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def losing_a_tensor(folder: Path) -> None:
    """transformers initialises absent tensors at random, with a mere warning."""
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def as_a_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


QUANTIZED = {"bits": 4, "group_size": 32}
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 123\n"
OWN_CODE = {"AutoConfig": "configuration.C", "AutoModelForCausalLM": "modeling.M"}

BROKEN: dict[str, tuple[Break, type[ModelError], str]] = {
    "no tokenizer": (removing("tokenizer.json", "tokenizer_config.json"), UnsupportedModelError, "tokenizer cannot be"),
    "half a tokenizer": (writing("tokenizer.json", '{"version'), UnsupportedModelError, r"save_pretrained\(folder\)"),
    "code of its own": (
        setting("config.json", auto_map=OWN_CODE, model_type="mine"),
        UnsupportedModelError,
        "never run",
    ),
    "a tokenizer's code": (
        setting("tokenizer_config.json", auto_map={"AutoTokenizer": ["t.T", None]}, tokenizer_class="Mine"),
        UnsupportedModelError,
        "program code of its own",
    ),
    "no configuration": (removing("config.json"), ModelNotFoundError, r"no config\.json.*save_pretrained"),
    "an empty configuration": (writing("config.json", "{}"), UnsupportedModelError, "model_type"),
    "half a configuration": (writing("config.json", "{"), ModelNotFoundError, "not a valid JSON"),
    "an unknown type": (setting("config.json", model_type="nosuch"), UnsupportedModelError, "nosuch.*out of date"),
    "other sizes": (
        setting("config.json", hidden_size=64),
        ModelNotFoundError,
        r"\(258, 32\) and should be \(258, 64\)",
    ),
    "a lost shard": (losing_a_shard, ModelNotFoundError, "model-00002-of-00002"),
    "a pointer": (writing("model.safetensors", POINTER), ModelNotFoundError, "Git LFS pointer.*git lfs pull"),
    "a folder of weights": (putting_weights_in_a_folder, ModelNotFoundError, "cannot load"),
    "a lost tensor": (losing_a_tensor, ModelNotFoundError, "up_proj"),
    "cut weights": (cutting_the_weights, ModelNotFoundError, "cannot load"),
    "a pickle": (as_a_pickle, ModelNotFoundError, r"pytorch_model\.bin"),
    "empty weights": (writing("model.safetensors", ""), ModelNotFoundError, "cannot load"),
    "GPTQ": (
        setting("config.json", quantization_config={"quant_method": "gptq", **QUANTIZED}),
        ModelError,
        "GPTQ|gptq",
    ),
    "compressed-tensors": (
        setting("config.json", quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"}),
        UnsupportedModelError,
        "compressed.tensors.*[Ii]nstall",
    ),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_said_as_what_it_is(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    break_, error, words = BROKEN[kind]
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    break_(folder)
    with pytest.raises(error, match=words) as caught:
        LanguageModel.from_pretrained(str(folder))
    assert str(folder) in str(caught.value)
    assert "no causal LM" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"dtype": "float33"}, InputError, "no model of dtype 'float33'"),
        ({"dtype": torch.int8}, InputError, r"torch\.int8.*bfloat16"),
        ({"attn_implementation": "nosuch"}, UnsupportedModelError, "attn_implementation='nosuch'"),
        ({"attn_implementation": "flash_attention_2"}, UnsupportedModelError, "FlashAttention2.*Install it"),
        ({"device_map": "nosuch"}, UnsupportedModelError, "device_map='nosuch'"),
        ({"device_map": "meta"}, UnsupportedModelError, "device_map='cpu'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_way_of_loading_that_there_is_not(
    options: dict[str, Any], error: type[Exception], words: str, checkpoint: Path
) -> None:
    with pytest.raises(error, match=words):
        LanguageModel.from_pretrained(str(checkpoint), **options)


def t5() -> Any:
    return T5ForConditionalGeneration(T5Config(vocab_size=258, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))


def eyes() -> Any:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=8, patch_size=4))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (t5, "'t5', which is no causal LM"),
        (eyes, "'clip_vision_model', which is no causal LM"),
        (lambda: LlamaForSequenceClassification(random_llama().config), "saved as LlamaForSequenceClassification"),
    ],
)
def test_what_is_no_causal_lm(build: Callable[[], Any], words: str, tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=words):
        LanguageModel.from_pretrained(str(tmp_path))


PLACES = {
    "two devices": {
        "model.embed_tokens": "cpu",
        "model.layers": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
    },
    "from a disk": {"model": "disk"},
}


@pytest.mark.parametrize("kind", PLACES)
def test_layers_that_accelerate_moves_about(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    """The message names the GPU that would be needed."""
    places = {**PLACES[kind], "lm_head": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, device_map=places, offload_folder=tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"dispatched by accelerate.*one device.*GiB"):
        LanguageModel.from_transformers(model, byte_tokenizer()).score("q", "an answer")


def test_one_device_by_accelerate_is_as_ever(checkpoint: Path) -> None:
    plain = LanguageModel.from_pretrained(str(checkpoint)).score("q", "an answer")
    for device_map in ("cpu", "auto", {"": "cpu"}):
        placed = LanguageModel.from_pretrained(str(checkpoint), device_map=device_map).score("q", "an answer")
        assert placed.semgrad == plain.semgrad


def test_loading_a_folder(checkpoint: Path, language_model: LanguageModel) -> None:
    loaded = LanguageModel.from_pretrained(str(checkpoint))
    assert loaded.identity.dtype == "float32"
    assert loaded.identity.name == checkpoint.name
    assert loaded.score("q", "an answer").semgrad == pytest.approx(
        language_model.score("q", "an answer").semgrad, rel=1e-3
    )
    assert loaded.identity.fingerprint == LanguageModel.from_pretrained(str(checkpoint)).identity.fingerprint


def test_unknown_paths_and_names(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no folder"):
        LanguageModel.from_pretrained(str(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFoundError, match="hub"):
        LanguageModel.from_pretrained("nobody/no-such-model")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        LanguageModel.from_pretrained(str(tmp_path / "file"))


def test_a_foreign_tokenizer_is_noticed(make_language_model: Callable[..., LanguageModel]) -> None:
    with pytest.raises(InputError, match="tokenizer"):
        make_language_model(vocab_size=50, eos_token_id=1, pad_token_id=1).generate("hello")


def test_no_bar_is_drawn_over_the_weights(checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        LanguageModel.from_pretrained(str(checkpoint))
        assert logging.is_progress_bar_enabled()  # a user's own choice stays
    finally:
        if not shown:
            logging.disable_progress_bar()
    assert capfd.readouterr().err == ""


# Models by their hub id.

COMMIT = "0123456789abcdef0123456789abcdef01234567"
At = Callable[[str], None]


@pytest.fixture
def hub_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> At:
    """Sets where the hub is, as HF_ENDPOINT does, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))

    def set_endpoint(url: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # knows the endpoint it began with
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")

    return set_endpoint


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """A hub with one repository, org/tiny."""

    class Repository(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            ours = self.path.startswith(("/org/tiny/resolve/", "/api/models/org/tiny"))
            content = self._content() if ours else b""
            self.send_response(200 if content else 404)
            if not content:
                self.send_header("X-Error-Code", "EntryNotFound" if ours else "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')  # noqa: S324 - as the hub does
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        def _content(self) -> bytes:
            path = folder / self.path.rpartition("/")[2]
            if not self.path.startswith("/api/"):
                return path.read_bytes() if path.is_file() else b""
            return b"" if "/tree/" in self.path else json.dumps({"id": "org/tiny", "sha": COMMIT}).encode()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Repository)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_model_and_a_gguf_file_are_named_by_their_repository(
    hub_at: At, tmp_path: Path, language_model: LanguageModel
) -> None:
    """Fetched once, and found in the cache where the hub is gone."""
    folder = saved(tmp_path / "tiny", language_model)
    write(folder / "tiny-F32.gguf", tiny())
    names = ("org/tiny", "org/tiny:tiny-F32.gguf")
    with serving(folder) as endpoint:
        hub_at(endpoint)
        fetched = [LanguageModel.from_pretrained(name).identity for name in names]
        for name in ("org/other", "org/other:tiny.gguf", "org/tiny:tiny-Q8_0.gguf"):
            with pytest.raises(ModelNotFoundError, match=f"cannot load '{name}'.*Check the name"):
                LanguageModel.from_pretrained(name)
    assert [LanguageModel.from_pretrained(name).identity for name in names] == fetched
    assert fetched[0].fingerprint == language_model.identity.fingerprint
    assert (fetched[1].name, fetched[1].revision) == (names[1], COMMIT)


def test_a_hub_that_is_not_there(hub_at: At) -> None:
    hub_at("http://127.0.0.1:9")  # the port of discard
    with pytest.raises(ModelNotFoundError, match=r"cannot load 'nobody/nothing'.*Check the name"):
        LanguageModel.from_pretrained("nobody/nothing")


# The text of a vision-language model.

TEXT = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 257,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
EYES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4}
EYES_OF_QWEN = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {"text_config": TEXT | SECTIONS, "vision_config": EYES_OF_QWEN | {"deepstack_visual_indexes": [0]}},
    "mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": EYES | {"model_type": "pixtral", "image_size": 8},
    },
    "gemma3": {
        "text_config": TEXT | {"sliding_window": 16},
        "vision_config": EYES | {"image_size": 8},
        "mm_tokens_per_image": 4,
        "image_token_index": 0,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_text_of_a_vision_language_model_by_name(name: str, tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **MODELS[name])).float().eval()
    made.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = LanguageModel.from_pretrained(str(tmp_path))

    answer = model.generate("What is in it?", GenerationOptions(max_tokens=6, stop=()))
    assert (
        answer.text
        == LanguageModel.from_transformers(made, byte_tokenizer())
        .generate("What is in it?", GenerationOptions(max_tokens=6, stop=()))
        .text
    )
    prompt = model.render("What is in it?")
    made.config.num_hidden_layers = model.n_layers  # where the oracle looks for it

    def exact(found: Any, response: list[int]) -> bool:
        expected = reference_scores(made, prompt.ids, response, prompt.semantic_token.offset)
        return worst_relative_error(found, expected) < 1e-4

    timed = answer.evidence.gradients()
    assert timed is not None
    assert exact(timed.scores, list(answer.response_ids))
    ids: Any = model.tokenizer("A cat.", add_special_tokens=False)["input_ids"]
    assert exact(model.score("What is in it?", "A cat."), ids)
