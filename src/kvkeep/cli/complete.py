"""What a shell suggests for the values of options. Nothing here imports torch, so the library's
names stand here again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kvkeep.errors import KVKeepError
from kvkeep.home import home
from kvkeep.named_models import installed

POLICIES = (
    "keep_all",
    "window:1024",
    "streaming:1024",
    "h2o:1024",
    "vlen:1024",
    "qh2o:1024",
    "qvlen:1024",
    "tova:1024",
    "snapkv:1024",
    "knorm:1024",
    "keydiff:1024",
    "expected_attention:1024",
    "random:1024",
    "kvzip:25%",
    "kvzap:25%,scorer=FILE",
)
"""A spec of each policy; the whole of it is suggested, because shells add a space. Specs such as
`pyramid(h2o:1024)` are left out, because bash would insert their parentheses without quotes."""
CODECS = ("plain", "int8", "int4", "fp8", "kivi")
STORAGES = ("growing", "fixed", "concat", "host")
TASKS = (
    "ruler",
    "longbench",
    "helmet",
    "all",
    "needle",
    "multi-key",
    "multi-value",
    "multi-query",
    "variables",
    "common-words",
    "frequent-words",
    "qa",
    "passage-retrieval",
    "passage-count",
    "multi-document-qa",
    "few-shot",
    "code-completion",
    "key-value",
    "reranking",
    "many-shot",
    "citations",
)
_MODEL_FILES = ("config.json", "*.gguf", "adapter_config.json")

Completion = Callable[[str], list[str]]


def specs(incomplete: str) -> list[str]:
    """Specs that begin so. After a semicolon another spec begins."""
    before, semicolon, spec = incomplete.rpartition(";")
    for separator, names in (("@", STORAGES), ("/", CODECS), ("+", CODECS)):
        head, found, tail = spec.rpartition(separator)
        if found:
            start = before + semicolon + head + separator
            return [start + name for name in _matching(tail, names)]
    return [before + semicolon + one for one in _matching(spec, POLICIES)]


def models(incomplete: str) -> list[str]:
    """Short names of models, and directories with a model."""
    return [*_matching(incomplete, sorted(installed())), *_directories(incomplete, _MODEL_FILES)]


def adapters(incomplete: str) -> list[str]:
    """Directories with an adapter."""
    return _directories(incomplete, _MODEL_FILES[-1:])


def sessions(incomplete: str) -> list[str]:
    """Names of saved sessions."""
    with suppress(KVKeepError, OSError):
        return _matching(incomplete, sorted(one.stem for one in (home() / "sessions").glob("*.kv")))
    return []


def one_of(*values: str) -> Completion:
    """Completes to one of the values."""
    return lambda incomplete: _matching(incomplete, values)


def several_of(*values: str) -> Completion:
    """Completes the last of several values, which commas separate."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + one for one in _matching(last, values)]

    return complete


dtypes = one_of("auto", "float32", "bfloat16", "float16")
devices = one_of("cpu", "cuda")


def _matching(beginning: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(beginning)]


def _directories(incomplete: str, files: Iterable[str]) -> list[str]:
    """The directories whose paths begin so and that have one of the files."""
    before, slash, _ = incomplete.rpartition("/")
    with suppress(OSError):
        return sorted(
            one
            for child in Path(before + slash or ".").iterdir()
            if (one := before + slash + child.name).startswith(incomplete)
            and child.is_dir()
            and any(next(child.glob(file), None) is not None for file in files)
        )
    return []
