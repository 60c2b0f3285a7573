"""`kvkeep generate`: stream an answer to stdout, and print speed and memory on stderr."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.compile import Compile, compile_if_it_pays
from kvkeep.cli.output import (
    AdapterName,
    CacheSpec,
    DeviceName,
    JsonFlag,
    ModelDtype,
    ModelName,
    ModelWeights,
    Temperature,
    TopP,
    model_for,
    print_json,
    say,
)
from kvkeep.cli.progress import Working

Prompt = Annotated[
    str,
    typer.Argument(
        help="The prompt; - reads it from stdin. Text from a pipe or --prompt-file is appended "
        "after an empty line. In a shell loop that reads stdin, add < /dev/null."
    ),
]
PromptFile = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="Read the prompt from a file.")
]


def generate(
    prompt: Prompt = "",
    model: ModelName = None,
    adapter: AdapterName = None,
    cache: CacheSpec = "keep_all",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 256,
    prompt_file: PromptFile = None,
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
            help="Never evict the prompt up to this text, such as the end of its instructions.",
            show_default=False,
        ),
    ] = None,
    compile: Compile = None,
    dtype: ModelDtype = "auto",
    weights: ModelWeights = None,
    device: DeviceName = None,
    json: JsonFlag = False,
) -> None:
    """Answer a prompt with a kvkeep cache.

    The answer is streamed to stdout; everything else goes to stderr.
    """
    model = model_for(model, adapter)
    from kvkeep.spec import parse_specs

    spec = parse_specs(cache)
    for value, name in ((system, "--system"), (keep_until, "--keep-until")):
        require_utf8(value or "", name)
    text = given_prompt(prompt, prompt_file)
    with Working("starting") as working:
        from kvkeep.hf.compile_ahead import note_tokens
        from kvkeep.hf.generate import Question
        from kvkeep.hf.generate import generate as run
        from kvkeep.hf.models import load

        loaded, tokenizer = load(model, dtype, device, working, adapter=adapter, weights=weights)
        compile_if_it_pays(loaded, compile, max_new_tokens, working)
        question = Question(text, system, raw, keep_until)
        shown, pieces = False, 0

        def show(piece: str) -> None:
            nonlocal shown, pieces
            pieces += 1  # about one per token
            if json:
                working("answering", min(1.0, pieces / max_new_tokens))
            elif piece:
                working.stop()
                typer.echo(piece, nl=False)
                shown = True

        try:
            result = run(
                loaded,
                tokenizer,
                question,
                cache=spec,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_p=top_p,
                seed=seed,
                prefill_chunk=prefill_chunk,
                compile=compile,
                on_text=show,
                on_start=working.reading,
            )
        except KeyboardInterrupt:
            if shown:
                typer.echo()
            raise
        used = str(question.spec(spec, result.prompt, tokenizer))
    held, tokens = result.stats, len(result.tokens)
    assert held is not None  # the answer is complete
    if json:
        print_json(
            {
                "text": result.text,
                "tokens": tokens,
                "tokens_per_s": result.tokens_per_s,
                "ttft_s": result.ttft_s,
                "cache_bytes": held.live_bytes,
                "allocated_bytes": held.nbytes,
                "length": held.length,
                "capacity": held.capacity,
                "prompt_tokens": len(result.prompt),
                "model": model,
                "adapter": adapter,
                "cache": used,
            }
        )
    else:
        typer.echo()
        say(
            f"\n{tokens} tokens, {result.tokens_per_s:.1f} tokens/s, first token after "
            f"{result.ttft_s:.2f} s; cache {held.live_bytes / 2**20:.1f} MiB, "
            f"{held.length}/{held.capacity} slots ({used})",
            err=True,
        )
    note_tokens(loaded, tokens)


def given_prompt(prompt: str, prompt_file: Path | None) -> str:
    """The prompt: the argument, an empty line, and the content of the file or of piped stdin. If
    the argument is "-", only stdin.

    Raises:
        BadParameter: the prompt is empty or not UTF-8, or both "-" and a file are given.
    """
    if prompt == "-" and prompt_file is not None:
        raise typer.BadParameter("give - for stdin or --prompt-file, not both")
    require_utf8(prompt, "the prompt")
    more = ""
    if prompt_file is not None:
        more = _decoded(prompt_file.read_bytes(), str(prompt_file))
    elif sys.stdin is not None and (prompt == "-" or _is_piped()):
        with Working("starting") as working:
            working("reading stdin")
            more = _decoded(sys.stdin.buffer.read(), "stdin")
    parts = [part for part in ("" if prompt == "-" else prompt, more) if part.strip()]
    if not parts:
        raise typer.BadParameter("give a prompt, - for stdin, or --prompt-file")
    return "\n\n".join(parts)


def _is_piped() -> bool:
    """Whether stdin is a pipe or a file, not a terminal or a device such as /dev/null."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError):  # closed, or no file descriptor
        return not sys.stdin.closed and not sys.stdin.isatty()
    return stat.S_ISFIFO(kind) or stat.S_ISREG(kind)


def require_utf8(text: str, source: str) -> None:
    """Check that a text was valid UTF-8; Python decodes invalid bytes to surrogates.

    Raises:
        BadParameter: the text was not valid UTF-8.
    """
    _decoded(text.encode("utf-8", "surrogateescape"), source)


def _decoded(text: bytes, source: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise typer.BadParameter(f"{source} is not UTF-8 text: {error}") from None
