"""One process of `polygraph.py`: one side's ways, each timed once. Runs in either environment, so it imports late.

python benchmarks/polygraph_worker.py {ours,polygraph} FOLDER PROMPT ANSWER RESULT
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import cpu_seconds
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

Way = Callable[[int], None]
"""Answers with so many tokens, and scores."""


def plain(model: Any, ids: torch.Tensor, attention: str) -> Way:
    """Greedy generation with the model as transformers loads it."""

    def generate(count: int) -> None:
        model.set_attn_implementation(attention)
        options = GenerationConfig(max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=options)

    return generate


def ours(model: Any, tokenizer: Any, question: str) -> dict[str, Way]:
    """HybridGrad."""
    from semgrad_guard import GenerationOptions, HybridGrad, LanguageModel

    language_model = LanguageModel.from_transformers(model, tokenizer, semantic_token=-1)

    def hybridgrad(count: int) -> None:
        found = language_model.generate(question, GenerationOptions(max_tokens=count))
        assert HybridGrad()(found.evidence).uncertainty is not None

    return {"HybridGrad": hybridgrad}


def polygraph(model: Any, tokenizer: Any, question: str, judge: Path) -> dict[str, Way]:
    """LM-Polygraph's cheapest estimators, as they come and without attentions and states; and its usual ones."""
    from lm_polygraph import WhiteboxModel
    from lm_polygraph.defaults.register_default_stat_calculators import register_default_stat_calculators
    from lm_polygraph.estimators import LexicalSimilarity, MaximumSequenceProbability, MeanTokenEntropy, SemanticEntropy
    from lm_polygraph.utils.builder_enviroment_stat_calculator import BuilderEnvironmentStatCalculator
    from lm_polygraph.utils.dataset import Dataset
    from lm_polygraph.utils.manager import UEManager

    whitebox = WhiteboxModel(model, tokenizer, model_path="random")

    def way(estimator: Any, *, lean: bool = False) -> Way:
        """The work of `estimate_uncertainty`, with the manager (and its judge) made beforehand."""
        keeping = {"output_attentions": not lean, "output_hidden_states": not lean}
        calculators = register_default_stat_calculators("Whitebox", **keeping)
        for calculator in calculators:
            if "nli_model" in calculator.cfg:
                calculator.cfg.nli_model.deberta_path = str(judge)
        manager = UEManager(
            Dataset([question], [""], batch_size=1),
            whitebox,
            [estimator],
            available_stat_calculators=calculators,
            builder_env_stat_calc=BuilderEnvironmentStatCalculator(whitebox),
            generation_metrics=[],
            ue_metrics=[],
            processors=[],
            ignore_exceptions=False,
            verbose=False,
        )

        def answer(count: int) -> None:
            model.set_attn_implementation("sdpa" if lean else "eager")  # only eager attention gives its weights
            manager.max_new_tokens = count
            manager()
            assert len(manager.stats["greedy_tokens"][-1]) == count, "not the answer to be measured"

        return answer

    return {
        "MaximumSequenceProbability": way(MaximumSequenceProbability()),
        "MaximumSequenceProbability, lean": way(MaximumSequenceProbability(), lean=True),
        "MeanTokenEntropy": way(MeanTokenEntropy()),
        "MeanTokenEntropy, lean": way(MeanTokenEntropy(), lean=True),
        "LexicalSimilarity, 10 samples": way(LexicalSimilarity("rougeL")),
        "SemanticEntropy, 10 samples": way(SemanticEntropy()),
    }


def main() -> None:
    side, folder, prompt, answer, result = sys.argv[1:]
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()
    # By its own class: the one that belongs to the shape would read these words as nothing.
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(Path(folder) / "model")
    tokenizer.chat_template = None  # both sides read the words as they are
    question = " ".join(f"w{11 * number}" for number in range(int(prompt)))
    ids = torch.tensor([tokenizer(question, add_special_tokens=False)["input_ids"]])
    scored = (
        ours(model, tokenizer, question)
        if side == "ours"
        else polygraph(model, tokenizer, question, Path(folder) / "judge")
    )
    ways = {"plain": plain(model, ids, "sdpa"), "plain, eager attention": plain(model, ids, "eager"), **scored}
    for way in ways.values():
        way(2)  # once unmeasured: buffers, kernels, self-checks
    model.set_attn_implementation("sdpa")
    seconds = {name: cpu_seconds(lambda way=way: way(int(answer))) for name, way in ways.items()}
    Path(result).write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
