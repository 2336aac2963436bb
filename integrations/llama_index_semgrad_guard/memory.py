"""A conversation's memory, and an agent's notes, in which a model's texts wait until they have been decided about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.memory import BaseMemory

from llama_index_semgrad_guard.turn import Turn
from semgrad_guard.errors import InputError
from semgrad_guard.guard import Steps, Work, adrive, drive


class StagedMemory:
    """Replaces a chat engine's memory during one exchange; texts that the model may have written wait in it.

    These are all answers and, once a model has run, all texts but the user's question and those stored before.
    Replacing a stored draft afterwards would come too late: memories may summarise, embed or persist their messages.
    """

    def __init__(self, memory: BaseMemory, turn: Turn) -> None:
        self._memory, self._turn, self._held = memory, turn, list[ChatMessage]()
        self._has_question = False

    def __getattr__(self, name: str) -> Any:
        if name in _STORES and self._turn.has_begun:
            raise InputError(f"the engine must put its answers into the memory itself, not into the memory's {name}")
        return getattr(self._memory, name)

    def put(self, message: ChatMessage) -> None:
        """Store the user's message; hold the engine's."""
        drive(self._put([message]))

    async def aput(self, message: ChatMessage) -> None:
        """As `put`."""
        await adrive(self._put([message]))

    def put_messages(self, messages: list[ChatMessage]) -> None:
        """As `put`, for several messages."""
        drive(self._put(messages))

    async def aput_messages(self, messages: list[ChatMessage]) -> None:
        """As `put`, for several messages."""
        await adrive(self._put(messages))

    def set(self, messages: list[ChatMessage]) -> None:
        """Store other messages in the place of all; hold the new ones that may be answers."""
        drive(self._set(messages))

    async def aset(self, messages: list[ChatMessage]) -> None:
        """As `set`."""
        await adrive(self._set(messages))

    def settle(self, replacement: str | None) -> Steps[None]:
        """Store the held answer, or the text that was delivered in its place."""
        replaced = [ChatMessage(role=MessageRole.ASSISTANT, content=replacement)]
        for message in self._held if replacement is None else replaced:
            yield self._storing(message)

    def abandon(self, replacement: str) -> Steps[None]:
        """End an exchange that failed: a question that was stored is not left without an answer."""
        if self._has_question:
            yield from self.settle(replacement)

    def _put(self, messages: Sequence[ChatMessage]) -> Steps[None]:
        for message in messages:
            if self._is_answer(message):
                self._held.append(message)
            else:
                yield self._storing(message)
                self._has_question = True

    def _set(self, messages: list[ChatMessage]) -> Steps[None]:
        before = yield Work(self._memory.get_all, self._memory.aget_all)
        if self._turn.has_begun:
            self._held = [message for message in messages if message not in before and self._is_answer(message)]
            self._has_question = True
            messages = [message for message in messages if message not in self._held]
        yield Work(lambda: self._memory.set(messages), lambda: self._memory.aset(messages))

    def _storing(self, message: ChatMessage) -> Work:
        return Work(lambda: self._memory.put(message), lambda: self._memory.aput(message))

    def _is_answer(self, message: ChatMessage) -> bool:
        if message.role not in (MessageRole.USER, MessageRole.SYSTEM):
            return True
        return self._turn.has_begun and message.content != self._turn.question


_STORES = frozenset({"chat_store", "sql_store"})
"""Where memories keep their messages: texts that are written there are not held."""


class StagedContext:
    """Replaces an agent's context during one step; the agent's notes under `key`, a list, wait.

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
        """Store the notes, the last one changed."""
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
        """The stored value; of the notes a copy, since agents add to the list."""
        if path != self.key:
            return await self._store.get(path, *default, **named)
        return list(await self._store.get(path, *default, **named) if self.held is None else self.held)

    async def set(self, path: str, value: Any) -> None:
        """Store a value; hold the notes."""
        if path == self.key:
            self.held = value
        else:
            await self._store.set(path, value)
