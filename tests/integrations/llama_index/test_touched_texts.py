"""A text that other code touched between the model and the answer: it is unscored, whatever class that code is of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core.base.llms.types import CompletionResponse, LLMMetadata
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine, SimpleChatEngine
from llama_index.core.indices.query.query_transform.base import HyDEQueryTransform
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.query_engine import TransformQueryEngine
from llama_index.core.response_synthesizers import Accumulate, CompactAndRefine, TreeSummarize
from llama_index.core.types import BaseOutputParser
from pydantic import BaseModel, computed_field, field_serializer, field_validator

from llama_index_semgrad_guard import GuardedChatEngine, GuardedQueryEngine
from llama_index_semgrad_guard.records import Chunk
from tests.pairwise import pairwise

from .conftest import PASSAGES, Passages
from .scripted import BOTH, WAY, Scripted
from .test_authorship import LOOSE, WIDER, Make, Own, by_prompt, engine, record, router, saying
from .test_chat_engine import say

__all__ = ["saying"]
MODES = ("refine", "compact", "tree_summarize", "simple_summarize", "accumulate", "compact_accumulate", "generation")


class Loud(BaseOutputParser):
    """Changes every text."""

    def parse(self, output: str) -> Any:
        return output.upper()

    def format(self, query: str) -> str:
        return query


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("mode", MODES)
def test_what_an_output_parser_makes_is_nobodys(mode: str, way: str, saying: Make) -> None:
    llm = saying(lambda _: ("It is Paris", 0.01))
    llm.output_parser = Loud()
    found = record(engine(llm, mode), way)
    assert (found["status"], found["promised"]) == ("unscored", False)


def test_an_output_parser_that_changes_nothing_hands_the_text_on(saying: Make) -> None:
    class Checks(Loud):
        def parse(self, output: str) -> Any:
            return output

    llm = saying(lambda _: ("It is Paris", 0.5))
    llm.output_parser = Checks()
    assert record(engine(llm))["uncertainty"] == 0.5


class Around(CustomLLM):
    """An LLM of one's own around a scored one."""

    inner: Any
    says: Any

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(context_window=4096, num_output=4)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=self.says(self.inner.complete(prompt, formatted=formatted).text))

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        return (CompletionResponse(text=text, delta=text) for text in [self.complete(prompt).text])


CHANGES: dict[str, Callable[[str], str]] = {
    "edits": lambda text: text + "!",
    "replaces": lambda _text: "It is Rome",
    "routes to an API that says the same": lambda text: "".join(text),
}


@pytest.mark.parametrize("mode", [*MODES, "chat"])
@pytest.mark.parametrize("change", CHANGES)
async def test_what_a_wrapper_says_is_nobodys(change: str, mode: str, saying: Make) -> None:
    llm = Around(
        inner=saying(lambda _: ("It is Paris", 0.01)), says=lambda text: " ".join(CHANGES[change](text).split())
    )
    if mode != "chat":
        assert record(engine(llm, mode))["status"] == "unscored"
        return
    for inner in (
        SimpleChatEngine.from_defaults(llm=llm),
        ContextChatEngine.from_defaults(Passages(*PASSAGES), llm=llm),
        CondensePlusContextChatEngine.from_defaults(Passages(*PASSAGES), llm=llm),
    ):
        _, response = await say(GuardedChatEngine(inner, LOOSE), "sync", "Where?")
        assert response.metadata["semgrad_guard"]["status"] == "unscored"


@pytest.mark.parametrize("way", WIDER)
def test_a_wrapper_that_hands_the_very_text_on_changes_nothing(way: str, saying: Make) -> None:
    llm = Around(inner=saying(lambda _: ("It is Paris", 0.5)), says=lambda text: text)
    if "stream" not in way:
        assert record(engine(llm), way)["uncertainty"] == 0.5
    else:  # the wrapper makes one piece of many
        assert record(engine(llm, streaming=True), way)["status"] == "unscored"


class Polished(CompactAndRefine):
    def _prepare_response_output(self, response_str: Any, source_nodes: Any) -> Any:
        return super()._prepare_response_output(f"Surely: {response_str}", source_nodes)


class Looped(CompactAndRefine):
    def _run_refine_loop(self, *args: Any, **kwargs: Any) -> Any:
        return f"Surely: {super()._run_refine_loop(*args, **kwargs)}"


class Listed(Accumulate):
    def _format_response(self, outputs: Any, separator: str) -> str:
        return super()._format_response([f"Surely {output}" for output in outputs], separator)


class Short(TreeSummarize):
    def get_response(self, query_str: str, text_chunks: Any, **kwargs: Any) -> Any:
        return super().get_response(query_str, text_chunks, **kwargs)[:4]  # type: ignore[index]


class Loudly(Scripted):
    def chat(self, messages: Any, **kwargs: Any) -> Any:
        response = super().chat(messages, **kwargs)
        response.message.content = str(response.message.content).upper()
        return response

    async def achat(self, messages: Any, **kwargs: Any) -> Any:
        return self.chat(messages, **kwargs)


@pytest.mark.parametrize("kind", [Polished, Looped, Listed, Short])
def test_what_a_subclass_makes_is_nobodys(kind: Any, saying: Make) -> None:
    llm = saying(lambda _: ("It is Paris", 0.01))
    assert record(engine(llm, response_synthesizer=kind(llm=llm)))["status"] == "unscored"


