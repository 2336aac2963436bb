"""A LlamaIndex query engine that answers from memory where its model is sure, and looks up the rest.

    python examples/20_query_engine.py [--model smollm2]

The model decides about each answer before the answer leaves it; `guarded` makes a query one question of its router. The
embedded model's threshold is its own calibration, so its answers from memory are within its promise; another model's
lies between the scores of these two questions, and promises nothing. Answers from passages are not judged, and are
outside of any promise.
"""

from __future__ import annotations

from argparse import ArgumentParser
from statistics import median

from llama_index.core import Document, PromptTemplate, SummaryIndex

from llama_index_semgrad_guard import SemGradLLM, UncertaintyRouterCallback, get_verdict, guarded
from semgrad_guard import Calibration, Policy
from semgrad_guard.named import POCKET
from semgrad_guard.pocket import CALIBRATION_PATH

parser = ArgumentParser()
parser.add_argument("--model", default="pocket", help="pocket, smollm2, a folder, a GGUF file, or a hub id")
MODEL = parser.parse_args().model

QUESTIONS = ("What is the capital of France?", "What is the capital of Mongolia?")
reader = SemGradLLM(model=MODEL, max_tokens=24)
if MODEL == POCKET:
    policy = Policy.from_calibration(Calibration.load(CALIBRATION_PATH))
else:
    policy = Policy(threshold=median(get_verdict(reader.complete(question)).uncertainty for question in QUESTIONS))
reading = PromptTemplate(reader.reading_prompt.format(question="{query_str}", context="{context_str}"))
index = SummaryIndex.from_documents([Document(text="In short: The capital of Mongolia is Ulaanbaatar.")])
router = UncertaintyRouterCallback(policy, escalate_to=index.as_query_engine(llm=reader, text_qa_template=reading))
llm = SemGradLLM(model=MODEL, max_tokens=24, router=router)
engine = guarded(index.as_query_engine(llm=llm, response_mode="generation"), router)

for question in QUESTIONS:
    response = engine.query(question)
    record = response.metadata["semgrad_guard"]
    print(f"{question} {response}")
    print(f"  {record['action']}: uncertainty of memory {record['uncertainty']:.1e}, promised: {record['promised']}")
