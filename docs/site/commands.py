"""The reference of the commands, written from the command line itself, so that it cannot go stale."""

from __future__ import annotations

import re
from typing import Any

import typer.main

from semgrad_guard.cli import app

MARKUP = re.compile(r"\[/?[a-z ]*\]")
NO_OPTION = ("install_completion", "show_completion")


def reference() -> str:
    """Markdown: the program, then each command with its usage, options, examples and exit codes."""
    program: Any = typer.main.get_command(app)
    parts = [_prose(program.epilog or "", heading=True)]
    parts += [_command(name, command) for name, command in program.commands.items() if not command.hidden]
    return "\n\n".join(part for part in parts if part)


def _command(name: str, command: Any) -> str:
    parameters = [each for each in command.params if each.name not in NO_OPTION and not getattr(each, "hidden", False)]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    options = [each for each in parameters if each.param_type_name == "option"]
    usage = " ".join(["semgrad-guard", name, "[OPTIONS]", *(_metavar(each) for each in arguments)])
    return "\n\n".join(
        [
            f"## {name}",
            _prose(command.help or ""),
            f"```sh\n{usage}\n```",
            _table("argument", [(f"`{_metavar(each)}`", _says(each)) for each in arguments]),
            _table("option", [(_names(each), _says(each)) for each in options]),
            _prose(command.epilog or "", heading=True),
        ]
    )


def _metavar(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()


def _names(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names if option.is_flag or not option.metavar else f"{names} `{option.metavar}`"


def _says(parameter: Any) -> str:
    said = MARKUP.sub("", parameter.help or "").replace("\n", " ")
    said = re.sub(r"([\[\]|<*])", r"\\\1", said)
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    if parameter.required:
        return f"{said} Required."
    if isinstance(parameter.show_default, str):
        return f"{said} Default: {default}."
    shown = default is not None and not callable(default) and not getattr(parameter, "is_flag", False)
    shown = shown and str(default) not in ("", "()", "Sentinel.UNSET") and "UNSET" not in repr(default)
    return f"{said} Default: `{getattr(default, 'value', default)}`." if shown else said


def _table(kind: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    return "\n".join([f"| {kind} | |", "| --- | --- |", *(f"| {name} | {said} |" for name, said in rows)])


def _prose(text: str, *, heading: bool = False) -> str:
    """Help as Markdown: what Typer sets in bold at the start of a line is a heading, and commands are code."""
    lines, code = list[str](), list[str]()
    for line in [*text.splitlines(), ""]:
        if re.match(r"(semgrad-guard|echo) |\{", line):
            code.append(line)
            continue
        if code:
            lines += ["```text", *code, "```", ""]
            code = []
        bold = re.match(r"\[bold\](.*?)\[/\](.*)", line)
        if heading and bold:
            lines += ["", f"**{bold[1]}**{bold[2]}", ""]
        elif re.match(r"\d+  ", line):
            lines.append(f"- `{line.split()[0]}` {line.split('  ', 1)[1]}")
        else:
            lines.append(MARKUP.sub("", line))
    return "\n".join(lines).strip()
