"""Prints pip constraints that pin every dependency to its lower bound in pyproject.toml, extras included.

    python scripts/lowest_bounds.py > constraints-lowest.txt

The pins of constraints.txt stay: other versions of torch come in builds that pull gigabytes of CUDA packages.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(\[[\w,-]+\])?>=(?P<lowest>[\w.]+)(,<[\w.]+)?")


def lowest(requirements: Iterable[str], *, but: Iterable[str]) -> Iterator[str]:
    """`name==version` for each `name>=version`.

    Raises:
        SystemExit: a requirement without a lower bound, or in a form that is not read here.
    """
    for requirement in requirements:
        found = REQUIREMENT.fullmatch(requirement)
        if found is None:
            raise SystemExit(f"{requirement!r} in pyproject.toml has no lower bound: write 'name>=version'")
        if found["name"] not in but:
            yield f"{found['name']}=={found['lowest']}"


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [requirement for group in project["optional-dependencies"].values() for requirement in group]
    others = [requirement for requirement in extras if not requirement.startswith(f"{project['name']}[")]
    pinned = (ROOT / "constraints.txt").read_text()
    names = re.findall(r"^([\w.-]+)==", pinned, re.MULTILINE)
    print(pinned, *lowest([*project["dependencies"], *others], but=names), sep="\n")


if __name__ == "__main__":
    main()
