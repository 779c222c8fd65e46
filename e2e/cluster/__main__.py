"""`python -m e2e.cluster VERB`."""

from __future__ import annotations

import sys

from e2e.cluster.cli import main

sys.exit(main())
