"""Scores and log-probabilities: of the model's own answers, of answers from elsewhere, and of objects.

python examples/02_score_and_logprobs.py [--model smollm2]
"""

from __future__ import annotations

import math
from argparse import ArgumentParser
from typing import Literal

from pydantic import BaseModel

from langchain_semgrad_guard import ChatSemGrad, get_verdict

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")
MODEL = parser.parse_args().model

QUESTION = "What is the capital of France?"
chat = ChatSemGrad(model=MODEL, logprobs=True)

message = chat.invoke(QUESTION)
print(f"{QUESTION}\n  own answer: {message.text} (uncertainty {get_verdict(message).uncertainty:.1e})")
for token in message.response_metadata["logprobs"]["content"]:
    print(f"    {token['token']!r} with probability {math.exp(token['logprob']):.3f}")

for answer in ("Paris", "Berlin"):  # from any author: another server, a cache, a person
    scored = chat.score(QUESTION, answer)
    print(f"  from elsewhere: {scored.text} (uncertainty {get_verdict(scored).uncertainty:.1e})")


class Capital(BaseModel):
    """A capital."""

    city: Literal["Paris", "Berlin", "Tokyo"]


found = chat.with_structured_output(Capital, include_raw=True).invoke(QUESTION)
print(f"  as an object: {found['parsed']} (uncertainty {get_verdict(found['raw']).uncertainty:.1e})")
