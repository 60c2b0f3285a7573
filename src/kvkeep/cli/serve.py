"""`kvkeep serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.compile import Compile, compile_if_it_pays
from kvkeep.cli.complete import specs
from kvkeep.cli.output import (
    AdapterName,
    DeviceName,
    ModelDtype,
    ModelName,
    ModelWeights,
    model_for,
    say,
    size_in_bytes,
)
from kvkeep.cli.progress import Working
from kvkeep.errors import ModelError

_KEY_VARIABLE = "KVKEEP_API_KEY"


def serve(
    model: ModelName = None,
    adapter: AdapterName = None,
    name: Annotated[
        str | None, typer.Option(help="The model's name for clients; default: --model.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 127.0.0.1 allows only this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: any free port.")] = 8000,
    cache: Annotated[
        str,
        typer.Option(
            help="Cache spec, e.g. keep_all+int8; caches that evict are not reused.",
            autocompletion=specs,
        ),
    ] = "keep_all",
    budget: Annotated[
        str, typer.Option(help="Most memory for cached prompt prefixes, e.g. 500MB, 2GB.")
    ] = "2GB",
    store: Annotated[
        str | None,
        typer.Option(help="Also keep the prefixes in a directory, redis://..., or s3://..."),
    ] = None,
    store_budget: Annotated[
        str | None,
        typer.Option(help="Most bytes of the blocks in --store, e.g. 20GB; default: no limit."),
    ] = None,
    namespace: Annotated[
        str,
        typer.Option(help="Namespace in --store; entries of other namespaces are never found."),
    ] = "",
    dtype: ModelDtype = "auto",
    weights: ModelWeights = None,
    device: DeviceName = None,
    compile: Compile = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=_KEY_VARIABLE,
            show_envvar=True,
            help="Key that clients must send. Other users can see options; prefer the variable.",
        ),
    ] = None,
    key_file: Annotated[
        Path | None,
        typer.Option(
            help="File with a line name:key per client. Clients of one name share prefixes."
        ),
    ] = None,
    share: Annotated[
        bool | None,
        typer.Option(
            help="Without keys: share cached prompt prefixes among all clients; default: only on "
            "127.0.0.1.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Host name that clients use for this server; may be repeated."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose web pages may use the server, e.g. https://chat.example; may be "
            "repeated.",
        ),
    ] = None,
    queue: Annotated[
        int, typer.Option(min=0, help="Most waiting requests; further requests get 429.")
    ] = 64,
    wait: Annotated[
        float, typer.Option(min=1, help="Seconds a request may wait; then it gets 503.")
    ] = 300,
    answer_tokens: Annotated[
        int,
        typer.Option(min=1, help="Most tokens of all answers to a request, n x max_tokens."),
    ] = 8192,
    prompt_bytes: Annotated[
        str | None,
        typer.Option(
            help="Most bytes of a prompt, e.g. 500KB; default: 16 per token of the context, but at "
            "least 64 KiB and at most 8 MiB.",
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(min=1, help="Seconds for a client to send a request, and to read its answer."),
    ] = 30,
    connections: Annotated[
        int, typer.Option(min=1, help="Most open connections; further connections get 503.")
    ] = 512,
    sequences: Annotated[int, typer.Option(min=1, help="Most answers generated at once.")] = 16,
    drafts: Annotated[
        int,
        typer.Option(
            min=0,
            help="Most tokens that a step drafts for each answer from its text; 0: none.",
        ),
    ] = 0,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Most memory for the caches of all running answers, e.g. 8GB; default: no limit."
        ),
    ] = None,
    responses: Annotated[
        str | None,
        typer.Option(
            help="Memory for answers of /v1/responses that clients may continue, e.g. 100MB; "
            "default: none is kept.",
        ),
    ] = None,
    image_bytes: Annotated[
        str, typer.Option(help="Most bytes of a request's images, for vision-language models.")
    ] = "20MB",
    allow_images_from: Annotated[
        list[str] | None,
        typer.Option(
            help="Host from which clients' image URLs are fetched; may be repeated, * is all; "
            "default: none.",
        ),
    ] = None,
) -> None:
    """Serve a model to OpenAI clients, reusing the caches of shared prompt prefixes."""
    model = model_for(model, adapter)
    name = name or model or str(adapter)
    if store_budget is not None and store is None:
        raise typer.BadParameter("--store-budget needs --store; give both or neither")
    if api_key is not None and not api_key.strip():
        raise typer.BadParameter("--api-key is empty; give a key, or leave the option out")
    if api_key is None and key_file is None and os.environ.get(_KEY_VARIABLE) == "":
        # typer ignores an empty variable.
        raise typer.BadParameter(
            f"{_KEY_VARIABLE} is empty; give a key, or unset it to serve without a key"
        )
    if api_key is not None and key_file is not None:
        raise typer.BadParameter("--api-key and --key-file exclude each other; give only one")
    nbytes, most_stored = size_in_bytes(budget, "--budget"), _bytes(store_budget, "--store-budget")
    most_prompt, most_held = _bytes(prompt_bytes, "--prompt-bytes"), _bytes(memory, "--memory")
    from kvkeep.serve.http.gate import host_names, origin_names
    from kvkeep.serve.http.listen import bind, is_loopback, run
    from kvkeep.serve.keys import Keys
    from kvkeep.serve.limits import Limits

    # Check the options before loading the model.
    limits = Limits(
        queue=queue,
        wait_s=wait,
        answer_tokens=answer_tokens,
        prompt_bytes=most_prompt,
        timeout_s=timeout,
        connections=connections,
        sequences=sequences,
        cache_bytes=most_held,
        response_bytes=_bytes(responses, "--responses") or 0,
        image_bytes=size_in_bytes(image_bytes, "--image-bytes"),
        image_hosts=tuple(host_names(allow_images_from or ())),
        drafts=drafts,
    )
    hosts, origins = host_names([host, *(allow_host or ())]), origin_names(allow_origin or ())
    keys = Keys.single(api_key) if api_key else Keys.read(key_file) if key_file else None
    if keys is not None and share is not None:
        raise typer.BadParameter(
            "--share is for servers without keys; with keys, clients share prompt prefixes if "
            "their keys have the same name in the --key-file"
        )
    bound = bind(host, port)
    if keys is None and not is_loopback(host):
        shared = (
            "and can find out other clients' prompts"
            if share
            else "and prompt prefixes are not shared without --share"
        )
        say(
            f"warning: without an API key, anyone who can reach {host} can use this server, "
            f"{shared}; set KVKEEP_API_KEY, or use --host 127.0.0.1",
            err=True,
        )
    with bound, Working("starting") as working:
        from kvkeep.hf.compile_ahead import note_tokens
        from kvkeep.hf.models import load, processor_of
        from kvkeep.serve.app import application
        from kvkeep.serve.engine import Engine
        from kvkeep.spec import parse_specs
        from kvkeep.store import PrefixStore, open_store

        spec = parse_specs(cache)
        backend = None if store is None else open_store(store, most_stored)
        kept = PrefixStore(nbytes, backend=backend)
        loaded, tokenizer = load(
            model, dtype, device, working, adapter=adapter, weights=weights, images=True
        )
        try:
            tokenizer = processor_of(loaded) or tokenizer
        except ModelError as error:
            say(f"images are refused: {error}", err=True)
        compile_if_it_pays(loaded, compile, 0, working, limits.sequences)
        engine = Engine(
            loaded,
            tokenizer,
            name=name,
            cache=spec,
            store=kept,
            namespace=namespace,
            limits=limits,
            compile=compile,
            progress=working,
        )
        working.stop()
        if engine.why_no_reuse:
            say(f"prompt prefixes are not reused: {engine.why_no_reuse}", err=True)
        shares = is_loopback(host) if share is None else share
        app = application(engine, keys=keys, share=shares, hosts=hosts, origins=origins)
        announce = partial(_announce, f"{name} ({spec})")
        run(app, bound, limits=limits, announce=announce, stop=engine.close)
        note_tokens(loaded, engine.metrics.generated)


def _bytes(given: str | None, option: str) -> int | None:
    return None if given is None else size_in_bytes(given, option)


def _announce(served: str, url: str) -> None:
    say(f"{served} at {url}")
    say(f"chat page, with a view of the cache: {url.removesuffix('v1')}")


__all__ = ["serve"]
