"""Count the files of ours that a warm question enters, in all threads, by each front.

    python scripts/count_files.py [--list]    # --list: the files themselves

The question is the second identical one, on the embedded model: everything that loads or is made once has been made.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # this must run before anything imports huggingface_hub

import httpx
from llama_index.core.query_engine import CustomQueryEngine

from langchain_semgrad_guard import ChatSemGrad, UncertaintyRouterCallback
from llama_index_semgrad_guard import SemGradLLM
from llama_index_semgrad_guard import UncertaintyRouterCallback as LlamaIndexRouter
from llama_index_semgrad_guard import guarded as guarded_engine
from semgrad_guard import GenerationOptions, Guard, HybridGrad, LanguageModel, Policy
from semgrad_guard.server.assembly import assemble
from semgrad_guard.server.gate import Keys
from semgrad_guard.server.server_settings import ServerSettings

ROOT = Path(__file__).parents[1]
OURS = (f"{ROOT}/semgrad_guard/", f"{ROOT}/integrations/")
QUESTION = "What is the capital of France?"
POLICY = Policy(threshold=1e9)
entered: set[str] = set()


def note(frame: FrameType, event: str, _: Any) -> None:
    """Note the file of a function that begins."""
    if event == "call" and frame.f_code.co_filename.startswith(OURS):
        entered.add(frame.f_code.co_filename)


class OneModel(CustomQueryEngine):
    """The smallest query engine: it asks its model."""

    llm: Any

    def custom_query(self, query_str: str) -> str:
        return self.llm.complete(query_str).text


def fronts(stack: ExitStack) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The name of each front, and a question to it."""
    model = LanguageModel.from_pretrained("pocket")
    guard = Guard(model, POLICY, estimator=HybridGrad(), options=GenerationOptions(max_tokens=8))
    yield "Guard", lambda: guard(QUESTION)
    chat = ChatSemGrad.from_model(model, max_tokens=8)
    yield "ChatSemGrad.invoke", lambda: chat.invoke(QUESTION)
    guarded = ChatSemGrad.from_model(model, max_tokens=8, router=UncertaintyRouterCallback(POLICY))
    yield "ChatSemGrad(router).invoke", lambda: guarded.invoke(QUESTION)
    router = LlamaIndexRouter(POLICY)
    llm = SemGradLLM.from_model(model, max_tokens=8, router=router)
    yield "SemGradLLM(router).complete", lambda: llm.complete(QUESTION)
    engine = guarded_engine(OneModel(llm=llm), router)
    yield "guarded(engine).query", lambda: engine.query(QUESTION)
    settings = ServerSettings(model="pocket", threshold=1e9, max_tokens=8, no_log=True)
    server = assemble(settings, keys=Keys(), hosts=None)
    for served in server.service.models.values():
        stack.callback(served.scheduler.close)
    client = httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://127.0.0.1")
    body = {"model": "pocket", "messages": [{"role": "user", "content": QUESTION}]}
    loop = stack.enter_context(asyncio.Runner())
    yield "server", lambda: loop.run(client.post("/v1/chat/completions", json=body)).raise_for_status()


def main() -> None:
    """Print how many files a question enters by each front."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the files as well")
    listed = parser.parse_args().list
    threading.setprofile(note)  # for threads that begin later
    sys.setprofile(note)
    with ExitStack() as stack:
        for name, ask in fronts(stack):
            ask()
            entered.clear()
            ask()
            found = sorted(path.removeprefix(f"{ROOT}/") for path in entered.copy())
            print(f"{name}: {len(found)}", *(found if listed else ()), sep="\n    ")


if __name__ == "__main__":
    main()
