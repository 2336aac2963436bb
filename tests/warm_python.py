"""Programs in a Python that has loaded the libraries already: importing them takes longer than most programs run.

`WarmPython` starts one process, which imports the libraries that we use and nothing of ours. For each program it
forks a child, and the child becomes the program: its own folder, environment, arguments and output, and Python's own
way out.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATHS = os.pathsep.join([str(ROOT), str(ROOT / "integrations")])
LIBRARIES = (
    "torch",
    "transformers",
    "transformers.core_model_loading",
    "transformers.models.llama.modeling_llama",
    "scipy.stats",
    "langchain_core.language_models",
    "langchain_core.runnables",
    "langchain_core.tools",
    "llama_index.core",
)
"""What takes long to import. Not what an example has to miss (langchain, bm25s, opentelemetry), and nothing of ours."""


class WarmPython:
    """Runs programs, one after the other."""

    def __init__(self, process: subprocess.Popen[str] | None) -> None:
        self._process = process

    def run(self, arguments: Sequence[str], *, folder: Path) -> subprocess.CompletedProcess[str]:
        """What `python ARGUMENTS` does in a folder. The arguments begin with `-c` and a program, or with a script."""
        environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
        if self._process is None:
            command = [sys.executable, *arguments]
            return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as outputs:
            out, err = Path(outputs, "out"), Path(outputs, "err")
            request = (list(arguments), str(folder), environment, str(out), str(err))
            print(json.dumps(request), file=self._process.stdin, flush=True)
            status = self._process.stdout.readline()
            assert status, "the warm interpreter has ended"
            return subprocess.CompletedProcess(arguments, int(status), out.read_text(), err.read_text())


@contextlib.contextmanager
def warm_python() -> Iterator[WarmPython]:
    """One warm process for as long as the context lasts. Only Linux forks a process with these libraries safely."""
    if sys.platform != "linux":
        yield WarmPython(None)
        return
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        yield WarmPython(process)  # its input is closed on leaving, and it ends


def serve() -> list[str] | None:
    """In the warm process: fork a child for each request. The child returns the arguments of the program that it is."""
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            return become(*json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def become(arguments: list[str], folder: str, environment: dict[str, str], out: str, err: str) -> list[str]:
    """The state in which Python starts a program."""
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT),
        (2, err, os.O_WRONLY | os.O_CREAT),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the one of this process from here on
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return arguments


def run_program(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})  # noqa: S102 - a test's
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__" and (program := serve()) is not None:
    run_program(program)
