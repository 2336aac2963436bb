"""The models that judge samples, in their published shapes with random weights, and a tokenizer of one token a word.

Nothing is downloaded. A word is a token for every model here, so a judge reads an answer of T tokens as T tokens, about
what the published tokenizers do with each other's words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    DebertaV2Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
)

from semgrad_guard.engine.text_pairs import CrossEncoder, Entailment

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "<|im_start|>", "<|im_end|>")
_WORDS = ("system", "user", "assistant", "True", "False", "(A)", "(B)")
MNLI = ("CONTRADICTION", "NEUTRAL", "ENTAILMENT")


def word_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` entries that renders chats (ChatML) and pairs.

    The words w0, w1, ... are a token each; other words are unknown, which is a token each as well.
    """
    named = [*_SPECIAL, *_WORDS]
    vocabulary = named + [f"w{number}" for number in range(size - len(named))]
    words = {word: number for number, word in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))  # noqa: S106 - a token of text
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(list(_SPECIAL))
    roles = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "eos": "<|im_end|>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=CHATML,
        model_input_names=["input_ids", "attention_mask"],
        **{f"{role}_token": token for role, token in roles.items()},
    )


def _deberta(hidden_size: int, **changes: Any) -> DebertaV2Config:
    return DebertaV2Config(
        vocab_size=128_100,
        hidden_size=hidden_size,
        num_hidden_layers=24,
        num_attention_heads=hidden_size // 64,
        intermediate_size=4 * hidden_size,
        type_vocab_size=0,
        relative_attention=True,
        position_buckets=256,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        id2label=dict(enumerate(MNLI)),
        label2id={label: number for number, label in enumerate(MNLI)},
        **changes,
    )


def _roberta(**changes: Any) -> RobertaConfig:
    return RobertaConfig(
        vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1, pad_token_id=0, num_labels=1, **changes
    )


@dataclass(frozen=True)
class Judge:
    """A judge by its configuration, built only where it is measured."""

    name: str
    config: PreTrainedConfig

    @property
    def layer_weights(self) -> int:
        """Weights of all encoder layers: about the operations of a token, halved."""
        c: Any = self.config
        return c.num_hidden_layers * (4 * c.hidden_size**2 + 2 * c.hidden_size * c.intermediate_size)

    @property
    def bytes(self) -> int:
        """Of the weights in float32, as published."""
        c: Any = self.config
        return 4 * (self.layer_weights + c.vocab_size * c.hidden_size)

    def build(self) -> Entailment | CrossEncoder:
        """The judge with random weights, on the CPU in float32 (as the checkpoints are loaded)."""
        model, tokenizer = self._random()
        kind = CrossEncoder if self.config.num_labels == 1 else Entailment
        return kind(model, tokenizer, name=self.name)

    def save(self, folder: Path) -> None:
        """The same as a checkpoint."""
        for part in self._random():
            part.save_pretrained(folder)

    def _random(self) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(self.config).eval()
        tokenizer = word_tokenizer(self.config.vocab_size)
        tokenizer.truncation_side = "left"
        return model, tokenizer


LARGE_NLI = Judge("deberta-v3-large", _deberta(1024))
XLARGE_NLI = Judge("deberta-v2-xlarge-mnli", _deberta(1536, conv_kernel_size=3, conv_act="gelu"))
LARGE_CROSS = Judge(
    "stsb-roberta-large",
    _roberta(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
)
TINY_NLI = Judge("a tiny NLI model", DebertaV2Config(**{**_deberta(64).to_dict(), "num_hidden_layers": 2}))
TINY_CROSS = Judge(
    "a tiny cross-encoder", _roberta(hidden_size=64, num_hidden_layers=2, num_attention_heads=1, intermediate_size=256)
)
"""The published code of semantic entropy uses deberta-v2-xlarge-mnli, SAR's uses stsb-roberta-large."""
