"""The code imports and calls nothing that Windows lacks, unless it asks first. Read from the syntax trees.

No machine with Windows runs these tests here; this finds what would fail there at import or at the first call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted([*(ROOT / "semgrad_guard").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")])


def names(words: str) -> frozenset[str]:
    return frozenset(words.split())


MODULES = names("curses fcntl grp posix pty pwd readline resource syslog termios tty")
ATTRIBUTES = {
    "os": names(
        "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK chown chroot confstr fchown fdatasync fork forkpty geteuid getgid "
        "getgroups getloadavg getpgid getpgrp getpriority getsid getuid initgroups killpg lchown lockf major makedev "
        "mkfifo mknod nice openpty pathconf pipe2 posix_fadvise posix_fallocate posix_spawn pread preadv pwrite "
        "register_at_fork sched_getaffinity sched_setaffinity sendfile setgid setpgid setpriority setsid setuid "
        "statvfs sync sysconf tcgetpgrp ttyname uname wait wait3 wait4 waitid"
    ),
    "signal": names(
        "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 SIGWINCH alarm pause "
        "pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait"
    ),
    "socket": frozenset(["AF_UNIX", "SO_REUSEPORT"]),
    "time": names("clock_getres_ns clock_settime pthread_getcpuclockid tzset"),
}
METHODS = frozenset(["add_signal_handler", "remove_signal_handler"])
"""Of asyncio's event loops."""
ROOTS = ("/dev/", "/proc/", "/sys/", "/tmp/", "/etc/", "/var/")  # noqa: S108 - looked for, not used
QUESTIONS = ("os.name", "sys.platform", "platform.system", "hasattr")


def unportable(tree: ast.Module) -> Iterator[str]:
    """Each import, attribute and path that Windows lacks, with its line."""
    homes = _homes(tree)
    for node in _unguarded(tree):
        for name in _imported(node):
            if name.split(".")[0] in MODULES:
                yield f"line {node.lineno}: import {name}"  # type: ignore[attr-defined]
        if isinstance(node, ast.ImportFrom) and node.module in ATTRIBUTES:
            for alias in node.names:
                if alias.name in ATTRIBUTES[node.module]:
                    yield f"line {node.lineno}: {node.module}.{alias.name}"
        if isinstance(node, ast.Attribute):
            home = homes.get(ast.unparse(node.value), "")
            if node.attr in ATTRIBUTES.get(home, ()) or node.attr in METHODS:
                yield f"line {node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(ROOTS):
            yield f"line {node.lineno}: {node.value!r}"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def _homes(tree: ast.Module) -> dict[str, str]:
    """The names under which a file knows these modules."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return {alias.asname or alias.name: alias.name for alias in aliases}


def _unguarded(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those behind a question about the system, or an import that may fail."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.If, ast.IfExp)) and any(word in ast.unparse(child.test) for word in QUESTIONS):
            continue
        if isinstance(child, ast.Try) and any(
            "ImportError" in ast.unparse(handler.type or ast.Name("")) for handler in child.handlers
        ):
            continue
        yield child
        yield from _unguarded(child)


def test_nothing_that_windows_lacks() -> None:
    places = {path: list(unportable(ast.parse(path.read_text(encoding="utf-8")))) for path in FILES}
    assert {path.relative_to(ROOT).as_posix(): lines for path, lines in places.items() if lines} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import fcntl",
        "from resource import getrusage",
        "import os\ndef f():\n    os.fork()",
        "import os as system\nsystem.sync()",
        "from os import killpg",
        "import signal\nsignal.signal(signal.SIGHUP, f)",
        "import os, signal\nos.kill(1, signal.SIGKILL)",
        "loop.add_signal_handler(2, f)",
        "open('/proc/meminfo')",
    ],
)
def test_each_kind_is_found(code: str) -> None:
    assert list(unportable(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "import os\nif hasattr(os, 'fork'):\n    os.fork()",
        "import os, sys\nif sys.platform != 'win32':\n    os.sync()",
        "try:\n    import fcntl\nexcept ImportError:\n    fcntl = None",
        "import os\nos.replace('a', 'b')",
        "import signal\nsignal.signal(signal.SIGTERM, f)",
        "class os: pass\nmine.fork()",
    ],
)
def test_what_asks_first_may(code: str) -> None:
    assert not list(unportable(ast.parse(code)))
