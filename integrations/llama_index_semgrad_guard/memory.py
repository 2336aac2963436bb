"""A conversation's memory, and an agent's notes, in which what a model writes waits until it has been decided about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import BaseMemory

from llama_index_semgrad_guard.calls import Turn
from semgrad_guard.errors import InputError


class StagedMemory:
    """Stands in for a chat engine's memory during one turn; what the model may have written waits in it.

    That is every answer and, once a model was asked, every text but the user's question and what was stored before.

    Replacing a stored draft afterwards would come too late: memories may summarise, embed or persist what they get.
    """

    def __init__(self, memory: BaseMemory, turn: Turn) -> None:
        self._memory, self._turn, self._held = memory, turn, list[ChatMessage]()
        self._asked = False

    def __getattr__(self, name: str) -> Any:
        if name in _STORES and self._turn.has_begun:
            raise InputError(f"the engine must put its answers into the memory itself, not into the memory's {name}")
        return getattr(self._memory, name)

    def put(self, message: ChatMessage) -> None:
        """Store what the user said; hold what the engine answered."""
        if self._is_answer(message):
            self._held.append(message)
        else:
            self._memory.put(message)
            self._asked = True

    async def aput(self, message: ChatMessage) -> None:
        """As `put`."""
        if self._is_answer(message):
            self._held.append(message)
        else:
            await self._memory.aput(message)
            self._asked = True

    def put_messages(self, messages: list[ChatMessage]) -> None:
        """As `put`, for each."""
        for message in messages:
            self.put(message)

    async def aput_messages(self, messages: list[ChatMessage]) -> None:
        """As `put`, for each."""
        for message in messages:
            await self.aput(message)

    def set(self, messages: list[ChatMessage]) -> None:
        """Store other messages in the place of all; hold what is new and may be an answer."""
        self._memory.set(self._known(messages, self._memory.get_all()))

    async def aset(self, messages: list[ChatMessage]) -> None:
        """As `set`."""
        await self._memory.aset(self._known(messages, await self._memory.aget_all()))

    def _known(self, messages: list[ChatMessage], before: list[ChatMessage]) -> list[ChatMessage]:
        if not self._turn.has_begun:
            return messages
        new = [message for message in messages if message not in before and self._is_answer(message)]
        self._held = new
        self._asked = True
        return [message for message in messages if message not in new]

    def settle(self, replacement: str | None) -> None:
        """Store the held answer, or what was delivered in its place."""
        for message in self._settled(replacement):
            self._memory.put(message)

    async def asettle(self, replacement: str | None) -> None:
        """As `settle`."""
        for message in self._settled(replacement):
            await self._memory.aput(message)

    def abandon(self, replacement: str) -> None:
        """End a turn that failed: a question that was stored is not left without an answer."""
        if self._asked:
            self.settle(replacement)

    async def aabandon(self, replacement: str) -> None:
        """As `abandon`."""
        if self._asked:
            await self.asettle(replacement)

    def _settled(self, replacement: str | None) -> list[ChatMessage]:
        if replacement is None:
            return self._held
        return [ChatMessage(role=MessageRole.ASSISTANT, content=replacement)]

    def _is_answer(self, message: ChatMessage) -> bool:
        if message.role not in (MessageRole.USER, MessageRole.SYSTEM):
            return True
        return self._turn.has_begun and message.content != self._turn.question


_STORES = frozenset({"chat_store", "sql_store"})
"""Where memories keep their messages: what is written there is not held."""


class StagedContext:
    """Stands in for an agent's context during one step; what the agent notes under `key`, a list, waits.

    A context can be saved at any time, also while a step is judged.
    """

    def __init__(self, ctx: Any, key: str) -> None:
        self._ctx, self.store = ctx, _StagedStore(ctx.store, key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    @property
    def noted(self) -> Any:
        """The last note of this step, None if there is none."""
        return self.store.held[-1] if self.store.held else None

    async def keep(self, changed: Callable[[Any], Any] = lambda note: note) -> None:
        """Store what was noted, the last note changed."""
        notes = self.store.held
        if notes:
            await self._ctx.store.set(self.store.key, [*notes[:-1], changed(notes[-1])])


class _StagedStore:
    def __init__(self, store: Any, key: str) -> None:
        self._store, self.key = store, key
        self.held: list[Any] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def get(self, path: str, *default: Any, **named: Any) -> Any:
        """What is stored; of the notes a copy, since agents add to what they get."""
        if path != self.key:
            return await self._store.get(path, *default, **named)
        return list(await self._store.get(path, *default, **named) if self.held is None else self.held)

    async def set(self, path: str, value: Any) -> None:
        """Store a value; hold the notes."""
        if path == self.key:
            self.held = value
        else:
            await self._store.set(path, value)
