"""Saving and loading: nothing is lost, nothing half-written is left, nothing that was touched is accepted."""

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from semgrad_guard.calibration import Binding, Calibration, calibrate
from semgrad_guard.calibration.binding import EstimatorChoice
from semgrad_guard.calibration.calibration_record import report
from semgrad_guard.calibration.planning import plan
from semgrad_guard.calibration.prompt_shape import PromptShape
from semgrad_guard.errors import CalibrationError
from semgrad_guard.pocket import CALIBRATION_PATH
from semgrad_guard.records import FusedWeights

from .made_prompts import closed_book, drawn

BINDING = Binding(
    model="pocket",
    revision="v1",
    fingerprint="sha256:ab",
    estimator="hybridgrad",
    settings={"tau": 1.0, "beta": 1, "layers": [3, 4], "exact": True, "note": None},
    prompt_template="closed-book",
    grader="exact-match",
)


def example(**changes: Any) -> Calibration:
    rng = np.random.default_rng(0)
    u = rng.lognormal(size=120)
    made = {"alpha": 0.2, "delta": 0.1, "binding": BINDING}
    return calibrate([*u, None], [*(rng.random(120) > 0.1 * u), False], **{**made, **changes})


def test_a_calibration_keeps_the_shape_of_its_prompts_and_learned_numbers(tmp_path: Path) -> None:
    prompts = drawn(closed_book, 121, 0)
    numbers = dict.fromkeys(("lows", "highs", "centres", "weights", "scales"), (0.5, 1.5))
    weights = FusedWeights(columns=("a", "b"), **numbers, intercept=0.1, n=200, n_wrong=80)
    choice = EstimatorChoice(asked="states", estimator="states", reason="Fitted on 200 answers.", weights=weights)
    calibration = example(prompts=iter(prompts), choice=choice)
    assert (calibration.shape, calibration.choice) == (PromptShape.of(prompts), choice)
    loaded = Calibration.load(calibration.save(tmp_path / "c.json"))
    assert loaded == calibration
    assert loaded.unfamiliar(prompts[0]) == ()
    assert loaded.unfamiliar(None) == ("the prompt is not known",)
    assert calibration.id != example().id
    assert (
        calibration.model_copy(update={"shape": None, "choice": None, "id": example().id}) == example()
    )  # nothing else is touched


def test_a_calibration_without_a_shape_loads_and_says_how_to_make_it_anew(tmp_path: Path) -> None:
    old = example()
    path = old.save(tmp_path / "c.json")
    assert "shape" not in json.loads(path.read_text())
    loaded = Calibration.load(path)
    assert loaded.id == old.id
    for prompt in (None, *drawn(closed_book, 3, 0)):
        assert "semgrad-guard calibrate" in loaded.unfamiliar(prompt)[0]
        assert "it was given none" in loaded.unfamiliar(prompt)[0]


anything = st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.tuples(anything, st.booleans()), min_size=1, max_size=30), st.floats(0.001, 0.999))
def test_any_calibration_survives_the_file(answers: list[tuple[float, bool]], alpha: float) -> None:
    u, ok = [a for a, _ in answers], [b for _, b in answers]
    calibration = calibrate(u, ok, alpha=alpha, delta=0.5)
    with tempfile.TemporaryDirectory() as folder:
        assert Calibration.load(calibration.save(f"{folder}/c.json")) == calibration


def test_the_file_is_plain_json_one_field_a_line(tmp_path: Path) -> None:
    text = example().save(tmp_path / "c.json").read_text()
    record = json.loads(text)
    assert record["schema_version"] == 2
    assert len(text.splitlines()) == len(record) + 2


def test_the_id_depends_on_everything_and_only_on_content() -> None:
    assert example().id == example().id
    others = [
        example(alpha=0.21),
        example(delta=0.11),
        example(tries=1),
        example().with_content(created="2026-02-01"),
        example(binding=None),
        example(binding=BINDING.model_copy(update={"upstream": "x"})),
        example(copies="once"),
    ]
    assert len({example().id, *(other.id for other in others)}) == len(others) + 1


