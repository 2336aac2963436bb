"""A small model that thinks: it writes a thought by Qwen3's documented marks, and then its answer.

The thought of `thinking_model` names the right city. Behind it, half of the answers are wrong, and these are the unsure
ones: two times in three it would write them, else the right city. With `enable_thinking=False`, or where its thought is
cut short, it answers at once. One question is answered without a thought in any case. The weights are a file, which
`fixtures/thinker/train.py` wrote: training ends elsewhere on every processor.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from semgrad_guard import LanguageModel

FOLDER = Path(__file__).parent / "fixtures" / "thinker"
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
    return thought_through(THOUGHTS[question], ANSWERS[question])


def thought_through(thought: str, answer: str) -> str:
    """A thought and its answer in Qwen3's form."""
    return f"<think>\n{thought}\n</think>\n\n{answer}"


@cache
def thinking_model() -> LanguageModel:
    """The model, in float32."""
    return LanguageModel.from_pretrained(str(FOLDER))
