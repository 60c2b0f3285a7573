"""An OpenAI-compatible server for one model that reuses the cached prefixes of prompts."""

from kvkeep.extras import needed_by

with needed_by("kvkeep serve", "serve"):
    import prometheus_client  # noqa: F401
    import pydantic  # noqa: F401
    import starlette  # noqa: F401 (every module here may import it)
    import uvicorn  # noqa: F401
