"""What the site adds to the pages while it is built: the commands' help, and files that live outside `docs`."""

from __future__ import annotations

import importlib.util
import os
import posixpath
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "semgrad_guard/pocket/MODEL_CARD.md": "project/model-card.md",
}
"""Pages of the site that are files elsewhere in the repository."""
SHOWN = (
    "examples/*.py",
    "examples/DOCUMENTS.md",
    "deploy/*",
    "benchmarks/recorded.json",
    "LICENSE",
)
"""Files that pages link to, copied as they are."""
COMMANDS = "<!-- commands -->"
LINK = re.compile(r"(\]\()([^)#\s]+)((?:#[^)]*)?\))")


def _commands_module() -> ModuleType:
    """`commands.py` next to this file; hooks are not a package."""
    spec = importlib.util.spec_from_file_location("site_commands", Path(__file__).with_name("commands.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_startup(**_: Any) -> None:
    """The checkout comes first, whatever is installed."""
    for folder in (ROOT / "integrations", ROOT):
        sys.path.insert(0, str(folder))


def on_files(files: Files, config: Any) -> Files:
    """Add what lives outside `docs`."""
    for source, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for pattern in SHOWN:
        for path in sorted(ROOT.glob(pattern)):
            name = f"source/{path.relative_to(ROOT).as_posix()}"
            name += ".txt" if path.suffix in (".md", "") else ""
            files.append(File.generated(config, name, content=path.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put the commands' help in, and turn links between files of the repository into links between pages."""
    uri = page.file.src_uri
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, _commands_module().reference())
    home = {page_: source for source, page_ in OUTSIDE.items()}.get(uri, f"docs/{uri}")
    return LINK.sub(lambda found: found[1] + _target(found[2], home=home, uri=uri) + found[3], markdown)


def _target(link: str, *, home: str, uri: str) -> str:
    """The link of a page that is `home` in the repository, as the page `uri` of the site needs it."""
    if "://" in link or link.startswith("mailto:"):
        return link
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home), link))
    if path.startswith("docs/"):
        goal = path.removeprefix("docs/")
    elif path in OUTSIDE:
        goal = OUTSIDE[path]
    elif path == "README.md":
        goal = "index.md"
    else:
        goal = f"source/{path}" + (".txt" if os.path.splitext(path)[1] in (".md", "") else "")
    return posixpath.relpath(goal, posixpath.dirname(uri) or ".")
