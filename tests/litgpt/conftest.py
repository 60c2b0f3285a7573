"""All of it is skipped where LitGPT is not installed: pip cannot choose it beside transformers."""

from __future__ import annotations

import pytest

pytest.importorskip("litgpt")
