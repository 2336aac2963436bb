"""The model of the examples 07 and 23: tiny, trained in some seconds, and in doubt about one of four bills."""

from __future__ import annotations

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from semgrad_guard import LanguageModel

BILLS = {"rent": ["Ann"], "water": ["Bob"], "power": ["Eve"], "garage": ["Ann", "Bob", "Eve"]}
NOT_RUN = "Not run: ask whom to pay."
"""What the model reads in the place of a result."""
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
    torch.set_num_threads(1)  # so small a model is faster on one
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
        texts.append((f"{prompt}\ntool:{NOT_RUN}\nassistant:", f"Whom shall I pay for the {bill}?<end>"))
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
