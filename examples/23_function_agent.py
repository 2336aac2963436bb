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
from argparse import ArgumentParser

from bills import trained
from llama_index.core.agent.workflow import FunctionAgent

from semgrad_guard import Policy
from semgrad_guard.estimators import GreedyNLL


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
