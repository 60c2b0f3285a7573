"""`kvkeep serve`: an OpenAI-compatible server for one model."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli.output import (
    AdapterName,
    ModelDtype,
    ModelName,
    Working,
    model_for,
    reported,
    size_in_bytes,
)


def serve(
    model: ModelName = None,
    adapter: AdapterName = None,
    host: Annotated[
        str, typer.Option(help="Who can connect: 127.0.0.1 is this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    cache: Annotated[
        str, typer.Option(help="What to keep, e.g. keep_all+int8; what evicts is not reused.")
    ] = "keep_all",
    budget: Annotated[
        str, typer.Option(help="Most memory for beginnings of prompts, e.g. 500MB, 2GB.")
    ] = "2GB",
    store: Annotated[
        str | None,
        typer.Option(help="Where they are kept too: a directory, redis://..., or s3://..."),
    ] = None,
    namespace: Annotated[
        str, typer.Option(help="Of that store; entries of another one are never found.")
    ] = "",
    dtype: ModelDtype = "auto",
    device: Annotated[str | None, typer.Option(help="A torch device.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="KVKEEP_API_KEY",
            show_envvar=True,
            help="What clients must send. Others see options, so better set the variable.",
        ),
    ] = None,
) -> None:
    """Serve a model to OpenAI clients; no beginning of a prompt is computed twice."""
    model = model_for(model, adapter)
    name = model or str(adapter)
    with reported():
        nbytes = size_in_bytes(budget)
        if api_key is not None and not api_key.strip():
            raise typer.BadParameter("--api-key is empty; leave it out, or give one")
        try:
            from kvkeep.serve.listen import bind, is_loopback, run
        except ModuleNotFoundError as error:
            raise typer.BadParameter(
                f"kvkeep serve needs {error.name}; pip install 'kvkeep[serve]'"
            ) from error
        bound = bind(host, port)  # what is wrong with it shows before the model is loaded
        if not is_loopback(host) and api_key is None:
            typer.echo(
                f"warning: without an API key, all who reach {host} can use this server; set "
                "KVKEEP_API_KEY, or use --host 127.0.0.1",
                err=True,
            )
        with bound, Working("starting") as working:
            from kvkeep.hf.models import load
            from kvkeep.serve.app import application
            from kvkeep.serve.engine import Engine
            from kvkeep.spec import parse_specs
            from kvkeep.store import PrefixStore, opened

            spec = parse_specs(cache)
            backend = None if store is None else opened(store)
            kept = PrefixStore(nbytes, backend=backend)
            loaded, tokenizer = load(model, dtype, device, working, adapter=adapter)
            engine = Engine(
                loaded, tokenizer, name=name, cache=spec, store=kept, namespace=namespace
            )
            working.stop()
            if engine.why_no_reuse:
                typer.echo(f"every prompt is computed: {engine.why_no_reuse}", err=True)
            run(
                application(engine, api_key=api_key),
                bound,
                announce=lambda url: typer.echo(f"{name} ({spec}) at {url}"),
                stop=engine.close,
            )


__all__ = ["serve"]
