"""The shape of the house, read from its syntax trees: imports, public names, who decides, and what Windows lacks.

No machine with Windows runs these tests here; the last part finds what would fail there at import or at a first call.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import semgrad_guard

ROOT = Path(__file__).parents[1]
TREES = (ROOT, ROOT / "integrations")
PACKAGES = ("semgrad_guard", "langchain_semgrad_guard", "llama_index_semgrad_guard")


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name; a package by the name of its folder."""
    found: dict[str, Path] = {}
    for tree in TREES:
        for package in PACKAGES:
            for path in (tree / package).rglob("*.py"):
                found[".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


MODULES = modules()


@cache
def tree_of(name: str) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def imports(name: str) -> Iterator[str]:
    """The modules of ours that a module imports anywhere in its text."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


@cache
def graph_of_imports() -> Mapping[str, frozenset[str]]:
    return {name: frozenset(imports(name)) - {name} for name in MODULES}


def children(package: str) -> dict[str, set[str]]:
    """What each direct child of a package imports of its siblings; a child is a module or a whole folder.

    The package's own `__init__` re-exports names and is no sibling: a module that imports it from inside imports all.
    """
    graph: dict[str, set[str]] = {}
    depth = package.count(".") + 2
    for name, targets in graph_of_imports().items():
        if not name.startswith(f"{package}."):
            continue
        child = ".".join(name.split(".")[:depth])
        inside = {".".join(target.split(".")[:depth]) for target in targets if target.startswith(package)}
        graph.setdefault(child, set()).update(inside - {child})
    return graph


def test_every_package_is_acyclic_inside() -> None:
    for package in (name for name, path in MODULES.items() if path.name == "__init__.py"):
        graph = children(package)
        importing_the_package = [child for child, targets in graph.items() if package in targets]
        if package != "semgrad_guard":
            assert not [c for c in importing_the_package if not c.endswith("__main__")], "import the sibling itself"
        try:
            tuple(TopologicalSorter({child: targets - {package} for child, targets in graph.items()}).static_order())
        except CycleError as error:
            pytest.fail(" -> ".join(error.args[1]))


FRONTS = ("langchain_semgrad_guard", "llama_index_semgrad_guard")
OPEN = (
    "semgrad_guard",
    "semgrad_guard.guard",
    "semgrad_guard.calibration",
    "semgrad_guard.estimators",
    "semgrad_guard.errors",
    "semgrad_guard.lazy",
    "semgrad_guard.named",
    "semgrad_guard.records",
)
"""The documented modules. A front may import their public names."""


def public_names(name: str) -> set[str]:
    """`__all__`, or the names that a package imports as themselves, or those that a module defines."""
    if listed := getattr(import_module(name), "__all__", None):
        return set(listed)
    body = tree_of(name).body
    aliases = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    defined = {node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    return {alias.name for alias in aliases if alias.name == alias.asname} or {x for x in defined if x[0] != "_"}


def imports_of_private_names(name: str) -> Iterator[str]:
    """The imports by which a front reaches behind the public names."""
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "semgrad_guard")
        elif isinstance(node, ast.ImportFrom) and (module := node.module or "").split(".")[0] == "semgrad_guard":
            public = public_names(module) if module in OPEN else ()
            if not module.startswith("semgrad_guard.adapters."):
                yield from (f"{module}.{alias.name}" for alias in node.names if alias.name not in public)


def test_a_front_imports_public_names_only() -> None:
    fronts = [name for name in MODULES if name.split(".")[0] in FRONTS and ".demo" not in name]
    assert {name: private for name in fronts if (private := list(imports_of_private_names(name)))} == {}


def test_adapters_reexport_nothing() -> None:
    nodes = ast.walk(tree_of("semgrad_guard.adapters"))
    assert not [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]


def test_every_folder_has_a_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contracts = settings["importlinter"]["contracts"]
    house = next(contract for contract in contracts if contract.get("containers") == ["semgrad_guard"])
    layers = {name.strip() for layer in house["layers"] for name in layer.split("|")}
    assert house["exhaustive"]
    assert layers == {name.split(".")[1] for name in MODULES if name.startswith("semgrad_guard.")}


# What the package exports, and what importing it costs.


def test_every_exported_name_exists_and_no_other() -> None:
    for name in semgrad_guard.__all__:
        assert getattr(semgrad_guard, name) is not None
    assert set(dir(semgrad_guard)) == set(semgrad_guard.__all__)
    assert len(semgrad_guard.__all__) <= 26  # the rest is in its modules
    with pytest.raises(AttributeError, match="nonsense"):
        _ = semgrad_guard.nonsense


def test_importing_loads_nothing_heavy() -> None:
    """Deciding needs no tensor library."""
    heavy = {"torch", "transformers", "sklearn", "mapie", "scipy.stats", "scipy.optimize", "semgrad_guard.engine"}
    code = f"import sys, semgrad_guard, semgrad_guard.calibration; print({heavy} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_no_module_has_the_name_of_a_public_name() -> None:
    """A module would take the place of a name that loads at its first use."""
    packages = [import_module(name) for name, path in MODULES.items() if path.name == "__init__.py"]
    listed = [(package, name) for package in packages for name in getattr(package, "__all__", ())]
    assert [(package, name) for package, name in listed if isinstance(getattr(package, name), ModuleType)] == []
    assert {f"{package.__name__}.{name}" for package, name in listed} & MODULES.keys() == set()


def test_no_two_files_of_a_package_have_one_name() -> None:
    for package in PACKAGES:
        files = [path.name for name, path in MODULES.items() if name.startswith(f"{package}.")]
        assert {name for name, count in Counter(files).items() if count > 1} <= {"__init__.py"}


# Only `semgrad_guard.guard` decides: no other module makes an action, or changes one; the rules are in one file.

DECIDING = {"decide", "abstained", "escalated", "rejected", "without_text"}
ELSEWHERE = {
    "semgrad_guard.records": "`Verdict.delivered` tells an escalation from the target's side, its action unchanged",
    "langchain_semgrad_guard.demo.library": "shows what another party's target may return",
}
"""The modules that write an action outside the guard, once each, and why this is not a decision."""
Look = Callable[[ast.AST], Iterator[str]]


def places(look: Look, names: Iterator[str]) -> dict[str, list[str]]:
    """What is found in these modules, where something is."""
    return {name: found for name in names if (found := list(look(tree_of(name))))}


def decisions(tree: ast.AST) -> Iterator[str]:
    """The places in a module's text that make or change an action."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name, given = ast.unparse(node.func), [keyword.arg for keyword in node.keywords]
            if name in DECIDING:
                yield f"line {node.lineno}: calls {name}"
            if name == "Verdict.of" and {"action", None} & {*given}:
                yield f"line {node.lineno}: builds a Verdict with an action"
            if name.endswith(".revised") and "action" in given:
                yield f"line {node.lineno}: changes an action"
        if isinstance(node, ast.Dict) and any(isinstance(k, ast.Constant) and k.value == "action" for k in node.keys):
            yield f"line {node.lineno}: writes an action"


def rules(tree: ast.AST) -> Iterator[str]:
    """The places in a module's text that tell modes apart, or read an action for unfamiliar or unscored answers."""
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Compare)):
        parts = list(ast.walk(node))
        read = {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "") for part in parts}
        has_word = any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts)
        if has_word and {"mode", "_mode", "on_unscored", "on_unfamiliar"} & read:
            yield f"line {node.lineno}: compares {ast.unparse(node)}"


