"""All that listens to a run, and all that an error takes along: where a withheld draft could be found."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.tracers.base import BaseTracer
from langchain_core.tracers.schemas import Run


class Ear(BaseCallbackHandler):
    """Writes down every event of every kind."""

    run_inline = True

    def __init__(self) -> None:
        self.events: list[str] = []
        self.names: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hear(*given: Any, **named: Any) -> None:
            self.names.append(name)
            self.events.append(shown((name, given, named)))

        return hear


class Tracer(BaseTracer):
    """Writes down whole traces."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.roots: list[Run] = []

    def _persist_run(self, run: Run) -> None:
        self.roots.append(run)
        self.events.append(shown(run.model_dump()))


def shown(thing: Any) -> str:
    """A thing as a log, a database or another process would see it."""
    return f"{thing!r}\n{_pickled(thing)}"


def _pickled(thing: Any) -> str:
    try:
        pickler = _Pickler(held := io.BytesIO())
        pickler.dump(thing)
    except Exception:  # noqa: BLE001 - libraries refuse in many ways
        return ""  # it goes to no other process
    return held.getvalue().decode("latin-1")


class _Pickler(pickle.Pickler):
    """Leaves out the scripted models, which know their own answers."""

    def persistent_id(self, obj: Any) -> str | None:
        return "a scripted model" if type(obj).__name__ == "Scripted" else None


def errors_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error with its causes and contexts, and the members of groups."""
    known: set[int] = set()
    open_ones = [error]
    while open_ones:
        one = open_ones.pop()
        if one is None or id(one) in known:
            continue
        known.add(id(one))
        yield one
        open_ones += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def record_of(error: BaseException | None) -> str:
    """All that an error tells: texts, fields, pickle, and the local variables of the frames it came through."""
    found = list[str]()
    for one in errors_of(error):
        found += [str(one), shown(one), repr(vars(one)), *getattr(one, "__notes__", ())]
        found += _locals(one.__traceback__)
    return "\n".join(found)


def _locals(frames: TracebackType | None) -> Iterator[str]:
    while frames is not None:
        module = frames.tb_frame.f_globals.get("__name__", "")
        if not module.startswith("tests."):
            yield from (f"{module}: {name} = {value!r}" for name, value in frames.tb_frame.f_locals.items())
        frames = frames.tb_next


def unpickled(thing: Any) -> Any:
    """A copy, as another process gets it."""
    return pickle.loads(pickle.dumps(thing))  # noqa: S301 - our own
