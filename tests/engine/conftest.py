"""What the engine's tests measured: the worst relative error per architecture and tier, shown with `-v`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch

from semgrad_guard import LanguageModel

from .tiny_models import ARCHITECTURES, shared

_TIERS = ("replay", "ordinary")
_worst: dict[str, dict[str, float]] = defaultdict(dict)

Record = Callable[[str, str, float], None]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny models are fastest on one thread, and sums come out the same on every machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pocket() -> LanguageModel:
    """The embedded model, whose tokens hold several characters."""
    return LanguageModel.from_pretrained("pocket")


@pytest.fixture(scope="session")
def record() -> Record:
    """Note a relative error of an architecture in a tier."""

    def note(architecture: str, tier: str, error: float) -> None:
        _worst[architecture][tier] = max(error, _worst[architecture].get(tier, 0.0))

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not _worst or config.get_verbosity() < 0:
        return
    terminalreporter.section("worst relative error of the engine")
    terminalreporter.write_line(f"{'':28}" + "".join(f"{tier:>12}" for tier in _TIERS))
    for architecture, errors in _worst.items():
        cells = (f"{errors[tier]:12.1e}" if tier in errors else f"{'-':>12}" for tier in _TIERS)
        terminalreporter.write_line(f"{architecture:28}" + "".join(cells))


@pytest.fixture
def softmax_in_the_dtype_of_its_input(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention (Gemma 2's only kind) takes its softmax in float32, whose sums depend on the number of keys.

    The models of other kinds are left alone: with a patched function, each of them would check itself in every test.
    """
    name = request.node.callspec.params.get("name") if hasattr(request.node, "callspec") else None
    if name in ARCHITECTURES and shared(name).config._attn_implementation != "eager":
        return
    softmax = torch.softmax

    def keep_double(states: torch.Tensor, dim: int = -1, dtype: torch.dtype | None = None, **_: object) -> torch.Tensor:
        return softmax(states, dim, dtype=None if states.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", keep_double)