def test_only_the_guard_decides() -> None:
    found = places(decisions, (name for name in MODULES if not name.startswith("semgrad_guard.guard.")))
    assert {name: len(lines) for name, lines in found.items()} == dict.fromkeys(ELSEWHERE, 1), found
    text = "x = Verdict.of(action='answer')\ny = decide(x)\nz = x.revised(action='abstain')\nw = {'action': 'answer'}\n"
    assert len(list(decisions(ast.parse(text)))) == 4


def test_mode_and_familiarity_are_judged_in_one_file() -> None:
    assert list(places(rules, iter(MODULES))) == ["semgrad_guard.guard.policy"]


# What Windows lacks, unless the code asks first.

LACKED = {
    "os": (
        "O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK chown chroot confstr fchown fdatasync fork forkpty geteuid getgid "
        "getgroups getloadavg getpgid getpgrp getpriority getsid getuid initgroups killpg lchown lockf major makedev "
        "mkfifo mknod nice openpty pathconf pipe2 posix_fadvise posix_fallocate posix_spawn pread preadv pwrite "
        "register_at_fork sched_getaffinity sched_setaffinity sendfile setgid setpgid setpriority setsid setuid "
        "statvfs sync sysconf tcgetpgrp ttyname uname wait wait3 wait4 waitid"
    ),
    "signal": (
        "SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 SIGWINCH alarm pause "
        "pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigwait"
    ),
    "socket": "AF_UNIX SO_REUSEPORT",
    "time": "clock_getres_ns clock_settime pthread_getcpuclockid tzset",
}
ABSENT = {"curses", "fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty"}
METHODS = {"add_signal_handler", "remove_signal_handler"}
ROOTS = ("/dev/", "/proc/", "/sys/", "/tmp/", "/etc/", "/var/")  # noqa: S108 - looked for, not used
QUESTIONS = ("os.name", "sys.platform", "platform.system", "hasattr")


