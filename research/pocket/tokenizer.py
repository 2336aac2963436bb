"""The pocket tokenizer: byte-level BPE, numbers in threes, and words that look the same in every place.

The first word of an answer follows a line break, the same word in a passage after a space. Ordinary byte-level
BPE gives the two different tokens (often differently cut), and a model of this size spends much of its training
learning to spell one from the other. Here the normaliser puts a space in front of every word that begins a text or a
line, and the decoder takes it away again; so copying a span means copying its tokens. (The one loss: a single space
before the first word of a text or a line does not survive a round trip.)

Up to three digits are one token, with and without a space before them: digit by digit, more than a quarter of the
questions about numbers were lost to copying a wrong digit after a right one. A point, comma or colon inside a number is
one token with the digit behind it: alone it would look like a sentence's end to a model that reads from left to right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

FILE = Path(__file__).parent / "data" / "tokenizer.json"
Message = dict[str, str]
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")
VOCABULARY = 13312
PIECES = r"'s| ?\p{L}+|[.,:]\p{N}{1,3}| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(messages: Sequence[Message]) -> str:
    """The chat template's text with the generation prompt, without the cost of running Jinja a million times."""
    turns = (f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)
    return "".join(turns) + f"{START}assistant\n"


def train_tokenizer(texts: Iterable[str], size: int = VOCABULARY) -> Tokenizer:
    """Learn the merges. `texts` should hold the role names often enough for each to become one token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Prepend(" "),
            normalizers.Replace(Regex(r"\A (?=\s)"), ""),  # a text that begins with white space stays as it is
            normalizers.Replace(Regex(r"\n(?=\S)"), "\n "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteLevel(), decoders.Replace(Regex(r"\n (?=\S)"), "\n"), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer = with_decimals(tokenizer)
    for role in ROLES:
        if len(tokenizer.encode(f"{role}\n").ids) != 2:
            raise ValueError(f"the role name {role!r} is not one token: show it more often to the tokenizer")
    return tokenizer


def with_decimals(tokenizer: Tokenizer) -> Tokenizer:
    """The same with ".0" to ":9" as tokens that are merged first, in the places of " 000" to " 029"."""
    state = json.loads(tokenizer.to_str())
    model, new = state["model"], [(sign, digit) for sign in ".,:" for digit in "0123456789"]
    given_up = {f"Ġ{n:03}" for n in range(len(new))} & set(model["vocab"])
    for token, pair in zip(sorted(given_up), new, strict=False):
        model["vocab"]["".join(pair)] = model["vocab"].pop(token)
    kept = [pair for pair in model["merges"] if "".join(pair) not in given_up]
    model["merges"] = [list(pair) for pair in new[: len(given_up)]] + kept
    return Tokenizer.from_str(json.dumps(state))


def load_tokenizer() -> Tokenizer:
    """Every training's tokenizer (`make_tokenizer.py` wrote it)."""
    return Tokenizer.from_file(str(FILE))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) for plain `AutoTokenizer`."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder, save_jinja_files=False)
    written = json.loads(fast.backend_tokenizer.to_str())
    written["model"]["merges"] = [" ".join(pair) for pair in written["model"]["merges"]]  # the wheel is small
    text = json.dumps(written, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
