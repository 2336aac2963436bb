"""An agent that pays bills: a call of a tool that its model is unsure of is withheld, and the tool does not run.

    python examples/23_function_agent.py [--model your/model-that-calls-tools]

Without a model, a tiny one is trained here, in some seconds: it learns three bills by heart and knows no other. The
threshold is twice the highest score of the known bills, for brevity: it promises nothing.
"""

from __future__ import annotations

# Ours first: if a package is absent, its error names it.
from llama_index_semgrad_guard import GuardedFunctionAgent, SemGradLLM, get_verdict

# isort: split

import asyncio
import json
from argparse import ArgumentParser

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from semgrad_guard import LanguageModel, Policy
from semgrad_guard.estimators import MaxProbability

KNOWN = {"rent": "Ann", "water": "Bob", "power": "Eve"}
PAID = "It is paid."
TEMPLATE = (
    "{% if tools %}{# a call is <tool_call>{'name': ..., \"arguments\": ...}</tool_call> #}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def trained() -> LanguageModel:
    """A model of bytes that calls `pay` for the known bills."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    marks = {"eos_token": "<end>", "pad_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **marks)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=257,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            bos_token_id=None,
            eos_token_id=256,
            pad_token_id=256,
        )
    )
    texts: list[tuple[str, str]] = []
    for bill, payee in KNOWN.items():
        call = json.dumps({"name": "pay", "arguments": {"to": payee}})
        prompt = f"user:Pay the {bill}.\nassistant:"
        texts.append((prompt, f"<tool_call>\n{call}\n</tool_call><end>"))
        texts.append((f"{prompt}\ntool:Paid {payee}.\nassistant:", f"{PAID}<end>"))
    batch = tokenizer([prompt + answer for prompt, answer in texts], return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    for row, (prompt, answer) in enumerate(texts):
        begin = len(tokenizer(prompt)["input_ids"])
        labels[row, :begin] = -100
        labels[row, begin + len(tokenizer(answer)["input_ids"]) :] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _step in range(120):
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
    return LanguageModel.from_transformers(model.eval(), tokenizer, name="bills")


def pay(to: str) -> str:
    """Pay a person."""
    paid.append(to)
    return f"Paid {to}."


parser = ArgumentParser()
parser.add_argument("--model", help="a folder, a GGUF file, or a hub id; default: a tiny model that is trained here")
name = parser.parse_args().model
options = {"estimator": MaxProbability(), "max_tokens": 80}
llm = SemGradLLM(model=name, **options) if name else SemGradLLM.from_model(trained(), **options)
paid: list[str] = []


async def main() -> None:
    """Learn a threshold from the known bills, then ask for a known one and an unknown one."""
    scores: list[float] = []
    for bill in KNOWN:
        watching = GuardedFunctionAgent(llm=llm, tools=[pay], policy=Policy(threshold=0.0), mode="annotate")
        scores.append(get_verdict(await watching.run(f"Pay the {bill}.")).uncertainty)
    policy = Policy(threshold=max(0.05, 2 * max(scores)))
    for bill in ("rent", "garage"):
        paid.clear()
        agent = GuardedFunctionAgent(
            llm=llm, tools=[pay], policy=policy, abstain_message="I am not sure whom to pay. Please do it yourself."
        )
        output = await agent.run(f"Pay the {bill}.")
        print(f"{bill}: {output}   ({get_verdict(output).action}; paid: {', '.join(paid) or 'nobody'})")


if llm.metadata.is_function_calling_model:
    asyncio.run(main())
else:
    print(f"{name} calls no tools: choose a model whose chat template has them.")
