"""A process that ends while a thread runs a model: the work is stopped, and the exit code is the program's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.warm_python import WarmPython

SETTING = """
import asyncio, atexit, ctypes, os, threading
ends, pause, wrote = [], 0, threading.Event()
atexit.register(lambda: (wrote.wait(pause), print(*ends)))  # before ours, and so called after it

from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel, Message
from semgrad_guard.guard import off_loop
from tests.random_llama import byte_tokenizer, random_llama

sizes = {"hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 4096, "eos_token_id": None}
model = LanguageModel.from_transformers(random_llama(**sizes), byte_tokenizer(), name="random")
begun = threading.Event()
model._model.register_forward_hook(lambda *_: begun.set())
LONG = GenerationOptions(max_tokens=3000, temperature=1.0, seed=3)

def left(coroutine):  # a reference is lost on purpose: asyncio would complain of a task that is destroyed
    task = asyncio.ensure_future(coroutine)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))

def write():
    ends.append("nothing")
    try:
        ends[-1] = model.generate("What is tea?", LONG).finish_reason
    except BaseException as error:
        ends[-1] = type(error).__name__
        raise
    finally:
        wrote.set()
"""

STREAM = """
from tests.engine.worker_calls import Streamed
stream = Streamed(model, "What is tea?", LONG)
stream.next()
"""

OFF_LOOP = """
pause = 30
async def main():
    left(off_loop(write))
    while not begun.is_set():
        await asyncio.sleep(0.001)
    loop.stop()
loop = asyncio.new_event_loop()
task = loop.create_task(main())
loop.run_forever()
"""

SCHEDULER = """
from semgrad_guard.guard import Answerer
from semgrad_guard.server.scheduler import AnswerRequest, Scheduler
scheduler = Scheduler(Answerer(model, HybridGrad()))
"""

SERVED = (
    SCHEDULER
    + """
heard = threading.Event()
request = AnswerRequest(conversation=(Message("user", "What is tea?"),), options=LONG, on_piece=lambda _: heard.set())
async def main():
    left(scheduler.answer(request))
    while not heard.is_set():
        await asyncio.sleep(0.001)
    loop.stop()
loop = asyncio.new_event_loop()
task = loop.create_task(main())
loop.run_forever()
"""
)

SUBMITTED = """
from semgrad_guard.engine.answers.running import Request
def submit(options=LONG, heard=None):
    return model.submit(Request(prompt=model.render("What is tea?"), options=(options,), on_piece=heard,
                                finish=lambda found: found[0].completion_tokens))
heard = threading.Event()
ticket = submit(heard=lambda _: heard.set())
heard.wait()
"""

IN_A_CHILD = """
child = os.fork()
if not child:  # thread and queue are the parent's
    raise SystemExit(submit(GenerationOptions(max_tokens=5)).result())
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

RAISES = "raise SystemExit(3)"

FORKED = """
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
raise SystemExit(4)
"""

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")


@pytest.mark.parametrize(
    ("program", "code", "printed"),
    [
        pytest.param(STREAM, 0, "", marks=pytest.mark.heavy),
        (STREAM + RAISES, 3, ""),
        pytest.param(STREAM + FORKED, 4, "", marks=FORKS),
        (OFF_LOOP, 0, "AnswerCancelledError"),
        (SCHEDULER, 0, ""),
        (SERVED, 0, ""),
        pytest.param(SUBMITTED, 0, "", marks=pytest.mark.heavy),
        pytest.param(SUBMITTED + IN_A_CHILD, 5, "", marks=FORKS),
    ],
    ids=(
        "stream",
        "raises",
        "forked",
        "off_loop",
        "self_check",
        "served",
        "submitted",
        "forked_submitted",
    ),
)
def test_a_process_ends_with_its_own_code(
    program: str, code: int, printed: str, warm_python: WarmPython, tmp_path: Path
) -> None:
    done = warm_python.run(["-c", SETTING + program], folder=tmp_path)
    assert (done.returncode, done.stderr) == (code, "")
    assert printed in done.stdout
