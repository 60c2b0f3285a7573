"""`kvkeep store`: list, check, clean and copy stores of blocks."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli.errors import Group
from kvkeep.cli.output import (
    JsonFlag,
    examples,
    print_json,
    print_table,
    say,
    size_in_bytes,
)
from kvkeep.cli.progress import Working

if TYPE_CHECKING:
    from kvkeep.store import Backend, Label, StoredBlock

_PAGE = 64  # keys per listing request

StorePlace = Annotated[
    str,
    typer.Argument(
        metavar="STORE",
        help="A directory, redis://host/0?name=kvkeep (valkey://, rediss://, unix://), or a URL "
        "that fsspec supports, such as s3://bucket/path.",
    ),
]

store = typer.Typer(
    cls=Group,
    help="List, check, clean and copy stores of blocks.",
    epilog=examples("kvkeep store stats store"),
)


@store.command("ls", epilog=examples("kvkeep store ls redis://127.0.0.1/0?name=kvkeep"))
def list_blocks(
    where: StorePlace,
    limit: Annotated[int, typer.Option(min=1, help="Most blocks to list.")] = 100,
    json: JsonFlag = False,
) -> None:
    """List blocks with their tokens, bytes, model and namespace."""
    with Working("reading labels"):
        backend = _opened(where)
        labels = _labels(backend)
        rows = [_row(key, label) for key, label in islice(labels, limit)]
        more = next(labels, None) is not None
        _require_answers(backend)
    if json:
        print_json({"blocks": rows, "more": more})
    elif rows:
        _print_rows(where, [_short(row) for row in rows])
        if more:
            typer.echo(f"only the first {limit} are listed; --limit lists more", err=True)
    else:
        typer.echo("no blocks")


@store.command(epilog=examples("kvkeep store stats store"))
def stats(where: StorePlace, json: JsonFlag = False) -> None:
    """Count blocks, tokens and bytes for each identity."""
    from kvkeep.store.borders import plain_identity

    with Working("reading labels") as working:
        backend = _opened(where)
        identities: dict[str, dict[str, Any]] = {}
        keys = list(backend.scan())
        for done, (_, label) in enumerate(_labels(backend, keys)):
            identity, adds = plain_identity(label.identity)
            row = {**_of_identity(identity), "blocks": 0, "tokens": 0, "bytes": 0}
            row = identities.setdefault(identity, row)
            row["blocks"] += 1
            row["tokens"] += 0 if adds else len(label.tokens)
            row["bytes"] += label.nbytes
            working("reading labels", done / len(keys))
    rows = list(identities.values())
    result: dict[str, Any] = {
        name: sum(row[name] for row in rows) for name in ("blocks", "tokens", "bytes")
    }
    result |= {"damaged": backend.damaged, "failures": backend.failures}
    if rows:
        _print_rows(where, rows, stderr=json)
    if json:
        last = {"last_error": backend.last_error}
        print_json({"backend": backend.name, **result, "identities": rows, **last})
    else:
        say(", ".join(f"{count:,} {name}" for name, count in result.items()))
        if backend.last_error:
            say(f"last failure: {backend.last_error}")


@store.command(epilog=examples("kvkeep store verify store"))
def verify(where: StorePlace, json: JsonFlag = False) -> None:
    """Read every block and compare its checksums.

    Damaged blocks are moved to quarantine, and the exit code is then 1.
    """
    with Working("reading blocks") as working:
        backend = _opened(where)
        keys = list(backend.scan())
        whole = sum(1 for _ in _blocks(backend, keys, working))
    gone = len(keys) - whole - backend.damaged
    result = {"blocks": len(keys), "whole": whole, "damaged": backend.damaged, "gone": gone}
    if json:
        print_json(result)
    else:
        typer.echo(f"{whole:,} of {len(keys):,} blocks are intact")
        if gone:
            typer.echo(f"{gone:,} were removed meanwhile")
        if backend.damaged:
            typer.echo(f"{backend.damaged:,} were damaged and are in quarantine now")
    if backend.damaged:
        raise typer.Exit(1)


@store.command(epilog=examples("kvkeep store gc store --budget 20GB"))
def gc(
    where: StorePlace,
    older_than: Annotated[
        float,
        typer.Option(
            min=0,
            help="Remove abandoned writes and quarantined blocks older than this many seconds.",
        ),
    ] = 3600.0,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Then remove the least recently used blocks (or the oldest, if uses are not "
            "recorded) until the rest fits, e.g. 2GB or 500MiB."
        ),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Remove abandoned writes, quarantined blocks, and blocks beyond a budget."""
    most = None if budget is None else size_in_bytes(budget, "--budget")
    with Working("removing blocks"):
        backend = _opened(where)
        freed = backend.gc(older_than, most)
        left = sum(1 for _ in backend.scan())
        _require_answers(backend)
    if json:
        print_json({"freed": freed, "blocks": left})
    else:
        typer.echo(f"freed {freed:,} bytes; {left:,} blocks are left")


