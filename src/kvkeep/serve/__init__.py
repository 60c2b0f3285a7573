"""An OpenAI-compatible server for one model, which computes no beginning of a prompt twice."""

from kvkeep.serve.app import application
from kvkeep.serve.engine import Engine
from kvkeep.serve.listen import bind, is_loopback, listen, run

__all__ = ["Engine", "application", "bind", "is_loopback", "listen", "run"]
