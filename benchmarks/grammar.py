"""Structured output on the CPU: llguidance beside xgrammar, with the demo model's tokenizer.

    python benchmarks/grammar.py [--repeats 5] [--python PYTHON]

prints a JSON line. `--python` is one of an environment with both packages, kvkeep and kvkeep-lab;
by default the one that runs the script. Each library has a process of its own, which has imported
torch and transformers. Of each grammar and a text that follows it: the time to compile the grammar
without a cache; and for each token of the text, the time to take the token before it and to compute
the mask of tokens that may follow. Memory is that which the process has gained in the end. A text
that a library does not allow ends the script.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import distribution
from typing import Any

PACKAGES = {"llguidance": ["llguidance"], "xgrammar": ["xgrammar", "apache-tvm-ffi"]}
"""What each needs beside torch and transformers."""

_WORD, _NUMBER = {"type": "string", "maxLength": 40}, {"type": "number"}
_PLACE = {
    "type": "object",
    "properties": {"name": _WORD, "country": {"enum": ["Norway", "Chile", "Japan"]}},
    "required": ["name", "country"],
    "additionalProperties": False,
}
_ORDER = {
    "type": "object",
    "properties": {
        "customer": {
            "type": "object",
            "properties": {"name": _WORD, "email": {"type": "string", "format": "email"}},
            "required": ["name", "email"],
            "additionalProperties": False,
        },
        "lines": {
            "type": "array",
            "maxItems": 8,
            "items": {
                "type": "object",
                "properties": {"article": _WORD, "count": {"type": "integer"}, "price": _NUMBER},
                "required": ["article", "count", "price"],
                "additionalProperties": False,
            },
        },
        "paid": {"type": "boolean"},
    },
    "required": ["customer", "lines", "paid"],
    "additionalProperties": False,
}
_TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["label", "children"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
_LEAVES = [{"label": f"leaf number {i}", "children": []} for i in range(4)]
_LINES = [{"article": f"blue cup {i}", "count": i + 1, "price": 4.5} for i in range(5)]
CASES: dict[str, tuple[str | dict[str, Any], Any]] = {
    "place": (_PLACE, {"name": "Valparaiso", "country": "Chile"}),
    "order": (
        _ORDER,
        {
            "customer": {"name": "Ada Lovelace", "email": "ada@example.org"},
            "lines": _LINES,
            "paid": True,
        },
    ),
    "tree": (_TREE, {"label": "root", "children": [{"label": "branch", "children": _LEAVES}]}),
    "date": (r"(19|20)\d\d-(0[1-9]|1[0-2])-([0-2]\d|3[01])T[0-2]\d:[0-5]\d", "2026-11-27T09:30"),
}
"""A JSON schema or a regular expression, and what follows it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--within", choices=PACKAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.within:
        print(json.dumps(measured(options.within, options.repeats)))
        return
    from kvkeep_lab.bench.record import result

    rows = []
    for library in PACKAGES:
        command = [options.python, __file__, "--within", library]
        command += ["--repeats", str(options.repeats)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows += json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(result("grammar", rows, model="smollm2-135m", dtype="none")))


def measured(library: str, repeats: int) -> list[dict[str, Any]]:
    """A row for each case, in this process."""
    import psutil
    import transformers

    from kvkeep.hf.models import resolve

    tokenizer = transformers.AutoTokenizer.from_pretrained(resolve("smollm2-135m"))
    process = psutil.Process()
    before, start = process.memory_info().rss, time.perf_counter()
    prepare = {"llguidance": with_llguidance, "xgrammar": with_xgrammar}[library]
    imported, compiled = prepare(tokenizer)
    ready = time.perf_counter() - start
    about = {
        "system": library,
        "version": distribution(library).version,
        "installed_mib": sum(map(size, PACKAGES[library])) / 2**20,
        "import_s": imported,
        "tokenizer_s": ready - imported,
    }
    rows = []
    for name, (grammar, value) in CASES.items():
        text = value if isinstance(grammar, str) else json.dumps(value, separators=(",", ":"))
        tokens = tokenizer.encode(text, add_special_tokens=False)
        compiling, masks = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            step = compiled(grammar)
            compiling.append(time.perf_counter() - start)
            last = None
            for token in tokens:
                start = time.perf_counter()
                allowed = step(last)
                masks.append(time.perf_counter() - start)
                if not allowed(token):
                    raise SystemExit(f"{library} does not allow {text!r} by {name}")
                last = token
        rows.append(
            {
                **about,
                "grammar": name,
                "tokens": len(tokens),
                "compile_ms": 1e3 * statistics.median(compiling),
                "mask_us": 1e6 * statistics.median(masks),
                "slowest_mask_us": 1e6 * max(masks),
            }
        )
    memory = (process.memory_info().rss - before) / 2**20
    return [row | {"memory_mib": memory} for row in rows]


Step = Callable[[int | None], Callable[[int], bool]]
"""Takes the last token, computes the mask, and returns what tells whether a token may follow."""


def with_llguidance(tokenizer: Any) -> tuple[float, Callable[[str | dict[str, Any]], Step]]:
    """The seconds that its import took, and what compiles a grammar."""
    start = time.perf_counter()
    import llguidance
    import llguidance.hf

    imported = time.perf_counter() - start
    known = llguidance.hf.from_tokenizer(tokenizer)
    matcher_of = llguidance.LLMatcher

    def compiled(grammar: str | dict[str, Any]) -> Step:
        if isinstance(grammar, str):
            made = matcher_of.grammar_from_regex(grammar)
        else:
            options: Any = {
                "whitespace_flexible": False,
                "item_separator": ",",
                "key_separator": ":",
            }
            made = matcher_of.grammar_from_json_schema(json.dumps(grammar), overrides=options)
        matcher = matcher_of(known, made, log_level=0)

        def step(last: int | None) -> Callable[[int], bool]:
            if last is not None:
                matcher.consume_token(last)
            mask = matcher.compute_bitmask()  # as kvkeep does: `llguidance.torch` imports compilers
            return lambda token: bool(mask[token // 8] >> (token % 8) & 1)

        return step

    return imported, compiled


def with_xgrammar(tokenizer: Any) -> tuple[float, Callable[[str | dict[str, Any]], Step]]:
    """See `with_llguidance`."""
    start = time.perf_counter()
    import xgrammar

    imported = time.perf_counter() - start
    known = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    compiler = xgrammar.GrammarCompiler(known, cache_enabled=False)
    mask = xgrammar.allocate_token_bitmask(1, known.vocab_size)

    def compiled(grammar: str | dict[str, Any]) -> Step:
        if isinstance(grammar, str):
            made = compiler.compile_regex(grammar)
        else:
            made = compiler.compile_json_schema(
                json.dumps(grammar), any_whitespace=False, separators=(",", ":")
            )
        matcher = xgrammar.GrammarMatcher(made)

        def step(last: int | None) -> Callable[[int], bool]:
            if last is not None:
                matcher.accept_token(last)
            matcher.fill_next_token_bitmask(mask)
            return lambda token: bool(mask[0, token // 32] >> (token % 32) & 1)

        return step

    return imported, compiled


def size(package: str) -> int:
    """The bytes of a package's files."""
    files = distribution(package).files or ()
    return sum(path.stat().st_size for file in files if (path := file.locate()).is_file())


if __name__ == "__main__":
    main()
