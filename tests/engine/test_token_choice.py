"""A t* from a file: taken up by the model it fits, refused by others, part of what a calibration is bound to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from semgrad_guard import HybridGrad, LanguageModel, SemGrad
from semgrad_guard.engine.objective import Objective
from semgrad_guard.engine.prompts.semantic_token import TokenChoice
from semgrad_guard.errors import BindingMismatchError, InputError
from semgrad_guard.guard import Answerer


def choice(model: LanguageModel, offset: int | None) -> TokenChoice:
    return TokenChoice(offset=offset, template=model.identity.template, model=model.name, reason="measured")


def saved(path: Path, record: object) -> Path:
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return path


def again(model: LanguageModel, token: int | TokenChoice | None, **options: object) -> LanguageModel:
    return LanguageModel.from_transformers(
        model._model, model.tokenizer, name=model.name, semantic_token=token, template_options=options
    )


def test_the_model_takes_the_files_token(language_model: LanguageModel, tmp_path: Path) -> None:
    path = saved(tmp_path / "p.json", {"other": 1, "semantic_token": choice(language_model, -4).model_dump()})
    found = again(language_model, TokenChoice.load(path))
    token = found.render("q").semantic_token
    assert (token.offset, token.source) == (-4, "override")
    expected = language_model.evidence("q", "an answer").gradients(Objective(token=-4)).scores.semgrad
    assert SemGrad()(found.evidence("q", "an answer")).uncertainty == expected


def test_the_templates_own_place_overrides_nothing(language_model: LanguageModel) -> None:
    found = again(language_model, choice(language_model, None))
    assert found.render("q").semantic_token == language_model.render("q").semantic_token
    assert found.semantic_token is None


def test_another_template_is_refused(language_model: LanguageModel) -> None:
    with pytest.raises(BindingMismatchError, match="another token there"):
        again(language_model, choice(language_model, -4), enable_thinking=False)


def test_calibrations_are_bound_to_an_own_token(language_model: LanguageModel) -> None:
    plain = Answerer(language_model, HybridGrad()).binding().settings or {}
    moved = Answerer(again(language_model, -4), HybridGrad()).binding().settings
    assert "semantic_token" not in plain
    assert moved == {**plain, "semantic_token": -4}


OUTSIDE = {"offset": 3, "template": "", "model": "", "reason": ""}


@pytest.mark.parametrize(
    "record",
    ["{", "[]", {"a": 1}, {"semantic_token": None}, {"semantic_token": OUTSIDE}],
    ids=["cut", "list", "absent", "null", "outside"],
)
def test_other_files_are_refused(tmp_path: Path, record: object) -> None:
    with pytest.raises(InputError, match="not what `semgrad-guard probe` writes"):
        TokenChoice.load(saved(tmp_path / "p.json", record))
    with pytest.raises(InputError, match="Cannot read"):
        TokenChoice.load(tmp_path / "absent.json")
