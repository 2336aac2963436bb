"""A build hook of hatch: wheels are packed at the highest level of deflate, which saves 1 % of the embedded weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class RepackWheel(BuildHookInterface):
    """Packs a wheel's files anew; their order, times and contents stay."""

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Once the wheel is written."""
        packed = Path(f"{artifact_path}.repacked")
        with ZipFile(artifact_path) as wheel, ZipFile(packed, "w") as repacked:
            for file in wheel.infolist():
                repacked.writestr(file, wheel.read(file), ZIP_DEFLATED, compresslevel=9)
        shutil.move(packed, artifact_path)
