"""A LlamaIndex query engine that answers from memory what it knows, and looks up the rest.

    python examples/20_query_engine.py

The first engine sees the question only, the second one the passages as well. The threshold is the embedded model's own
calibration, so what is answered from memory is within its promise; what is looked up is not judged, and is outside.
"""

from __future__ import annotations

from llama_index.core import Document, PromptTemplate, SummaryIndex

from llama_index_semgrad_guard import GuardedQueryEngine, SemGradLLM
from semgrad_guard import Calibration, Policy
from semgrad_guard.pocket import CALIBRATION_PATH

llm = SemGradLLM(model="pocket", max_tokens=24)
reading = PromptTemplate("Question: {query_str}\nContext: {context_str}\nAnswer:")
index = SummaryIndex.from_documents([Document(text="In short: The capital of Mongolia is Ulaanbaatar.")])
engine = GuardedQueryEngine(
    index.as_query_engine(llm=llm, response_mode="generation"),
    policy=Policy.from_calibration(Calibration.load(CALIBRATION_PATH)),
    escalate_to=index.as_query_engine(llm=llm, text_qa_template=reading),
)

for question in ("What is the capital of France?", "What is the capital of Mongolia?"):
    response = engine.query(question)
    record = response.metadata["semgrad_guard"]
    print(f"{question} {response}")
    print(f"  {record['action']}: P(correct) of memory {record['confidence']:.2f}, promised: {record['promised']}")
