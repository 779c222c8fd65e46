"""The page that people open with a condition in hand knows every reason that a condition can have."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONDITIONS = ROOT / "operator/sglang_rollout/transitions/fleet_conditions.py"
PAGE = ROOT / "docs/troubleshooting.md"


def reasons_of(function: str) -> set[str]:
    """Reasons with which this function answers True."""
    source = CONDITIONS.read_text()
    body = re.search(rf"^def {function}\(.*?(?=^def |\Z)", source, re.MULTILINE | re.DOTALL)
    assert body, f"{CONDITIONS.name} has no {function}"
    return set(re.findall(r'return True, "(\w+)"', body.group()))


def test_every_reason_is_explained() -> None:
    reasons = reasons_of("_degraded") | reasons_of("_degraded_or_lost") | reasons_of("_progressing")
    assert len(reasons) > 10
    page = PAGE.read_text()
    assert sorted(reason for reason in reasons if f"`{reason}`" not in page) == []


def test_pages_link_to_pages_that_exist() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
