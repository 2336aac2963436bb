"""What linear maps gave in passes of changing rows, laid out for a replay: here without vLLM."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from semgrad_guard.vllm.kept_outputs import KeptOutputs, Piece

WIDTH, INNER = 4, 6


class Fused(nn.Linear):
    """A map as vLLM calls it: it answers with its output and a bias that was not added."""

    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input), None


def layers(kind: type[nn.Linear], names: dict[str, tuple[int, int]]) -> Any:
    """Two layers with maps of these names, inputs and outputs."""
    made = [nn.ModuleDict({name: kind(*sizes, bias=False) for name, sizes in names.items()}) for _ in range(2)]
    return nn.ModuleList([nn.ModuleDict({"mlp": module}) for module in made])


def passed(served: Any, states: torch.Tensor) -> None:
    """A pass through the last layer's maps, whose outputs are changed in place afterwards, as vLLM does."""
    for module in served[1]["mlp"].values():
        module(states[:, : module.in_features])[0].zero_()


def test_rows_of_several_passes_become_a_batch() -> None:
    """In the twin's parts, filled up with zeros; a map that had no room in one of the passes is missing."""
    torch.manual_seed(0)
    served = layers(Fused, {"gate_up_proj": (WIDTH, 2 * INNER), "down_proj": (INNER, WIDTH)})
    twins = layers(nn.Linear, {"gate_proj": (WIDTH, INNER), "up_proj": (WIDTH, INNER), "down_proj": (INNER, WIDTH)})
    kept = KeptOutputs(list(served), list(twins), 1)
    first, second = torch.randn(5, INNER), torch.randn(3, INNER)
    one, other = list[Piece](), list[Piece]()
    bytes_each = 4 * (2 * INNER + WIDTH)

    seen = kept.begin(torch.tensor([1, 2, 4]), [one, other], 6 * bytes_each)
    one.append((seen, 0, 2))
    other.append((seen, 2, 1))
    passed(served, first)
    kept.end()
    passed(served, first)  # no listener between passes
    seen = kept.begin(torch.tensor([2]), [one, other], 6 * bytes_each)
    other.append((seen, 0, 1))
    passed(served, second)
    kept.end()

    found = kept.joined([one, other], 3)
    weights = served[1]["mlp"]["gate_up_proj"].weight, served[1]["mlp"]["down_proj"].weight
    rows = [torch.stack([first[1], first[2]]), torch.stack([first[4], second[2]])]
    for row, states in enumerate(rows):
        gates = states[:, :WIDTH] @ weights[0].T
        for path, expected in (
            ("mlp.gate_proj", gates[:, :INNER]),
            ("mlp.up_proj", gates[:, INNER:]),
            ("mlp.down_proj", states @ weights[1].T),
        ):
            torch.testing.assert_close(found[1, path][row, :2], expected)
            assert not found[1, path][row, 2:].any()

    later = kept.joined([[(None, 0, 1), other[1]]], 1)
    for path, expected in found.items():
        assert torch.equal(later[path][0], expected[1, 1:2])  # without the position that has been let go

    seen = kept.begin(torch.tensor([0]), [one, other], 5 * bytes_each - 1)  # one position too many for both maps
    one.append((seen, 0, 1))
    passed(served, second)
    kept.end()
    assert set(kept.joined([one, other], 3)) == {(1, "mlp.down_proj")}  # it reads more for each number that it gives
    assert set(kept.joined([other], 2)) == {(1, "mlp.down_proj")}, "what had no room is let go of everywhere"
    kept.begin(torch.tensor([0]), [], 6 * bytes_each)
    passed(served, second)
    kept.end()
    assert kept.joined([], 0) == {}
