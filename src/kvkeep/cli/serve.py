"""`kvkeep serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import typer

from kvkeep.cli.compile import compile_if_it_pays
from kvkeep.cli.options import RunOptions, with_options
from kvkeep.cli.output import say
from kvkeep.cli.progress import Working
from kvkeep.errors import ModelError
from kvkeep.options import option

_KEY_VARIABLE = "KVKEEP_API_KEY"


@dataclass(frozen=True)
class Serve(RunOptions):
    """Options of `kvkeep serve`."""

    name: str | None = option(None, "The model's name for clients; default: --model.")
    host: str = option("127.0.0.1", "Address to listen on; 127.0.0.1 allows only this machine.")
    port: int = option(8000, "Port; 0: any free port.", min=0, max=65535)
    cache: str = option(
        "keep_all",
        "Cache spec, e.g. keep_all+int8; caches that evict are not reused.",
        complete="specs",
    )
    budget: int = option(
        2 * 10**9, "Most memory for cached prompt prefixes, e.g. 500MB, 2GB.", size="2GB"
    )
    store: str | None = option(
        None, "Also keep the prefixes in a directory, redis://..., or s3://..."
    )
    store_budget: int | None = option(
        None, "Most bytes of the blocks in --store, e.g. 20GB; default: no limit.", size=""
    )
    namespace: str = option(
        "", "Namespace in --store; entries of other namespaces are never found."
    )
    api_key: str | None = option(
        None,
        "Key that clients must send. Other users can see options; prefer the variable.",
        envvar=_KEY_VARIABLE,
        show_envvar=True,
    )
    key_file: Path | None = option(
        None, "File with a line name:key per client. Clients of one name share prefixes."
    )
    share: bool | None = option(
        None,
        "Without keys: share cached prompt prefixes among all clients; default: only on 127.0.0.1.",
    )
    allow_host: list[str] | None = option(
        None, "Host name that clients use for this server; may be repeated."
    )
    allow_origin: list[str] | None = option(
        None,
        "Origin whose web pages may use the server, e.g. https://chat.example; may be repeated.",
    )
    allow_images_from: list[str] | None = option(
        None,
        "Host from which clients' image URLs are fetched; may be repeated, * is all; default: "
        "none.",
    )
    queue: int = option(64, "Most waiting requests; further requests get 429.", min=0)
    wait_s: float = option(
        300, "Seconds a request may wait; then it gets 503.", name="--wait", min=1
    )
    answer_tokens: int = option(
        8192, "Most tokens of all answers to a request, n x max_tokens.", min=1
    )
    prompt_bytes: int | None = option(
        None,
        "Most bytes of a prompt, e.g. 500KB; default: 16 per token of the context, but at least "
        "64 KiB and at most 8 MiB.",
        size="",
    )
    timeout_s: float = option(
        30,
        "Seconds for a client to send a request, and to read its answer.",
        name="--timeout",
        min=1,
    )
    connections: int = option(512, "Most open connections; further connections get 503.", min=1)
    sequences: int = option(16, "Most answers generated at once.", min=1)
    drafts: int = option(
        0, "Most tokens that a step drafts for each answer from its text; 0: none.", min=0
    )
    cache_bytes: int | None = option(
        None,
        "Most memory for the caches of all running answers, e.g. 8GB; default: no limit.",
        name="--memory",
        size="",
    )
    response_bytes: int = option(
        0,
        "Memory for answers of /v1/responses that clients may continue, e.g. 100MB; default: none "
        "is kept.",
        name="--responses",
        size="",
    )
    image_bytes: int = option(
        20 * 10**6, "Most bytes of a request's images, for vision-language models.", size="20MB"
    )


@with_options(Serve)
def serve(asked: Serve) -> None:
    """Serve a model to OpenAI clients, reusing the caches of shared prompt prefixes."""
    name, host, api_key = asked.name or asked.named or str(asked.adapter), asked.host, asked.api_key
    if asked.store_budget is not None and asked.store is None:
        raise typer.BadParameter("--store-budget needs --store; give both or neither")
    if api_key is not None and not api_key.strip():
        raise typer.BadParameter("--api-key is empty; give a key, or leave the option out")
    if api_key is None and asked.key_file is None and os.environ.get(_KEY_VARIABLE) == "":
        # typer ignores an empty variable.
        raise typer.BadParameter(
            f"{_KEY_VARIABLE} is empty; give a key, or unset it to serve without a key"
        )
    if api_key is not None and asked.key_file is not None:
        raise typer.BadParameter("--api-key and --key-file exclude each other; give only one")
    from kvkeep.serve.http.gate import host_names, origin_names
    from kvkeep.serve.http.listen import bind, is_loopback, run
    from kvkeep.serve.keys import Keys
    from kvkeep.serve.limits import Limits

    # Check the options before loading the model.
    hosts_of_images = tuple(host_names(asked.allow_images_from or ()))
    own = asked.some(*(one.name for one in fields(Limits) if one.name != "image_hosts"))
    limits = Limits(**own, image_hosts=hosts_of_images)
    hosts = host_names([host, *(asked.allow_host or ())])
    origins = origin_names(asked.allow_origin or ())
    keys = None if asked.key_file is None else Keys.read(asked.key_file)
    keys = Keys.single(api_key) if api_key else keys
    if keys is not None and asked.share is not None:
        raise typer.BadParameter(
            "--share is for servers without keys; with keys, clients share prompt prefixes if "
            "their keys have the same name in the --key-file"
        )
    bound = bind(host, asked.port)
    if keys is None and not is_loopback(host):
        shared = (
            "and can find out other clients' prompts"
            if asked.share
            else "and prompt prefixes are not shared without --share"
        )
        say(
            f"warning: without an API key, anyone who can reach {host} can use this server, "
            f"{shared}; set KVKEEP_API_KEY, or use --host 127.0.0.1",
            err=True,
        )
    with bound, Working("starting") as working:
        from kvkeep.hf.compile_ahead import note_tokens
        from kvkeep.hf.models import processor_of
        from kvkeep.serve.app import application
        from kvkeep.serve.engine import Engine
        from kvkeep.spec import parse_specs
        from kvkeep.store import PrefixStore, open_store

        spec = parse_specs(asked.cache)
        backend = None if asked.store is None else open_store(asked.store, asked.store_budget)
        kept = PrefixStore(asked.budget, backend=backend)
        loaded, tokenizer = asked.load(working, images=True)
        try:
            tokenizer = processor_of(loaded) or tokenizer
        except ModelError as error:
            say(f"images are refused: {error}", err=True)
        compile_if_it_pays(loaded, asked.compile, 0, working, limits.sequences)
        engine = Engine(
            loaded,
            tokenizer,
            name=name,
            cache=spec,
            store=kept,
            namespace=asked.namespace,
            limits=limits,
            compile=asked.compile,
        )
        if asked.compile:
            engine.warm(working)
        working.stop()
        if engine.why_no_reuse:
            say(f"prompt prefixes are not reused: {engine.why_no_reuse}", err=True)
        shares = is_loopback(host) if asked.share is None else asked.share
        app = application(engine, keys=keys, share=shares, hosts=hosts, origins=origins)
        announce = partial(_announce, f"{name} ({spec})")
        run(app, bound, limits=limits, announce=announce, stop=engine.close)
        note_tokens(loaded, engine.metrics.generated)


def _announce(served: str, url: str) -> None:
    say(f"{served} at {url}")
    say(f"chat page, with a view of the cache: {url.removesuffix('v1')}")


__all__ = ["serve"]
