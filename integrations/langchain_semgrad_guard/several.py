"""`SeveralChatModel`: an enforcing chat model that answers several inputs together, or side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

from langchain_core.language_models import LanguageModelInput
from langchain_core.messages import AIMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import (
    get_config_list,
    get_executor_for_config,
    set_config_context,
)
from langchain_core.runnables.utils import coro_with_context, gather_with_concurrency

from langchain_semgrad_guard.gathering import agathered, gathered
from langchain_semgrad_guard.streams import StreamingChatModel


class SeveralChatModel(StreamingChatModel):
    """Every input has a run of its own; a local model generates what several runs ask for in one batch."""

    @property
    def _group_size(self) -> int | None:
        """How many runs of a batch are generated together; None: each by itself, side by side."""
        return None

    def batch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Answer several inputs, each in a run of its own. `max_concurrency` bounds how many are generated at once."""
        configs = get_config_list(config, len(inputs))

        def one(given: LanguageModelInput, config: RunnableConfig) -> AIMessage | Exception:
            with set_config_context(config) as context:
                try:
                    return context.run(self.invoke, given, config, **kwargs)
                except Exception as error:  # noqa: BLE001 - raised once all others have had their run
                    return error

        ends: list[AIMessage | Exception] = []
        for group in self._groups(inputs, configs):
            if self._group_size is None:
                with get_executor_for_config(configs[0]) as executor:
                    ends += executor.map(one, *zip(*group, strict=True))
            else:
                ends += gathered(self._owner, [partial(one, *pair) for pair in group], self._answers)
        return _ended(ends, return_exceptions=return_exceptions)

    async def abatch(
        self,
        inputs: list[LanguageModelInput],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[AIMessage]:
        """Like `batch`, without blocking the event loop."""
        configs = get_config_list(config, len(inputs))

        async def one(given: LanguageModelInput, config: RunnableConfig) -> AIMessage | Exception:
            with set_config_context(config) as context:
                try:
                    return await coro_with_context(self.ainvoke(given, config, **kwargs), context, create_task=True)
                except Exception as error:  # noqa: BLE001 - raised once all others have had their run
                    return error

        ends: list[AIMessage | Exception] = []
        for group in self._groups(inputs, configs):
            runs = [partial(one, *pair) for pair in group]
            if self._group_size is None:
                limit = configs[0].get("max_concurrency")
                ends += await gather_with_concurrency(limit, *(run() for run in runs))
            else:
                ends += await agathered(self._owner, runs, self._aanswers)
        return _ended(ends, return_exceptions=return_exceptions)

    def _groups(
        self, inputs: Sequence[LanguageModelInput], configs: Sequence[RunnableConfig]
    ) -> Iterator[list[tuple[LanguageModelInput, RunnableConfig]]]:
        """The inputs that are answered together, with their configs."""
        pairs = list(zip(inputs, configs, strict=True))
        given = configs[0].get("max_concurrency") if configs else None
        limit = (len(pairs) if self._group_size is None else given or self._group_size) or 1
        for start in range(0, len(pairs), limit):
            yield pairs[start : start + limit]


def _ended(ends: Sequence[AIMessage | Exception], *, return_exceptions: bool) -> list[AIMessage]:
    for end in ends:
        if isinstance(end, Exception) and not return_exceptions:
            raise end
    return cast("list[AIMessage]", list(ends))
