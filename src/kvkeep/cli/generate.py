"""`kvkeep generate`: stream an answer, then print its speed and memory."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.output import (
    AdapterName,
    JsonFlag,
    ModelDtype,
    ModelName,
    Temperature,
    TopP,
    Working,
    model_for,
    print_json,
    reported,
)


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")] = "",
    model: ModelName = None,
    adapter: AdapterName = None,
    cache: Annotated[str, typer.Option(help="Cache spec, e.g. window:1024,sinks=4.")] = "keep_all",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    prompt_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Read the prompt from a file.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Apply no chat template.")] = False,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Annotated[int | None, typer.Option(help="Seed for sampling.")] = None,
    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Feed the prompt in chunks of this many tokens; default: 1,024 if the cache has a "
            "budget, otherwise the whole prompt at once.",
            show_default=False,
        ),
    ] = None,
    keep_until: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Keep the prompt up to this text, such as the end of its instructions, whatever "
            "else is evicted.",
            show_default=False,
        ),
    ] = None,
    dtype: ModelDtype = "auto",
    device: Annotated[str | None, typer.Option(help="A torch device.")] = None,
    json: JsonFlag = False,
) -> None:
    """Answer a prompt with a kvkeep cache."""
    model = model_for(model, adapter)
    with reported():
        from kvkeep.spec import parse_specs

        spec = parse_specs(cache)
        text = given_prompt(prompt, prompt_file)
        with Working("starting") as working:
            from kvkeep.hf.generate import generate as run
            from kvkeep.hf.models import load
            from kvkeep.host.keep_until import keep_until as spec_keeping

            loaded, tokenizer = load(model, dtype, device, working, adapter=adapter)
            working("processing the prompt")

            def show(piece: str) -> None:
                if piece:
                    working.stop()
                if not json:
                    typer.echo(piece, nl=False)

            result = run(
                loaded,
                tokenizer,
                text,
                cache=spec,
                max_new_tokens=max_new_tokens,
                system=system,
                raw=raw,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                prefill_chunk=prefill_chunk,
                keep_until=keep_until,
                on_text=show,
            )
            used = str(spec)
            if keep_until is not None:  # as `run` resolved it
                fed = result.ids[:, : result.prompt_tokens]
                used = str(spec_keeping(spec, fed, keep_until, tokenizer))
    held = result.cache
    if json:
        print_json(
            {
                "text": result.text,
                "tokens": result.tokens,
                "tokens_per_s": result.tokens_per_s,
                "ttft_s": result.ttft_s,
                "cache_bytes": held.live_bytes,
                "allocated_bytes": held.nbytes,
                "length": held.length,
                "capacity": held.capacity,
                "prompt_tokens": result.prompt_tokens,
                "model": model,
                "adapter": adapter,
                "cache": used,
            }
        )
        return
    typer.echo(
        f"\n\n{result.tokens} tokens, {result.tokens_per_s:.1f} tokens/s, first token after "
        f"{result.ttft_s:.2f} s; cache {held.live_bytes / 2**20:.1f} MiB, "
        f"{held.length}/{held.capacity} slots ({used})"
    )


def given_prompt(prompt: str, prompt_file: Path | None) -> str:
    """The prompt: the argument, a file's content, or stdin if the argument is "-" or missing.

    Raises:
        BadParameter: both or neither are given, or the text is empty or not UTF-8.
    """
    if prompt_file is not None and prompt:
        raise typer.BadParameter("give a prompt or --prompt-file, not both")
    if prompt_file is not None:
        prompt = _decoded(prompt_file.read_bytes(), str(prompt_file))
    elif prompt == "-" or not (prompt or sys.stdin.isatty()):
        prompt = _decoded(sys.stdin.buffer.read(), "stdin")
    if not prompt.strip():
        raise typer.BadParameter("give a prompt, - for stdin, or --prompt-file")
    return prompt


def _decoded(text: bytes, source: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{source} is not UTF-8 text: {error}") from None