@store.command(epilog=examples("kvkeep store export store s3://bucket/store"))
def export(
    where: StorePlace,
    target: Annotated[str, typer.Argument(metavar="TO", help="The other store.")],
    json: JsonFlag = False,
) -> None:
    """Copy all blocks to another store and check them; exit code 1 if a block was not copied."""
    with Working("copying blocks") as working:
        from kvkeep.store import open_store

        source = _opened(where)
        sink = open_store(target)
        keys = list(source.scan())
        pages = [keys[start : start + _PAGE] for start in range(0, len(keys), _PAGE)]
        missing = [key for page in pages for key in sink.missing(page)]
        _require_answers(sink)
        copied = sink.put_all(_blocks(source, missing, working))
        _require_answers(sink)
    present, left = len(keys) - len(missing), len(missing) - copied
    result = {"copied": copied, "present": present, "left": left, "damaged": source.damaged}
    if json:
        print_json(result)
    else:
        typer.echo(
            f"copied {copied:,} blocks; {present:,} existed already, {left:,} were not copied"
        )
    if left:
        raise typer.Exit(1)


def _opened(where: str) -> Backend:
    from kvkeep.store import open_store

    return open_store(where, create=False)


def _require_answers(backend: Backend) -> None:
    from kvkeep.errors import StateError

    if backend.failures:
        raise StateError(
            f"the store failed: {backend.last_error}; check that it runs, and try again"
        )


def _blocks(backend: Backend, keys: list[str], working: Working) -> Iterator[StoredBlock]:
    """Yield the intact blocks of `keys`."""
    for done, key in enumerate(keys):
        block = backend.get(key, used=False)
        _require_answers(backend)
        if block is not None:
            yield block
        working("reading blocks", (done + 1) / len(keys))


def _labels(backend: Backend, keys: list[str] | None = None) -> Iterator[tuple[str, Label]]:
    found = iter(backend.scan() if keys is None else keys)
    while page := list(islice(found, _PAGE)):
        for key, label in zip(page, backend.labels(page), strict=True):
            if label is not None:
                yield key, label


def _row(key: str, label: Label) -> dict[str, Any]:
    return {
        "key": key,
        "tokens": len(label.tokens),
        "bytes": label.nbytes,
        "layers": label.layers,
        "dtype": label.dtype.removeprefix("torch."),
        **_of_identity(label.identity),
    }


def _of_identity(identity: str) -> dict[str, Any]:
    """Decode an identity: JSON for models, free text otherwise."""
    from kvkeep.store.borders import plain_identity

    identity, _ = plain_identity(identity)
    try:
        told = json_module.loads(identity)
        model = told["model"]
        adapter = "" if model["adapter"] == "none" else f"+{model['adapter'][:8]}"
        name = f"{model['weights'][:8]}{adapter} {model['dtype'].removeprefix('torch.')}"
        return {
            "model": name,
            "namespace": str(told["namespace"]),
            "codecs": ", ".join(told["codecs"]),
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return {"model": identity[:60], "namespace": "", "codecs": ""}


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A row shortened to fit a terminal."""
    _, prefix, own = row["key"].split("/")
    short = row | {"key": f"{prefix[:6]}/{own[-6:]}"}
    del short["codecs"]
    return short


def _print_rows(where: str, rows: list[dict[str, Any]], *, stderr: bool = False) -> None:
    from kvkeep.store.open_store import shown

    print_table(shown(where), rows, stderr=stderr)
