"""Prints the pinned packages of one extra of a pyproject.toml, one a line, for pip install -r."""

import sys
import tomllib

with open(sys.argv[1], "rb") as stream:
    project = tomllib.load(stream)["project"]
print("\n".join([*project["dependencies"], *project["optional-dependencies"][sys.argv[2]]]))
