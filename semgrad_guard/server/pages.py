"""The pages for people: files of the wheel, read once, under a policy by which they can load and reach nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

_HTML, _JS = "text/html; charset=utf-8", "text/javascript; charset=utf-8"
_FILES: Mapping[str, tuple[str, str]] = {
    "/": ("index.html", _HTML),
    "/decisions": ("decisions.html", _HTML),
    "/static/style.css": ("style.css", "text/css; charset=utf-8"),
    "/static/api.js": ("api.js", _JS),
    "/static/playground.js": ("playground.js", _JS),
    "/static/decisions.js": ("decisions.js", _JS),
    "/static/icon.svg": ("icon.svg", "image/svg+xml"),
}
PATHS = frozenset(_FILES)
"""The paths of the pages. They hold no data, so they need no key: they get their data from the routes."""

HEADERS: Mapping[str, str] = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Pages:
    """The files, by the paths at which they are served."""

    def __init__(self) -> None:
        folder = files("semgrad_guard.server") / "static"
        self._content = {path: (folder / name).read_bytes() for path, (name, _) in _FILES.items()}

    def response(self, path: str, request: Request) -> Response:
        """The file at one of `PATHS`; a page that is mounted below a path names its files there."""
        content, kind = self._content[path], _FILES[path][1]
        if kind == _HTML:
            content = content.replace(b'="/', f'="{escape(request.scope.get("root_path", ""))}/'.encode())
        return Response(content, media_type=kind, headers=dict(HEADERS))