@pytest.mark.parametrize("mode", MODES)
def test_what_a_subclass_of_ours_says_is_nobodys(mode: str, wide: Any) -> None:
    assert record(engine(Loudly.saying(wide, lambda _: ("It is Paris", 0.01)), mode))["status"] == "unscored"


@pytest.mark.parametrize("mode", ["compact", "accumulate"])
def test_what_a_patched_instance_says_is_nobodys(mode: str, saying: Make) -> None:
    llm = saying(lambda _: ("It is Paris", 0.01))
    inner = engine(llm, mode)
    synthesizer: Any = inner._response_synthesizer
    original = synthesizer.get_response
    synthesizer.get_response = lambda *args, **kwargs: original(*args, **kwargs).replace("Paris", "Rome")
    assert record(inner)["status"] == "unscored"


@pytest.mark.parametrize("make", [functools.partial, lambda function, llm: lambda query: function(llm, query)])
def test_functions_that_touch_a_text(make: Any, saying: Make) -> None:
    llm = saying(lambda _: ("It is Paris", 0.01))
    assert record(Own(do=make(lambda model, query: model.complete(query).text.strip("P"), llm)))["status"] == "scored"
    for touched in (
        lambda model, query: model.complete(query).text + " ",
        lambda model, query: model.complete(query).text[:4],
    ):
        assert record(Own(do=make(touched, llm)))["status"] == "unscored"


class City(BaseModel):
    name: str
    size: int = 0


class Tidy(City):
    @field_validator("name")
    @classmethod
    def loud(cls, name: str) -> str:
        return name.upper()


class Shown(City):
    @field_serializer("name")
    def loud(self, name: str) -> str:
        return name.upper()


class More(City):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def praise(self) -> str:
        return f"{self.name} is nice"


@pytest.mark.parametrize("mode", ["compact", "refine", "tree_summarize", "accumulate"])
@pytest.mark.parametrize("kind", [City, Tidy, Shown, More])
def test_a_structure_that_its_class_changes_is_nobodys(kind: Any, mode: str, saying: Make) -> None:
    llm = saying(lambda _: ('Here: {"name": "Paris", "size": "3"}', 0.5))
    guarded = GuardedQueryEngine(engine(llm, mode, output_cls=kind), LOOSE, mode="annotate")
    found = guarded.query("Where?").metadata["semgrad_guard"]  # type: ignore[index]
    if kind is City:
        assert found["uncertainty"] == 0.5
    else:
        assert found["status"] == "unscored"


def test_a_structured_llm_is_read_as_it_is(saying: Make) -> None:
    llm = saying(lambda _: ('{"name": "Paris", "size": 3}', 0.5)).as_structured_llm(City)
    response = GuardedQueryEngine(engine(llm), LOOSE).query("Where?")
    assert isinstance(response, PydanticResponse)
    assert response.metadata["semgrad_guard"]["uncertainty"] == 0.5  # type: ignore[index]


def test_a_structure_that_was_changed_later_is_nobodys(saying: Make) -> None:
    def changed(query: str) -> Any:
        response: Any = engine(llm, output_cls=City).query(query)
        response.response.name = "Rome"
        return response

    llm = saying(lambda _: ('{"name": "Paris"}', 0.01))
    response: Any = GuardedQueryEngine(Own(do=changed), LOOSE, mode="annotate").query("?")
    assert response.metadata["semgrad_guard"]["status"] == "unscored"


@pairwise(wrapper=["hyde", "router", "none"], asynchronous=BOTH, streaming=BOTH)
def test_digits_one_by_one_next_to_another_call(
    wrapper: str, asynchronous: bool, streaming: bool, saying: Make
) -> None:
    """Python has texts of one character once; the stream that they came from is an object of its own."""
    way = WAY[asynchronous, streaming]

    class ByDigit(Scripted):
        def _streamed(self, conversation: Any, options: Any) -> Any:
            generation, text, pieces = self._scripted(conversation), "", list(self.texts[-1])
            for piece in pieces:
                text += piece
                yield Chunk(text, piece, "")
            whole = self._known(generation, self.uncertainties[id(generation.text)])
            yield Chunk(text, "", "", record=self._record(whole, options, text=text, pieces=pieces))

    script = by_prompt(
        ("choices", ('[{"choice": 1, "reason": "1912"}]', 0.02)),
        ("passage", ("In 1912.", 0.01)),
        otherwise=("1912", 0.5),
    )
    llm = ByDigit.saying(saying(script).language_model, script)
    inner: Any = engine(llm, streaming="stream" in way)
    if wrapper == "hyde":
        inner = TransformQueryEngine(inner, HyDEQueryTransform(llm=llm))
    if wrapper == "router":
        inner = router(llm, inner, inner)
    found = record(inner, way)
    assert (found["uncertainty"], "aggregate" in found["settings"]) == (0.5, False)


def test_a_letter_beside_another_call(saying: Make) -> None:
    llm = saying(by_prompt(("passage", ("A or B", 0.01)), otherwise=("B", 0.5)))
    assert record(TransformQueryEngine(engine(llm), HyDEQueryTransform(llm=llm)))["uncertainty"] == 0.5


@pytest.mark.parametrize(("judge", "uncertainty"), [("A", 0.5), ("B, surely", None), ("B", None)])
def test_a_letter_that_an_engine_of_ones_own_returns(judge: str, uncertainty: float | None, saying: Make) -> None:
    llm = saying(by_prompt(("judge", (judge, 0.01)), otherwise=("B", 0.5)))
    assert (
        record(Own(do=lambda _: (llm.complete("answer").text, llm.complete("judge"))[0]))["uncertainty"] == uncertainty
    )
