"""The options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

EstimatorName = Literal[
    "hybridgrad",
    "semgrad",
    "paragrad",
    "exgrad",
    "gnll",
    "max_probability",
    "mean_entropy",
    "ln_pe",
    "p_true",
    "self_consistency",
    "deg",
    "inside",
    "semantic_entropy",
    "semantic_density",
    "mutual_information",
    "sar",
]
DtypeName = Literal["float32", "bfloat16", "float16"]
GraderName = Literal["exact-match", "token-f1", "rouge-l"]

Model = Annotated[
    str,
    typer.Option(
        metavar="NAME", help='"pocket" (the embedded model), a folder with safetensors, or a Hugging Face hub id.'
    ),
]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(metavar="NAME", help="float32, bfloat16 or float16, if not the checkpoint's own. Scores follow it."),
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="Where the model goes: cpu, cuda, cuda:1.")]
_NAMES = (
    "hybridgrad, semgrad, paragrad, exgrad, gnll, max_probability or mean_entropy, from one replay; p_true, by asking "
    "the model; or by more answers, compared by their words: ln_pe, self_consistency, deg, inside, semantic_entropy, "
    "semantic_density, mutual_information or sar"
)
LearnedName = Literal[EstimatorName, "fused", "auto"]
EstimatorOption = Annotated[
    EstimatorName | None,
    typer.Option(
        "--estimator",
        metavar="NAME",
        help=f"How uncertainty is measured: {_NAMES}.",
        show_default="the calibration's, or hybridgrad",
    ),
]
LearnedEstimatorOption = Annotated[
    LearnedName,
    typer.Option(
        "--estimator",
        metavar="NAME",
        help=f"How uncertainty is measured: {_NAMES}; fused, which is fitted on a part of the answers; or auto, the "
        "best of these on that part.",
    ),
]
Variant = Annotated[
    Literal["paper", "official"] | None,
    typer.Option(
        metavar="NAME",
        help="The gradients of hybridgrad, semgrad, paragrad, exgrad or fused: the paper's, or its published code's.",
        show_default="the calibration's, or paper",
    ),
]
Tau = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        help="hybridgrad's: a small one leans to SemGrad, a large one to ParaGrad.",
        show_default="the calibration's, or 1",
    ),
]
Beta = Annotated[
    float | None,
    typer.Option(metavar="X", help="hybridgrad's: the weight of ParaGrad.", show_default="the calibration's, or 1"),
]
SampledRows = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="Estimate ParaGrad from N rows of the output head (2,000 to 4,000): a little faster, with an error bar.",
        show_default="the calibration's, or all",
    ),
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration", metavar="FILE", help="Made by `calibrate`: gives confidence, a threshold and its promise."
    ),
]
ProbeFile = Annotated[
    Path | None,
    typer.Option("--probe", metavar="FILE", help="Made by `probe`: the token it recommends is used."),
]
Threshold = Annotated[
    float | None,
    typer.Option(metavar="X", help="Let through uncertainties at or below this one; promises nothing."),
]
By = Annotated[
    Literal["sentence", "clause"] | None,
    typer.Option(
        metavar="UNIT", help="Score every sentence or clause of a text by itself, and mark the doubtful ones."
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, metavar="N", help="The longest answer, in tokens.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, metavar="X", help="0 always takes the likeliest token; above 0 samples.")
]
Seed = Annotated[int, typer.Option(min=0, metavar="N", help="Repeats a sampled answer.")]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="A system message before the question.")]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first broken line of the data file.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else there.")]
