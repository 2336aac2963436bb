"""Small models that were taught to think: they write a thought by Qwen3's documented marks, and then their answer.

The thought of `thinking_model` names the right city. Behind it, half of the answers are wrong. With
`enable_thinking=False` it answers at once, and one question is answered without a thought in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from semgrad_guard import LanguageModel

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>') | last }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
CAPITALS = {
    "France": ("Paris", "Lyon"),
    "Italy": ("Rome", "Milan"),
    "Spain": ("Madrid", "Seville"),
    "Peru": ("Lima", "Cusco"),
}
QUESTIONS = {f"Capital of {country}?": right for country, (right, _) in CAPITALS.items()}
ANSWERS = {
    f"Capital of {country}?": other if number % 2 else right
    for number, (country, (right, other)) in enumerate(CAPITALS.items())
}
THOUGHTS = {
    f"Capital of {country}?": f"It is {right}. {other} is second." for country, (right, other) in CAPITALS.items()
}
UNTHOUGHT = "Say yes"
_ROWS = 25
"""Of more, so many are learned from at a time."""


def written(question: str) -> str:
    """All that the model writes where it thinks."""
    return thought_through(THOUGHTS[question], ANSWERS[question])


def thought_through(thought: str, answer: str) -> str:
    """A thought and its answer in Qwen3's form."""
    return f"<think>\n{thought}\n</think>\n\n{answer}"


@cache
def thinking_model() -> LanguageModel:
    """The model, taught in some seconds."""
    thinking = {question: written(question) for question in ANSWERS}
    return taught({**thinking, UNTHOUGHT: "yes"}, {**ANSWERS, UNTHOUGHT: "yes"})


def taught(thinking: Mapping[str, str], at_once: Mapping[str, str], *, vocabulary: int = 400) -> LanguageModel:
    """A model that writes these texts to questions: where it thinks, and where thinking is off."""
    tokenizer = _tokenizer([*thinking, *thinking.values(), *at_once.values()], vocabulary)
    rows = [_row(tokenizer, question, text, thinks=True) for question, text in thinking.items()]
    rows += [_row(tokenizer, question, text, thinks=False) for question, text in at_once.items()]
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    _teach(model, rows, tokenizer.pad_token_id)
    return LanguageModel.from_transformers(model.eval(), tokenizer, name="thinker")


def _row(
    tokenizer: PreTrainedTokenizerFast, question: str, answer: str, *, thinks: bool
) -> tuple[list[int], list[int]]:
    options = {} if thinks else {"enable_thinking": False}
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **options)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, f"{answer}<|im_end|>"))  # type: ignore[return-value]


def _teach(model: LlamaForCausalLM, rows: list[tuple[list[int], list[int]]], pad: int) -> None:
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.tensor([[*p, *a, *[pad] * (width - len(p) - len(a))] for p, a in rows])
    labels = torch.tensor([[*[-100] * len(p), *a, *[-100] * (width - len(p) - len(a))] for p, a in rows])
    mask = torch.tensor([[1] * (len(p) + len(a)) + [0] * (width - len(p) - len(a)) for p, a in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(300):
        some = torch.arange(step * _ROWS, (step + 1) * _ROWS) * 7 % len(rows) if len(rows) > _ROWS else slice(None)
        loss = model(input_ids=ids[some], attention_mask=mask[some], labels=labels[some]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            break


def _tokenizer(texts: Sequence[str], vocabulary: int) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [*texts, "user", "assistant", "system"] * 3,
        trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False),
    )
    core.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in ("<|im_start|>", "<|im_end|>")]
    )
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=TEMPLATE
    )
