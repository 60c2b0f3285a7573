"""An OpenAI-compatible server for one model, which computes no beginning of a prompt twice."""

from kvkeep.extras import needed_by

with needed_by("kvkeep serve", "serve"):
    import prometheus_client  # noqa: F401
    import pydantic  # noqa: F401
    import starlette  # noqa: F401 (every module here may import it)
    import uvicorn  # noqa: F401
