"""A small model that was taught to think: it writes a thought by Qwen3's documented marks, and then its answer.

The thought names the right city. Behind it, half of the answers are wrong. With `enable_thinking=False` it answers at
once, and one question is answered without a thought in any case.
"""

from __future__ import annotations

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


def written(question: str) -> str:
    """All that the model writes where it thinks."""
    return f"<think>\n{THOUGHTS[question]}\n</think>\n\n{ANSWERS[question]}"


@cache
def thinking_model() -> LanguageModel:
    """The model, taught in some seconds."""
    tokenizer = _tokenizer()
    rows: list[tuple[list[int], list[int]]] = []
    for question, answer in ANSWERS.items():
        for thinks in (True, False):
            rows.append(_row(tokenizer, question, written(question) if thinks else answer, thinks=thinks))
    rows += [_row(tokenizer, UNTHOUGHT, "yes", thinks=thinks) for thinks in (True, False)]
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
    for _ in range(300):
        loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            break


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    texts = [*ANSWERS, *map(written, ANSWERS), UNTHOUGHT, "yes", "user", "assistant", "system"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts * 3, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_special_tokens(
        [AddedToken(mark, special=True, normalized=False) for mark in ("<|im_start|>", "<|im_end|>")]
    )
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>", chat_template=TEMPLATE
    )