def unportable(tree: ast.AST) -> Iterator[str]:
    """Each import, attribute and path that Windows lacks, with its line."""
    aliases = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    homes = {alias.asname or alias.name: alias.name for alias in aliases}
    for node in unguarded(tree):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names if alias.name.split(".")[0] in ABSENT]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                lacked = {alias.name for alias in names} & {*LACKED.get(module, "").split()}
                found = [module] if module.split(".")[0] in ABSENT else sorted(lacked)
            case ast.Attribute(value=value, attr=attr):
                lacked = LACKED.get(homes.get(ast.unparse(value), ""), "").split()
                found = [ast.unparse(node)] if attr in lacked or attr in METHODS else []
            case ast.Constant(value=str(text)):
                found = [text] if text.startswith(ROOTS) else []
            case _:
                found = []
        yield from (f"line {getattr(node, 'lineno', 0)}: {one}" for one in found)


def unguarded(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those behind a question about the system, or an import that may fail."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.If, ast.IfExp)) and any(word in ast.unparse(child.test) for word in QUESTIONS):
            continue
        if isinstance(child, ast.Try) and any("ImportError" in ast.unparse(handler) for handler in child.handlers):
            continue
        yield child
        yield from unguarded(child)


def test_nothing_that_windows_lacks() -> None:
    assert places(unportable, iter(MODULES)) == {}


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import fcntl", True),
        ("from resource import getrusage", True),
        ("import os as system\nsystem.sync()", True),
        ("from os import killpg", True),
        ("import os, signal\nos.kill(1, signal.SIGKILL)", True),
        ("loop.add_signal_handler(2, f)", True),
        ("open('/proc/meminfo')", True),
        ("import os\nif hasattr(os, 'fork'):\n    os.fork()", False),
        ("import os, sys\nif sys.platform != 'win32':\n    os.sync()", False),
        ("try:\n    import fcntl\nexcept ImportError:\n    fcntl = None", False),
        ("import os\nos.replace('a', 'b')", False),
        ("class os: pass\nmine.fork()", False),
    ],
)
def test_what_asks_first_may(code: str, found: bool) -> None:
    assert bool(list(unportable(ast.parse(code)))) == found


def test_every_file_that_a_check_names_exists() -> None:
    """Heavy checks run seldom: a test or a script that was moved would be missed late."""
    checks = [ROOT / "Makefile", *(ROOT / "scripts").rglob("*.py"), *(ROOT / ".github").rglob("*.yml")]
    named = re.compile(r"(?<![\w./{}-])(?:tests|scripts|benchmarks|research)/[\w/]+\.(?:py|json|ini|txt|toml)\b")
    found = {(path.name, name) for path in checks for name in named.findall(path.read_text(encoding="utf-8"))}
    assert len(found) > 30
    assert {(file, name) for file, name in found if not (ROOT / name).exists()} == set()
