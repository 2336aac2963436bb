"""Every client, unchanged but for its base_url, plain and streamed: its text, and the verdict where it survives."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import BOTH, DRAFT, KNOWN, MODEL, turn

HERE = Path(__file__).parent


class Found(NamedTuple):
    """The text, the action (None where this client drops the verdict), and all that the client shows."""

    text: str
    action: str | None
    shown: Any


def of_packages(name: str, *more: str) -> list[Any]:
    """Modules of a client; it is skipped where one is not installed."""
    return [pytest.importorskip(one) for one in (name, *more)]


def openai_chat(url: str, key: str, question: str, *, stream: bool) -> Found:
    (openai,) = of_packages("openai")
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    request = {"model": MODEL, "messages": turn(question), "logprobs": True}
    if not stream:
        raw = client.chat.completions.with_raw_response.create(**request)
        found = raw.parse()
        (choice,) = found.choices
        record = choice.logprobs.semgrad_guard
        assert raw.headers["x-semgrad-guard-action"] == found.semgrad_guard["action"]
        assert raw.headers["x-semgrad-guard-decision-id"] == record["decision_id"]
        assert (choice.logprobs.content is None) == (record["action"] == "abstain")
        return Found(choice.message.content, record["action"], raw.text)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    record = choices[-1].logprobs.semgrad_guard
    assert (chunks[-1].usage.completion_tokens == 0) == (record["action"] == "abstain")
    return Found("".join(choice.delta.content or "" for choice in choices), record["action"], chunks)


def openai_responses(url: str, key: str, question: str, *, stream: bool) -> Found:
    (openai,) = of_packages("openai")
    responses = openai.OpenAI(base_url=url, api_key=key, max_retries=0).responses
    if stream:
        with responses.stream(model=MODEL, input=question) as sent:
            events = list(sent)
            found = sent.get_final_response()
    else:
        found = events = responses.create(model=MODEL, input=question, include=["message.output_text.logprobs"])
        assert bool(found.output[0].content[0].logprobs) == (found.semgrad_guard["action"] == "answer")
    assert (found.status, found.semgrad_guard["action"]) == ("completed", found.output[0].semgrad_guard["action"])
    return Found(found.output_text, found.semgrad_guard["action"], [found, events])


def openai_completions(url: str, key: str, question: str, *, stream: bool) -> Found:
    (openai,) = of_packages("openai")
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    found = client.completions.create(model=MODEL, prompt=question, logprobs=2, stream=stream)
    parts = list(found) if stream else [found]
    assert parts[-1].choices[0].logprobs.semgrad_guard["action"] == parts[-1].semgrad_guard["action"]
    return Found("".join(part.choices[0].text for part in parts), parts[-1].semgrad_guard["action"], parts)


def chat_openai(url: str, key: str, question: str, *, stream: bool) -> Found:
    (langchain,) = of_packages("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=url, api_key=key, model=MODEL, max_retries=0, include_response_headers=True)
    message = reduce(add, chat.stream(question)) if stream else chat.invoke(question)
    action = message.response_metadata["logprobs"]["semgrad_guard"]["action"]
    assert stream or message.response_metadata["headers"]["x-semgrad-guard-action"] == action
    return Found(message.text, action, message)


def chat_openai_of_responses(url: str, key: str, question: str, *, stream: bool) -> Found:
    (langchain,) = of_packages("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=url, api_key=key, model=MODEL, max_retries=0, use_responses_api=True)
    message = reduce(add, chat.stream(question)) if stream else chat.invoke(question)
    record = json.loads(message.response_metadata["metadata"]["semgrad_guard"])
    return Found(message.text, record["action"], message)


def openai_of_langchain(url: str, key: str, question: str, *, stream: bool) -> Found:
    (langchain,) = of_packages("langchain_openai")
    model = langchain.OpenAI(base_url=url, api_key=key, model=MODEL, max_retries=0, temperature=0)
    if stream:
        text = "".join(model.stream(question))
        return Found(text, None, text)
    ((found,),) = model.generate([question]).generations
    return Found(found.text, found.generation_info["logprobs"]["semgrad_guard"]["action"], found)


def openai_like(url: str, key: str, question: str, *, stream: bool, **given: Any) -> Found:
    (module,) = of_packages("llama_index.llms.openai_like")
    llm = module.OpenAILike(model=MODEL, api_base=url, api_key=key, max_retries=0, temperature=0.0, **given)
    pieces = list(llm.stream_complete(question)) if stream else [llm.complete(question)]
    records = [choice.logprobs for piece in pieces for choice in piece.raw.choices if choice.logprobs]
    return Found(pieces[-1].text, records[-1].semgrad_guard["action"], pieces)


def openai_like_chat(url: str, key: str, question: str, *, stream: bool) -> Found:
    return openai_like(url, key, question, stream=stream, is_chat_model=True)


def litellm(url: str, key: str, question: str, *, stream: bool) -> Found:
    (module,) = of_packages("litellm")
    found = module.completion(
        model=f"openai/{MODEL}", messages=turn(question), api_base=url, api_key=key, stream=stream
    )
    if stream:
        choices = [chunk.choices[0] for chunk in found]
        (*_, record) = (choice.logprobs for choice in choices if getattr(choice, "logprobs", None))
        action = next(action for action in ("abstain", "answer") if action in str(record))
        return Found("".join(choice.delta.content or "" for choice in choices), action, choices)
    headers = found._hidden_params["additional_headers"]
    named = [value for name, value in headers.items() if name.endswith("x-semgrad-guard-action")]
    assert named == [found.semgrad_guard["action"]] == [found.choices[0].logprobs.semgrad_guard["action"]]
    return Found(found.choices[0].message.content, named[0], found)


def litellm_responses(url: str, key: str, question: str, *, stream: bool) -> Found:
    del stream  # its streams of responses keep no verdict
    (module,) = of_packages("litellm")
    found = module.responses(model=f"openai/{MODEL}", input=question, api_base=url, api_key=key)
    return Found(found.output[0].content[0].text, found.semgrad_guard["action"], found)


def haystack(url: str, key: str, question: str, *, stream: bool) -> Found:
    chat, classes, utils = of_packages("haystack.components.generators.chat", "haystack.dataclasses", "haystack.utils")
    pieces = list[Any]()
    hears = {"streaming_callback": pieces.append} if stream else {}
    token = utils.Secret.from_token(key)
    generator = chat.OpenAIChatGenerator(model=MODEL, api_base_url=url, api_key=token, max_retries=0, **hears)
    (reply,) = generator.run([classes.ChatMessage.from_user(question)])["replies"]
    logprobs = reply.meta["logprobs"]
    return Found(reply.text, (logprobs[-1] if stream else logprobs)["semgrad_guard"]["action"], [reply, pieces])


def openai_agents(url: str, key: str, question: str, *, stream: bool, route: str = "OpenAIResponsesModel") -> Found:
    agents, openai = of_packages("agents", "openai")
    agents.set_tracing_disabled(True)

    async def run() -> Found:
        client = openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0)
        agent = agents.Agent(name="agent", model=getattr(agents, route)(MODEL, client))
        if stream:
            streamed = agents.Runner.run_streamed(agent, question)
            return Found("", None, [event async for event in streamed.stream_events()])._replace(
                text=streamed.final_output
            )
        found = await agents.Runner.run(agent, question)
        kept = route == "OpenAIResponsesModel"
        record = found.raw_responses[-1].output[0].semgrad_guard if kept else {"action": None}
        return Found(found.final_output, record["action"], found.raw_responses)

    return asyncio.run(run())


def openai_agents_chat(url: str, key: str, question: str, *, stream: bool) -> Found:
    return openai_agents(url, key, question, stream=stream, route="OpenAIChatCompletionsModel")


def pydantic_ai(url: str, key: str, question: str, *, stream: bool) -> Found:
    ai, models, providers = of_packages("pydantic_ai", "pydantic_ai.models.openai", "pydantic_ai.providers.openai")
    model = models.OpenAIChatModel(MODEL, provider=providers.OpenAIProvider(base_url=url, api_key=key))

    async def run() -> Found:
        if not stream:
            found = await ai.Agent(model).run(question)
            return Found(found.output, None, found.all_messages())
        async with ai.Agent(model).run_stream(question) as sent:
            pieces = [piece async for piece in sent.stream_text(delta=True)]
        return Found("".join(pieces), None, pieces)

    return asyncio.run(run())


def printed(command: Iterable[Any], **environment: str) -> str:
    """The output of a program that is a client."""
    own = {**os.environ, **environment}
    return subprocess.run([*command], env=own, capture_output=True, text=True, check=True, timeout=120).stdout


def curl(url: str, key: str, question: str, *, stream: bool) -> Found:
    if (program := shutil.which("curl")) is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"model": MODEL, "messages": turn(question), "stream": stream})
    headers = ["-H", "Content-Type: application/json", "-H", f"Authorization: Bearer {key}"]
    shown = printed([program, "-sSN", "-D", "-", *headers, f"{url}/chat/completions", "-d", body])
    assert shown.endswith("data: [DONE]\n\n") == stream
    action = shown.partition("x-semgrad-guard-action: ")[2].split()[0]
    bodies = [json.loads(line.removeprefix("data: ")) for line in shown.splitlines() if '"choices"' in line]
    parts = [choice.get("delta", choice.get("message")) for one in bodies for choice in one["choices"]]
    return Found("".join(part.get("content") or "" for part in parts), action, shown)


def llm(url: str, key: str, question: str, *, stream: bool) -> Found:
    """A program for the command line, with the server as a model of its own; of a stream it keeps the text alone."""
    of_packages("llm")
    with tempfile.TemporaryDirectory() as home:
        known = f"- model_id: guarded\n  model_name: {MODEL}\n  api_base: {url}\n  api_key_name: guarded\n"
        (Path(home) / "extra-openai-models.yaml").write_text(known)
        program, plain = [sys.executable, "-m", "llm"], [] if stream else ["--no-stream"]
        text = printed([*program, "-m", "guarded", "--key", key, question, *plain], LLM_USER_PATH=home).strip()
        (logged,) = json.loads(printed([*program, "logs", "--json", "-n", "1"], LLM_USER_PATH=home))
    assert logged["response"] == text
    action = None if stream else logged["response_json"]["semgrad_guard"]["action"]
    return Found(text, action, logged)


def openai_node(url: str, key: str, question: str, *, stream: bool) -> Found:
    node, home = shutil.which("node"), HERE / "node_modules" / "openai"
    if node is None or not home.is_dir():
        pytest.skip("node, or the openai package in scripts/server_clients/node_modules, is not installed")
    reply = json.loads(printed([node, HERE / "client.mjs", url, key, question, str(int(stream))]))
    assert reply["record"]["action"] == reply["top"]["action"]
    return Found(reply["text"], reply["top"]["action"], reply)


Client = Callable[..., Found]
CLIENTS: tuple[Client, ...] = (
    *(openai_chat, openai_responses, openai_completions, chat_openai, chat_openai_of_responses, openai_of_langchain),
    *(openai_like, openai_like_chat, litellm, litellm_responses, haystack, openai_agents, openai_agents_chat),
    *(pydantic_ai, curl, llm, openai_node),
)


@BOTH
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_a_client_gets_what_the_guard_decided(
    client: Client, url: str, key: str, question: str, text: str, action: str, stream: bool
) -> None:
    found = client(url, key, question, stream=stream)
    assert (found.text, found.action) in ((text, action), (text, None))
    assert DRAFT not in str(found.shown)


def test_a_live_stream(live_url: str, key: str) -> None:
    found = openai_completions(live_url, key, "What is the capital of Mongolia?", stream=True)
    assert (found.text, found.action) == (DRAFT, "abstain")
    assert found.shown[-1].semgrad_guard["details"]["enforced"] is False


def test_openai_reads_errors(url: str, key: str) -> None:
    (openai,) = of_packages("openai")
    client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
    with pytest.raises(openai.NotFoundError, match="there is: pocket"):
        client.chat.completions.create(model="gpt-9", messages=turn(KNOWN))
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(model=MODEL, messages=turn(KNOWN), max_tokens=0)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
    assert [model.id for model in client.models.list()] == [MODEL]


def test_the_defaults_of_openai_like(url: str, live_url: str, key: str) -> None:
    """It asks for a completion at the temperature .1, which is not the calibration's."""
    (module,) = of_packages("llama_index.llms.openai_like")
    assert module.OpenAILike(model=MODEL, api_base=live_url, api_key=key, max_retries=0).complete(KNOWN).text
    with pytest.raises(Exception, match="set temperature to 0 or leave it out"):
        module.OpenAILike(model=MODEL, api_base=url, api_key=key, max_retries=0).complete(KNOWN)


