"""An agent that pays bills: a call of a tool that its model is unsure of is withheld, and the tool does not run.

    python examples/23_function_agent.py [--model your/model-that-calls-tools]

Without a model, a tiny one is trained here, in some seconds. It learns who is paid for three bills, and three payees
of a fourth, the garage. A message that is more probable than not is let through, for brevity: this promises nothing.
"""

from __future__ import annotations

# Ours first: if a package is absent, its error names it.
from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback, asking

# isort: split

import asyncio
import json
from argparse import ArgumentParser

import torch
from llama_index.core.agent.workflow import FunctionAgent
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from semgrad_guard import LanguageModel, Policy
from semgrad_guard.estimators import GreedyNLL

BILLS = {"rent": ["Ann"], "water": ["Bob"], "power": ["Eve"], "garage": ["Ann", "Bob", "Eve"]}
TEMPLATE = (
    "{% if tools %}{# a call is <tool_call>{'name': ..., \"arguments\": ...}</tool_call> #}{% endif %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def trained() -> LanguageModel:
    """A model of bytes and names that calls `pay`. For the garage, three payees are about equally probable."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: number for number, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens(["<end>"])
    core.add_tokens([*BILLS, *BILLS["garage"]])
    marks = {"eos_token": "<end>", "pad_token": "<end>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **marks)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=264,
            hidden_size=64,
            initializer_range=0.2,
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
    for bill, payees in BILLS.items():
        prompt = f"user:Pay the {bill}.\nassistant:"
        for payee in payees:
            call = json.dumps({"name": "pay", "arguments": {"to": payee}})
            texts.append((prompt, f"<tool_call>\n{call}\n</tool_call><end>"))
        texts.append((f"{prompt}\ntool:Paid {payees[0]}.\nassistant:", "It is paid.<end>"))
    batch = tokenizer([prompt + answer for prompt, answer in texts], return_tensors="pt", padding=True)
    labels = batch["input_ids"].clone()
    for row, (prompt, answer) in enumerate(texts):
        begin = len(tokenizer(prompt)["input_ids"])
        labels[row, :begin] = -100
        labels[row, begin + len(tokenizer(answer)["input_ids"]) :] = -100
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    slowing = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for _step in range(200):
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        slowing.step()
    return LanguageModel.from_transformers(model.eval(), tokenizer, name="bills")


def pay(to: str) -> str:
    """Pay a person."""
    paid.append(to)
    return f"Paid {to}."


parser = ArgumentParser()
parser.add_argument("--model", help="a folder, a GGUF file, or a hub id; default: a tiny model that is trained here")
name = parser.parse_args().model
# G-NLL is minus the logarithm of the probability.
router = UncertaintyRouterCallback(Policy(threshold=0.69))
options = {"estimator": GreedyNLL(), "max_tokens": 80, "router": router}
llm = SemGradLLM(model=name, **options) if name else SemGradLLM.from_model(trained(), **options)
paid: list[str] = []


async def main() -> None:
    """Ask for a bill that the model knows, and for one that it cannot know."""
    for bill in ("rent", "garage"):
        paid.clear()
        output = None
        with asking(router) as question:  # the first doubtful message ends the agent's run
            output = await FunctionAgent(llm=llm, tools=[pay]).run(f"Pay the {bill}.")
        answer = output if question.refused is None else "I am not sure whom to pay. Please do it yourself."
        print(f"{bill}: {answer}   (paid: {', '.join(paid) or 'nobody'})")


if llm.metadata.is_function_calling_model:
    asyncio.run(main())
else:
    print(f"{name} calls no tools: choose a model whose chat template has them.")
