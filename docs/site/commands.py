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
    parameters = [
        parameter
        for parameter in command.params
        if parameter.name not in NO_OPTION and not getattr(parameter, "hidden", False)
    ]
    arguments = [parameter for parameter in parameters if parameter.param_type_name == "argument"]
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    usage = " ".join(["semgrad-guard", name, "[OPTIONS]", *(_metavar(argument) for argument in arguments)])
    return "\n\n".join(
        [
            f"## {name}",
            _prose(command.help or ""),
            f"```sh\n{usage}\n```",
            _table("argument", [(f"`{_metavar(argument)}`", _help(argument)) for argument in arguments]),
            _table("option", [(_names(option), _help(option)) for option in options]),
            _prose(command.epilog or "", heading=True),
        ]
    )


def _metavar(parameter: Any) -> str:
    return parameter.metavar or parameter.name.upper()


def _names(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return names if option.is_flag or not option.metavar else f"{names} `{option.metavar}`"


def _help(parameter: Any) -> str:
    text = MARKUP.sub("", parameter.help or "").replace("\n", " ")
    text = re.sub(r"([\[\]|<*])", r"\\\1", text)
    default = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    if parameter.required:
        return f"{text} Required."
    if isinstance(parameter.show_default, str):
        return f"{text} Default: {default}."
    shown = default is not None and not callable(default) and not getattr(parameter, "is_flag", False)
    shown = shown and str(default) not in ("", "()", "Sentinel.UNSET") and "UNSET" not in repr(default)
    return f"{text} Default: `{getattr(default, 'value', default)}`." if shown else text


def _table(kind: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    return "\n".join([f"| {kind} | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows)])


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
