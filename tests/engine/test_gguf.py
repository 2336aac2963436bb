"""GGUF files by path: what is loaded is what the file holds, scored exactly; what cannot be read is refused."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, BitsAndBytesConfig

from semgrad_guard import LanguageModel
from semgrad_guard.engine.answers.options import GenerationOptions
from semgrad_guard.engine.gguf import GgufHeader, complete_config, read_header
from semgrad_guard.errors import InputError, MissingExtraError, ModelNotFoundError, UnsupportedModelError
from tests.pairwise import in_turn

from .gguf_files import END, SPECIAL, TOKENS, Quantized, as_floats, gguf_name, quantized, tiny, write
from .oracle import reference_scores, worst_relative_error


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", tiny())


def dequantized(architecture: str, quantize: Quantized) -> Any:
    """The model with the weights that a quantization leaves of it."""
    model = tiny(architecture)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            values, kind = quantize(name, weight.numpy())
            weight.copy_(torch.from_numpy(quants.dequantize(values, kind)))
    return model


def exact(model: LanguageModel, expected: Any) -> float:
    """The worst relative error of a score against plain autograd on another model."""
    prompt = model.render("in a box?")
    ids: Any = model.tokenizer("in Rome", add_special_tokens=False)["input_ids"]
    reference = reference_scores(expected, prompt.ids, ids, prompt.semantic_token.offset)
    return worst_relative_error(model.score("in a box?", "in Rome"), reference)


@in_turn(architecture=["llama", "qwen2"], kind=["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_scores_are_those_of_plain_autograd_on_the_dequantized_model(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    quantize = quantized(GGMLQuantizationType[kind])
    path = write(tmp_path / "m.gguf", tiny(architecture), quantize=quantize)
    model = LanguageModel.from_pretrained(str(path))
    assert model.identity.dtype == "float32"
    assert exact(model, dequantized(architecture, quantize)) < 1e-4
    assert exact(model, tiny(architecture)) > 1e-4, "nothing was quantized"


def test_tokenizer_template_and_end_tokens_are_the_files(file: Path) -> None:
    model = LanguageModel.from_pretrained(str(file))
    assert model.tokenizer.tokenize("in a bin") == ["in", "Ġa", "Ġ", "b", "in"]
    prompt = model.render("hi")
    assert prompt.text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert model.end_tokens == (TOKENS.index("<|im_end|>"), END)
    assert not model.doubts
    answer = model.generate("hi", GenerationOptions(max_tokens=4))
    assert answer.evidence.gradients() is not None


def test_a_file_without_a_template_asks_plainly(tmp_path: Path) -> None:
    model = LanguageModel.from_pretrained(str(write(tmp_path / "m.gguf", tiny(), template=None)))
    assert "in a box?" in model.render("in a box?").text
    assert any("template" in doubt for doubt in model.doubts)


def test_a_file_and_the_folder_that_holds_it_are_one_model(file: Path, tmp_path: Path) -> None:
    """A folder may hold other files as well; with safetensors in it, these are loaded."""
    shutil.copy(file, tmp_path / "tiny.gguf")
    (tmp_path / "README.md").write_text("# A model")
    by_file, by_folder = (LanguageModel.from_pretrained(str(path)) for path in (file, tmp_path))
    assert by_file.identity.name == "tiny.gguf"
    assert by_file.identity.fingerprint == by_folder.identity.fingerprint
    assert by_file.identity.template == by_folder.identity.template
    other = tiny(intermediate_size=64)
    other.save_pretrained(tmp_path)
    by_file.tokenizer.save_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(str(tmp_path)).identity.fingerprint != by_file.identity.fingerprint


def test_the_dtype_is_honoured(file: Path) -> None:
    model = LanguageModel.from_pretrained(str(file), dtype="bfloat16")
    assert model.identity.dtype == "bfloat16"
    assert {parameter.dtype for parameter in model._model.parameters()} == {torch.bfloat16}


def test_several_files_in_a_folder(file: Path, tmp_path: Path) -> None:
    for name in ("b-Q8_0.gguf", "a-Q4_0.gguf"):
        shutil.copy(file, tmp_path / name)
    with pytest.raises(ModelNotFoundError, match=r"holds 2 GGUF files \(a-Q4_0.*Name the one"):
        LanguageModel.from_pretrained(str(tmp_path))


def test_a_file_whose_name_does_not_say_what_it_is(file: Path, tmp_path: Path) -> None:
    """Ollama keeps its files so. Capital letters are no other suffix."""
    blob = shutil.copy(file, tmp_path / "sha256-0123")
    with pytest.raises(ModelNotFoundError, match=r"is a file.*ends in \.gguf"):
        LanguageModel.from_pretrained(str(blob))
    blob.rename(tmp_path / "M.GGUF")
    assert LanguageModel.from_pretrained(str(tmp_path)).identity.name == tmp_path.name


@pytest.mark.parametrize("name", ["nowhere.gguf", "/no/where.gguf", "./model.GGUF", "C:\\models\\m.gguf"])
def test_no_such_file(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match=r"there is no file.*org/repository:file\.gguf"):
        LanguageModel.from_pretrained(name)


def as_integers(name: str, weight: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
    kept = "up_proj" not in name
    return as_floats(name, weight) if kept else (np.zeros(weight.shape, dtype=np.int8), GGMLQuantizationType.I8)


def of_an_unknown_type() -> Any:
    model = tiny()
    model.config.model_type = "nosuchmodel"
    return model


BIASES = {f"blk.{layer}.attn_q.bias": np.ones(64, dtype=np.float32) for layer in range(3)}
DIVISORS = {"rope_freqs.weight": np.ones(5, dtype=np.float32)}
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "a part of a split model": (tiny, {"metadata": {"split.count": 2}}, r"llama-gguf-split --merge m\.gguf"),
    "an unknown architecture": (of_an_unknown_type, {}, r"nosuchmodel.*not supported.*newer transformers"),
    "an unknown quantization": (tiny, {"quantize": as_integers}, r"I8.*another quantization"),
    "no tokenizer": (tiny, {"tokenizer": False}, "holds no tokenizer"),
    # transformers would leave them out, silently
    "numbers without a place": (tiny, {"extra": BIASES}, "holds 192 numbers .*another one"),
    "divisors of another size": (tiny, {"extra": DIVISORS}, "divides 5 rotary frequencies"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_cannot_be_read_as_it_is(kind: str, tmp_path: Path) -> None:
    make, options, words = REFUSED[kind]
    with pytest.raises(UnsupportedModelError, match=words):
        LanguageModel.from_pretrained(str(write(tmp_path / "m.gguf", make(), **options)))


def test_a_file_that_lacks_a_tensor(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", tiny())
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(ModelNotFoundError, match=r"lacks 1 tensor.*up_proj"):
        LanguageModel.from_pretrained(str(path))


def test_weights_are_not_quantized_once_more(file: Path) -> None:
    with pytest.raises(InputError, match="cannot be quantized once more"):
        LanguageModel.from_pretrained(str(file), quantization_config=BitsAndBytesConfig(load_in_8bit=True))


def test_the_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"gguf is not installed.*semgrad-guard\[gguf\]"):
        LanguageModel.from_pretrained(str(file))


@given(where=st.floats(0, 1, exclude_max=True))
@settings(max_examples=60, deadline=None)
def test_a_file_that_is_cut_anywhere_is_refused(where: float, file: Path) -> None:
    content, cut = file.read_bytes(), file.with_name("cut.gguf")
    cut.write_bytes(content[: int(where * len(content))])
    with pytest.raises(ModelNotFoundError, match="cut off"):
        read_header(cut)


@pytest.mark.parametrize("content", [b"<html>", b"GGUF" + (9).to_bytes(4, "little") + bytes(64)])
def test_other_files_and_versions_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelNotFoundError, match="no GGUF file"):
        read_header(path)


def test_names_are_llama_cpps() -> None:
    """The files of these tests are named as gguf's own table has it."""
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for name in tiny().state_dict():
        assert gguf_name(name) == f"{table.get_name(name.removesuffix('.weight'))}.weight"


