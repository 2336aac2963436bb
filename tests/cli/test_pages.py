"""The steps of a page, one after the other: the files that it shows go into the commands that it shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

PAGE = Path(__file__).parents[2] / "docs" / "your-model.md"
SHOWN = re.compile(r"`(\w+\.jsonl)`.*?\n\n```json\n(.*?)```", re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?semgrad-guard (calibrate (?:.*\\\n)*.*)$", re.MULTILINE)


def test_the_steps_of_your_model_follow_from_each_other(
    run: Callable[..., Result], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text(encoding="utf-8")
    files = dict(SHOWN.findall(page))
    assert set(files) == {"questions.jsonl", "passages.jsonl"}
    for name, content in files.items():
        Path(name).write_text(content)
    plain, prompts, *_ = (shlex.split(command.replace("\\\n", " ")) for command in COMMAND.findall(page))
    for command, data in ((plain, "questions.jsonl"), (prompts, "passages.jsonl")):
        command[command.index("--model") + 1] = str(model_folder)
        command[command.index("--data") + 1] = data
        result = run(*command, "--max-tokens", 2)
        assert result.exit_code in (0, 4, 6), result.stderr  # 4: two questions keep no promise; 6: all were cut off
        assert "is not valid" not in result.stderr
        assert Path(command[command.index("--output") + 1]).is_file()
    assert prompts[prompts.index("--data") + 1] in files
