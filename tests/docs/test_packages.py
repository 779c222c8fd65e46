"""The packages of the operator: who imports whom, and that docs/architecture.md tells of each."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import sglang_rollout

ROOT = Path(sglang_rollout.__file__).parent
PACKAGES = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
ARCHITECTURE = Path(__file__).parents[2] / "docs" / "architecture.md"


def imported_by(package: str) -> set[str]:
    """The other packages."""
    found = set()
    for path in (ROOT / package).rglob("*.py"):
        here = path.relative_to(ROOT.parent).parts[:-1]
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                above = here[: len(here) - node.level + 1] if node.level else ()
                root, place, *_ = [*above, *(node.module or "").split("."), ""]
                found |= {place} if root == ROOT.name else set()
    return (found & set(PACKAGES)) - {package}


def test_no_package_imports_one_that_imports_it() -> None:
    imports = {package: imported_by(package) for package in PACKAGES}

    assert "protocol" in imports["agent"]
    TopologicalSorter(imports).prepare()  # raises CycleError, which names them


def test_what_people_type_is_on_top() -> None:
    assert [package for package in PACKAGES if "cli" in imported_by(package)] == []


def test_each_package_is_told() -> None:
    text = ARCHITECTURE.read_text()

    assert [package for package in PACKAGES if f"`{package}/`" not in text] == []