@pytest.mark.parametrize(
    ("old", "named"),
    [
        ({"languages": ["de"]}, "languages is not known to this version"),
        ({"n_recorded": 3}, "n_recorded is not known to this version"),
        ({"procedure": "two-walks"}, "procedure is not known to this version"),
        ({"sentences": {"on_doubt": "mark"}}, "sentences.on_doubt is not known to this version"),
        ({"confidence_map": {"method": "platt", "centre": 0.0}}, "confidence_map.method is not known to this version"),
    ],
)
def test_a_file_of_another_version_is_refused_by_what_it_uses(tmp_path: Path, old: Any, named: str) -> None:
    path = example().save(tmp_path / "c.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **old}))
    with pytest.raises(CalibrationError, match=f"{named}.*calibrate` again"):
        Calibration.load(path)


def edited(record: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every field changed in a way that a hand might change it."""
    for name, value in record.items():
        if isinstance(value, bool) or value is None:
            yield name, {**record, name: "x"}
        elif isinstance(value, int | float):
            yield name, {**record, name: value + 1 if isinstance(value, int) else value / 2}
        elif isinstance(value, str):
            yield name, {**record, name: value + "0"}
        elif isinstance(value, list):
            yield name, {**record, name: value[1:]}
        else:
            for key in value:
                yield f"{name}.{key}", {**record, name: {**value, key: "x"}}
        yield f"next to {name}", {**record, f"{name}_": value}
        yield f"without {name}", {k: v for k, v in record.items() if k != name}


def test_a_file_edited_by_hand_is_refused_whatever_was_edited(tmp_path: Path) -> None:
    original = example(prompts=drawn(closed_book, 121, 0))
    path = original.save(tmp_path / "c.json")
    record = json.loads(path.read_text())
    cases = dict(edited(record))
    assert len(cases) > 55
    for name, content in cases.items():
        path.write_text(json.dumps(content))
        with pytest.raises(CalibrationError, match="must not be edited"):
            Calibration.load(path)
        assert name
    path.write_text(json.dumps(record, indent=4))  # only laid out differently
    assert Calibration.load(path) == original


@pytest.mark.parametrize("content", ["", "[]", "null", "3", "{}", '{"id": NaN}', "not json", "{" * 5000])
def test_other_files_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(content)
    with pytest.raises(CalibrationError, match=r"c\.json"):
        Calibration.load(path)


def test_a_missing_folder_and_a_folder_as_target_are_named(tmp_path: Path) -> None:
    for target in (tmp_path / "none" / "c.json", tmp_path):
        with pytest.raises(CalibrationError, match="Cannot write the calibration to"):
            example().save(target)
    assert list(tmp_path.iterdir()) == []


def test_fields_at_their_defaults_are_in_no_file_and_so_in_no_id(tmp_path: Path) -> None:
    """A later release adds fields with defaults, and the files of this one keep their ids."""
    shipped = Calibration.load(CALIBRATION_PATH)
    again = shipped.save(tmp_path / "c.json")
    assert again.read_text() == CALIBRATION_PATH.read_text()
    assert Calibration.load(again) == shipped.require_intact()
    content = json.loads(again.read_text())
    assert not {"copies", "tries", "languages"} & content.keys()
    assert "stop" not in content["binding"]

    class Later(Calibration, frozen=True):
        added: str | None = None

    assert Later.load(again).id == shipped.id


def test_a_calibration_is_frozen_and_cannot_be_forged() -> None:
    calibration = example()
    with pytest.raises(ValidationError):
        calibration.threshold = math.pi  # type: ignore[misc]
    with pytest.raises(ValidationError, match="id does not match"):
        Calibration(**{**dict(calibration), "threshold": 99.0})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"threshold": 99.0}, "none of the grid's"),
        ({"n_answered": 10**9}, "counts must not grow"),
        ({"n_answered_wrong": 10**6}, "counts must not grow"),
        ({"n_unscored": 50}, "counts must not grow"),
        ({"n": 10**6}, "a score for each"),
        ({"n_wrong": 10**6}, "no more wrong answers"),
        ({"scores": (0.1,)}, "a score for each"),
        ({"threshold": None}, "either a threshold"),
        ({"reason": "none"}, "either a threshold"),
    ],
)
def test_what_does_not_add_up_is_not_sealed(changes: dict[str, Any], words: str) -> None:
    made = example()
    assert made.threshold is not None
    content = {name: value for name, value in made if name not in ("id", "schema_version")}
    assert Calibration.seal(**content) == made
    with pytest.raises(CalibrationError, match=words):
        Calibration.seal(**{**content, **changes})


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = example().save(tmp_path / "c.json")
    text = path.read_text()
    for twice in (text.replace("{", '{"threshold": 99.0, ', 1), text.replace('"model"', '"model": "x", "model"', 1)):
        path.write_text(twice)
        with pytest.raises(CalibrationError, match=r"twice.*must not be edited"):
            Calibration.load(path)


# The report: what a calibration tells about itself, from its record alone.


def test_the_report_tells_what_the_record_knows() -> None:
    rng = np.random.default_rng(0)
    wrong = rng.random(400) < 0.2
    scores = rng.normal(size=400) + 1.2 * wrong
    prompts = drawn(closed_book, 400, 0)
    made = calibrate(scores, ~wrong, alpha=0.2, delta=0.1, prompts=prompts, copies="keep", tries=2)
    made = made.with_content(aurocs={"gnll": 0.9, "b": None})
    sentences = report(made)
    assert made.auroc == pytest.approx(0.8, abs=0.05)
    chance = plan(400, error=made.n_wrong / 400, auroc=made.auroc, alpha=0.2, delta=made.level)
    assert sentences["chance"].endswith(str(chance))
    assert "to traffic like this, at most 20% are wrong, with 90% probability for all 2 tries" in sentences["promise"]
    assert sentences["effect"] == str(made.effect)
    assert sentences["prompts"].startswith("one turn, texts of ")
    assert sentences["prompts"].endswith("; a second turn is not promised")
    assert sentences["scores"] == "AUROC gnll 0.900"
    assert sentences["assumption"] == made.assumption


@pytest.mark.parametrize(
    "made",
    [
        Calibration.load(CALIBRATION_PATH),
        calibrate([0.1], [True], alpha=0.1, delta=0.1),
        calibrate([0.1, 0.1], [True, False], alpha=0.1, delta=0.1),
        calibrate([None], [False], alpha=0.1, delta=0.1),
        calibrate([0.1] * 40, [True] * 40, alpha=0.1, delta=0.1),
        calibrate(range(40), [False] * 40, alpha=0.1, delta=0.1),
    ],
    ids=["the embedded one", "one label", "two labels", "no score", "all right", "all wrong"],
)
def test_odd_records_have_a_report_too(made: Calibration) -> None:
    sentences = report(made)
    assert {"promise", "assumption"} <= sentences.keys()
    assert ("effect" in sentences) == (made.threshold is not None and made.n_tested == made.n)
    assert ("chance" in sentences) == (made.auroc is not None)
    assert made.threshold is not None or made.reason