# Structures: read where they are let through, and refused in OpenAI's form where they are not.


def test_openai_parses_structures(live_url: str, strict_url: str, key: str, city: Any) -> None:
    (openai,) = of_packages("openai")
    request = {"model": MODEL, "messages": turn(KNOWN), "response_format": city}
    live, held = (
        openai.OpenAI(base_url=url, api_key=key, max_retries=0).chat.completions.parse(**request).choices[0].message
        for url in (live_url, strict_url)
    )
    assert isinstance(live.parsed, city)
    assert (held.parsed, held.refusal) == (None, "I don't know.")


def test_instructor(live_url: str, strict_url: str, key: str, city: Any) -> None:
    instructor, openai = of_packages("instructor", "openai")
    request = {"model": MODEL, "messages": turn(KNOWN), "response_model": city, "max_retries": 0}

    def client(url: str) -> Any:
        plain = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
        return instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA).chat.completions

    found, raw = client(live_url).create_with_completion(**request)
    assert isinstance(found, city)
    assert raw.choices[0].logprobs.semgrad_guard["action"] == "abstain"
    with pytest.raises(Exception, match=r"(?i)retr|valid|refus"):
        client(strict_url).create(**request)


def test_pydantic_ai_reads_structures_and_refusals(live_url: str, strict_url: str, key: str, city: Any) -> None:
    ai, models, providers = of_packages("pydantic_ai", "pydantic_ai.models.openai", "pydantic_ai.providers.openai")

    async def run(url: str) -> Any:
        model = models.OpenAIChatModel(MODEL, provider=providers.OpenAIProvider(base_url=url, api_key=key))
        return (await ai.Agent(model, output_type=ai.NativeOutput(city)).run(KNOWN)).output

    assert isinstance(asyncio.run(run(live_url)), city)
    with pytest.raises(Exception, match="I don't know"):
        asyncio.run(run(strict_url))
