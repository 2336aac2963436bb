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
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

FILE = Path(__file__).parent / "data" / "tokenizer.json"
Message = dict[str, str]
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(messages: Sequence[Message]) -> str:
    """The chat template's text with the generation prompt, without the cost of running Jinja a million times."""
    turns = (f"{START}{m['role']}\n{m['content']}{END}\n" for m in messages)
    return "".join(turns) + f"{START}assistant\n"


def load_tokenizer() -> Tokenizer:
    """Every training's tokenizer."""
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
