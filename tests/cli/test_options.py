"""What options take: each once, "-" where it means something, numbers that make sense, devices that hold a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.main import get_command

from semgrad_guard.cli import app, options
from semgrad_guard.estimators import FusedStates
from semgrad_guard.estimators.suite import paper_suite

from .helpers import ASKED, flat, jsonl

Run = Callable[..., Result]
PROGRAM: Any = get_command(app)
SINGLE = [
    (name, option)
    for name, command in PROGRAM.commands.items()
    for option in command.params
    if option.param_type_name == "option" and not option.multiple and not option.is_eager
]


@pytest.mark.parametrize(("command", "option"), SINGLE, ids=[f"{name} {o.opts[0]}" for name, o in SINGLE])
def test_an_option_is_given_once(run: Run, tmp_path: Path, command: str, option: Any) -> None:
    spelled, again = option.opts[0], [*option.opts, *option.secondary_opts][-1]
    value = () if option.is_flag else ("1",)
    question = ("What?",) if command == "ask" else ()
    result = run(command, *question, spelled, *value, again, *value)
    assert result.exit_code == 2
    assert f"{option.opts[0]}" in flat(result.stderr)
    assert "is given 2 times; give it once" in flat(result.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ("score", "--question", "q", "--response", "r", "--by", "word"),
        ("ask", "q", "--dtype", "int8"),
        ("ask", "q", "--variant", "x"),
        ("ask", "q", "--on-unscored", "x"),
        ("calibrate", "--grader", "x"),
        ("evaluate", "--grader", "x"),
        ("calibrate", "--grader", "contains=x"),
        ("evaluate", "--prompt", "x"),
        ("calibrate", "--alpha", "x"),
        ("evaluate", "--methods", "x"),
    ],
)
def test_a_wrong_value_is_named_in_our_own_words(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert f"Invalid value for '{arguments[-2]}'" in flat(result.stderr)
    assert "Value error" not in flat(result.stderr)


def test_methods_are_those_that_an_evaluation_has() -> None:
    assert {estimator.name for estimator in (*paper_suite(), FusedStates())} == set(options.METHOD_NAMES)


@pytest.mark.parametrize(
    ("option", "value"),
    [("alpha", "1e-300"), ("alpha", "0.99999999"), ("delta", "1e-300"), ("delta", "1"), ("delta", "nan")]
    + [("upstream", value) for value in ("x y", "abc", "0123456789ABCDEF", "0123456789abcdef0", "")],
)
def test_promises_that_make_no_sense_are_wrong_usage(run: Run, right: Path, option: str, value: str) -> None:
    result = run("calibrate", "--data", right, "--output", right.parent / "c.json", f"--{option}={value}")
    assert result.exit_code == 2
    assert f"Invalid value for '--{option}'" in flat(result.stderr)


@pytest.mark.parametrize(
    "arguments",
    [
        ("calibrate", "--data", "q", "--output", "-"),
        ("calibrate", "--data", "q", "--output", "c", "--answers", "-"),
        ("calibrate", "--data", "q", "--output", "c", "--plot", "-"),
        ("probe", "--data", "q", "--output", "-"),
        ("evaluate", "--data", "q", "--output", "-"),
        ("evaluate", "--data", "q", "--output", "e", "--beside", "-"),
        ("evaluate", "--data", "q", "--output", "e", "--calibration", "-"),
        ("ask", "q", "--probe", "-"),
        ("demo", "--output", "-"),
    ],
)
def test_a_dash_where_nothing_can_flow_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert "it takes no stdin or stdout; name a file" in flat(result.stderr)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ("score", "--question", "-", "--response", "-"),
        ("calibrate", "--data", "-", "--prompt", "@-", "--output", "c.json"),
        ("evaluate", "--data", "-", "--labels", "-", "--output", "e"),
    ],
)
def test_stdin_is_read_once(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, stdin="{}")
    assert result.exit_code == 2
    assert "stdin can be read once" in flat(result.stderr)


@pytest.mark.parametrize("piped", ["question", "response"])
def test_one_of_two_texts_comes_from_stdin(run: Run, model_folder: Path, piped: str) -> None:
    texts = {"question": "Who wrote Emma?", "response": "Jane Austen"}
    given = [part for name, text in texts.items() for part in (f"--{name}", "-" if name == piped else text)]
    result = run("score", "--model", model_folder, *given, "--json", stdin=f"{texts[piped]}\n")
    record = json.loads(result.stdout)
    assert {name: record[name] for name in texts} == texts


@pytest.mark.parametrize("by", [(), ("--by", "sentence")])
def test_scores_go_to_stdout(
    run: Run, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: tuple[str, ...]
) -> None:
    data = jsonl(tmp_path / "r.jsonl", ({"question": q, "response": "This."} for q in ASKED[:2]))
    monkeypatch.chdir(tmp_path)
    given = ("score", "--model", model_folder, "--data", data, *by)
    shown, as_json = (run(*given, *how).stdout.splitlines() for how in (("--output", "-"), ("--json",)))
    assert [list(json.loads(line)) for line in shown] == [list(json.loads(line)) for line in as_json]
    assert [json.loads(line)["question"] for line in shown] == ASKED[:2]
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"]
    assert run(*given, "--output", "./-").exit_code == 0
    assert len((tmp_path / "-").read_text().splitlines()) == 2


NOWHERE = [
    *("meta", "mps", "xla", "hpu", "privateuseone", "mkldnn", "lazy", "vulkan", "cuda:99", "cuda:-1", "auto", "CPU"),
    "banana",
]


@pytest.mark.filterwarnings("ignore:.*no longer used as device type")
@pytest.mark.parametrize("device", NOWHERE)
def test_a_device_that_holds_no_model_is_refused_in_a_line(run: Run, model_folder: Path, device: str) -> None:
    with suppress(Exception):  # whatever error torch raises
        torch.ones(1, device=device).item()
        pytest.skip(f"there is a device {device} here")
    result = run("ask", "What?", "--model", model_folder, "--device", device)
    assert result.exit_code == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"Error: There is no device {device!r} here that holds a model: ")
    assert line.endswith("Try --device cpu.")
    assert len(line) < 320


FOUR_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("command", ["ask", "score", "calibrate", "evaluate", "probe", "serve"])
def test_every_command_that_loads_a_model_quantizes_it(command: str) -> None:
    assert "--quantization-config" in {name for param in PROGRAM.commands[command].params for name in param.opts}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("[]", "give an object with a quant_method"),
        ('{"load_in_4bit": true}', "give an object with a quant_method"),
        ('{"quant_method": 4}', "give an object with a quant_method"),
        ("@nowhere.json", "nowhere.json"),
        ("@-", "it takes no stdin"),
    ],
    ids=lambda value: value[:24],
)
def test_what_is_no_quantization_config(run: Run, value: str, words: str) -> None:
    result = run("ask", "What?", "--quantization-config", value)
    assert result.exit_code == 2
    assert "Invalid value for '--quantization-config'" in flat(result.stderr)
    assert words in flat(result.stderr)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "nosuch"}, "'nosuch'; it is one of"),
        ({"quant_method": "bitsandbytes"}, "config for bitsandbytes is not right"),
        ({**FOUR_BITS, "bnb_4bit_quant_typ": "nf4"}, "says bnb_4bit_quant_typ, which it does not know"),
        ({"quant_method": "gptq", "bits": 77}, "config for gptq is not right"),
    ],
    ids=str,
)
def test_a_quantization_that_there_is_not(run: Run, model_folder: Path, config: Any, words: str) -> None:
    result = run("ask", "What?", "--model", model_folder, "--quantization-config", json.dumps(config))
    assert result.exit_code == 1
    assert words in flat(result.stderr)


@pytest.mark.parametrize("as_file", [False, True])
def test_a_quantization_without_its_library_says_what_to_install(
    run: Run, model_folder: Path, tmp_path: Path, as_file: bool
) -> None:
    if find_spec("bitsandbytes"):
        pytest.skip("bitsandbytes is installed")
    (tmp_path / "config.json").write_text(json.dumps(FOUR_BITS))
    given = f"@{tmp_path / 'config.json'}" if as_file else json.dumps(FOUR_BITS)
    result = run("ask", "What?", "--model", model_folder, "--quantization-config", given)
    assert result.exit_code not in (0, 2)
    assert "bitsandbytes" in flat(result.stderr)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("command", ["ask", "score", "calibrate", "evaluate", "probe", "serve"])
def test_every_command_that_loads_a_model_tells_its_chat_template_options(command: str) -> None:
    assert "--template-option" in {name for param in PROGRAM.commands[command].params for name in param.opts}


@pytest.mark.parametrize("value", ["enable_thinking", "=false", "a b=1", "on=False", "on=", 'on={"a"'])
def test_what_is_no_option_of_a_template(run: Run, value: str) -> None:
    result = run("ask", "What?", "--template-option", value)
    assert result.exit_code == 2
    assert "Invalid value for '--template-option'" in flat(result.stderr)
    assert "JSON" in result.stderr
