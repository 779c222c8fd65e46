"""Every manifest of some fleets, compared with files that people can read. UPDATE_GOLDEN=1 writes them anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.resources.fleets import SPECS, all_children, fleet

GOLDEN = Path(__file__).parent / "golden"


class ReadableDumper(yaml.SafeDumper):
    """No anchors, and text of several lines as it is."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


ReadableDumper.add_representer(str, ReadableDumper.represent_str)


@pytest.mark.parametrize("name", SPECS)
def test_children_are_as_written_down(name: str) -> None:
    rendered = yaml.dump_all(all_children(fleet(SPECS[name])), Dumper=ReadableDumper, sort_keys=False, width=120)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(rendered)
    assert rendered == path.read_text(), f"{path.name} differs: if that is right, run with UPDATE_GOLDEN=1"


def test_no_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(SPECS)
