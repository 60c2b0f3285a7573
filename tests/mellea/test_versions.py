"""The backend with a transformers that Mellea does not know."""

from __future__ import annotations

import pytest
from support.tiny_models import tiny

from kvkeep.errors import UnsupportedError
from kvkeep.hf.cache_argument import OF_GENERATE


@pytest.mark.skipif(OF_GENERATE != "cache", reason="Mellea knows this transformers")
def test_a_newer_transformers_is_refused():
    from kvkeep.mellea import KVKeepBackend

    with pytest.raises(UnsupportedError, match=r"install 'transformers<5\.24'"):
        KVKeepBackend(tiny("llama"), None)
