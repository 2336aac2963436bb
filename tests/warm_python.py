"""Programs in a Python that has loaded the libraries already: importing them takes longer than most programs run.

`WarmPython` starts one process, which imports the libraries that we use and nothing of ours. For each program it
forks a keeper, and the keeper forks a child. The child becomes the program: its own folder, environment, arguments
and files, and Python's own way out. The keeper reports the child's number and its end.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
LARGEST_REQUEST = 1 << 17


class Program:
    """A program in a process of its own: the part of `subprocess.Popen` that tests use."""

    def __init__(self, events: int, stdout: int | None, stderr: int) -> None:
        self.stdout = None if stdout is None else open(stdout)  # noqa: SIM115 - the context is the program's
        self.stderr = open(stderr)  # noqa: SIM115
        self._events = open(events)  # noqa: SIM115
        self.pid = int(self._events.readline())
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code."""
        if self.returncode is None:
            if not select.select([self._events], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the program", timeout or 0.0)
            self.returncode = int(self._events.readline())
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        """All that the program writes until its end."""
        with ThreadPoolExecutor(2) as pool:
            found = [*pool.map(lambda file: file.read() if file else "", (self.stdout, self.stderr))]
        self.wait()
        return found[0], found[1]

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        if self.returncode is None:
            self.kill()
            self.wait()
        for file in (self.stdout, self.stderr, self._events):
            if file:
                file.close()


class WarmPython:
    """Runs programs."""

    def __init__(self, requests: socket.socket | None) -> None:
        self._requests = requests

    def run(
        self, arguments: Sequence[str], *, folder: Path | None = None, stdin: int | None = None,
        stdout: int | None = None, largest: int | None = None,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        """What `python ARGUMENTS` does in a folder. The arguments begin with `-c`, with `-m`, or with a script."""
        with self.start(arguments, folder=folder, stdin=stdin, stdout=stdout, largest=largest) as program:
            written, errors = program.communicate()
            return subprocess.CompletedProcess(arguments, program.wait(), written, errors)

    def start(
        self, arguments: Sequence[str], *, folder: Path | None = None, stdin: int | None = None,
        stdout: int | None = None, largest: int | None = None,
    ) -> Program | subprocess.Popen[str]:  # fmt: skip
        """Such a program, running. `largest` is the greatest size of a file that it may write."""
        environment = _environment()
        if self._requests is None:
            return subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=environment,
                text=True,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=subprocess.PIPE if stdout is None else stdout,
                stderr=subprocess.PIPE,
                preexec_fn=lambda: _prepare(largest),
            )
        nothing = os.open(os.devnull, os.O_RDONLY)
        events, reported = os.pipe()
        errors, err = os.pipe()
        written, out = os.pipe() if stdout is None else (None, os.dup(stdout))
        request = json.dumps([arguments, str(folder or Path.cwd()), environment, largest]).encode()
        assert len(request) < LARGEST_REQUEST
        given = [nothing if stdin is None else stdin, out, err, reported]
        socket.send_fds(self._requests, [request], given)
        for descriptor in (nothing, out, err, reported):
            os.close(descriptor)
        return Program(events, written, errors)


def _environment() -> dict[str, str]:
    """This one, with files that are written through a buffer: Python drops what an unbuffered write leaves over."""
    given = {**os.environ, "PYTHONPATH": PATHS}
    return {name: value for name, value in given.items() if name != "PYTHONUNBUFFERED"}


@contextlib.contextmanager
def warm_python() -> Iterator[WarmPython]:
    """One warm process for as long as the context lasts. Only Linux forks a process with these libraries safely."""
    if sys.platform != "linux":
        yield WarmPython(None)
        return
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, str(its.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[its.fileno()], env=_environment()):
        its.close()
        yield WarmPython(ours)
        ours.close()  # the process ends


def serve(descriptor: int) -> list[str] | None:
    """In the warm process: fork a child for each request. The child returns the arguments of the program that it is."""
    requests = socket.socket(fileno=descriptor)
    for name in LIBRARIES:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    while True:
        request, given, *_ = socket.recv_fds(requests, LARGEST_REQUEST, 4)
        if not request:
            return None
        if not os.fork():
            requests.detach()
            return keep(request, given)
        for descriptor in given:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def keep(request: bytes, given: list[int]) -> list[str]:
    """In the keeper: report the child's number and its end. In the child: become the program."""
    child = os.fork()
    if not child:
        return become(*json.loads(request), given)
    *files, reported = given
    for descriptor in files:
        os.close(descriptor)
    os.write(reported, b"%d\n" % child)
    os.write(reported, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    os._exit(0)


def become(
    arguments: list[str], folder: str, environment: dict[str, str], largest: int | None, given: list[int]
) -> list[str]:
    """The state in which Python starts a program."""
    for descriptor, file in enumerate(given[:3]):
        os.dup2(file, descriptor)
    os.closerange(3, 1024)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - the one of this process from here on
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _prepare(largest)
    return arguments


def _prepare(largest: int | None) -> None:
    """A runner without a terminal may have us ignore Ctrl-C, which children inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if largest is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))


def run_program(arguments: list[str]) -> None:
    first, *rest = arguments
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path[0] = ""
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), {"__name__": "__main__"})  # noqa: S102 - a test's
    elif first == "-m":
        sys.argv = rest
        sys.path[0] = str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = str(Path(first).parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__" and (program := serve(int(sys.argv[1]))) is not None:
    run_program(program)