# What a file states beyond what transformers reads of it.

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits


def same(path: Path, expected: Any) -> bool:
    loaded = LanguageModel.from_pretrained(str(path))
    loaded.score("in a box?", "in Rome")  # by the self-check, also what the replay makes of it
    return torch.allclose(logits(loaded._model), logits(expected), atol=1e-4)


def described(architecture: str, **metadata: Any) -> GgufHeader:
    stated = {f"{architecture}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    return GgufHeader({"general.architecture": architecture, **stated})


@pytest.mark.parametrize(
    ("rope", "metadata"),
    [
        (
            {"rope_type": "linear", "factor": 4.0},
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        ),
        ({"rope_type": "linear", "factor": 4.0}, {"llama.rope.scale_linear": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 64,
            },
        ),
        ({}, {"llama.rope.scaling.type": "none"}),
    ],
    ids=["linear", "linear by its old name", "yarn", "none"],
)
def test_stretched_positions(rope: dict[str, Any], metadata: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(rope_parameters={"rope_type": "default", "rope_theta": 10000.0, **rope})
    assert same(write(tmp_path / "m.gguf", model, metadata=metadata), model)
    assert bool(rope) != same(write(tmp_path / "plain.gguf", model), model), "the stretch changes nothing"


def test_divided_frequencies(tmp_path: Path) -> None:
    """Llama 3.1 and later: the file holds a tensor of divisors."""
    model, plain = tiny(rope_parameters=LLAMA3), tiny()
    divisors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
    path = write(tmp_path / "m.gguf", model, extra={"rope_freqs.weight": divisors.numpy()})
    assert same(path, model)
    assert not same(write(tmp_path / "plain.gguf", model), model)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 4.0}, r"stretches.*longrope"),
        ({"llama.rope.dimension_count": 8}, "rotates 8 of a head's 16"),
    ],
)
def test_unknown_forms_are_refused(metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    header = described("llama", **{key.removeprefix("llama.").replace(".", "__"): v for key, v in metadata.items()})
    with pytest.raises(UnsupportedModelError, match=words):
        complete_config(tiny().config, header)


def test_a_width_of_heads_that_is_no_quotient(tmp_path: Path) -> None:
    model = tiny("qwen2", head_dim=32)
    metadata = {"qwen2.attention.key_length": 32, "qwen2.attention.value_length": 32, "qwen2.rope.dimension_count": 32}
    assert same(write(tmp_path / "m.gguf", model, metadata=metadata), model)


def test_windows_and_experts_and_parts_of_heads() -> None:
    phi3: Any = AutoConfig.for_model("phi3")
    complete_config(phi3, described("phi3", attention__sliding_window=2047, rope__dimension_count=72))
    assert (phi3.sliding_window, phi3.rope_parameters["partial_rotary_factor"]) == (2047, 0.75)
    experts: Any = AutoConfig.for_model("qwen2_moe")
    complete_config(experts, described("qwen2moe", expert_feed_forward_length=77))
    assert experts.moe_intermediate_size == 77


def test_windows_keep_rotary_positions_of_their_own() -> None:
    config: Any = AutoConfig.for_model("gemma3_text")
    scaling = {"rope__scaling__type": "linear", "rope__scaling__factor": 8.0, "rope__freq_base": 5e5}
    complete_config(config, described("gemma3", **scaling))
    assert config.rope_parameters["full_attention"] == {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5}
    assert config.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads_and_blocks_that_guess_ahead(tied: bool, tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=tied)
    ahead = {"blk.3.nextn.eh_proj.weight": np.ones((64, 128), dtype=np.float32)}
    assert same(write(tmp_path / "m.gguf", model, extra=ahead), model)


def test_a_vocabulary_without_gpt2s_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers adds it with a number that the model has no row for."""
    without = tuple(token for token in TOKENS if token != SPECIAL[0])
    monkeypatch.setattr("tests.engine.gguf_files.TOKENS", without)
    model = LanguageModel.from_pretrained(str(write(tmp_path / "m.gguf", tiny(vocab_size=len(without)))))
    assert len(model.tokenizer) == len(without)
    assert not model.doubts
    assert model.score("<|endoftext|> in a box?", "in Rome").semgrad > 0
