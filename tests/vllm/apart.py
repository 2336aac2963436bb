"""The results of an engine in another process, as JSON: `python apart.py FOLDER OUTPUT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from semgrad_guard.errors import InputError
from semgrad_guard.vllm.engine import Engine
from semgrad_guard.vllm.shared_weights import library

if __name__ == "__main__":
    engine = library().LLM(sys.argv[1], enforce_eager=True, max_model_len=256, max_num_seqs=2)
    try:
        Engine(engine)
    except InputError as error:
        Path(sys.argv[2]).write_text(json.dumps({"error": str(error)}))
