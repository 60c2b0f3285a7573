"""`kvkeep generate`: stream an answer to stdout, and print speed and memory on stderr."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.compile import compile_if_it_pays
from kvkeep.cli.options import AnswerOptions, cache_option, with_options
from kvkeep.cli.output import JsonFlag, print_json, say
from kvkeep.cli.progress import Working
from kvkeep.options import option

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


@dataclass(frozen=True)
class Generate(AnswerOptions):
    """Options of `kvkeep generate`."""

    prompt: Prompt = ""
    cache: str = cache_option("keep_all")
    max_new_tokens: int = option(256, "Most tokens to generate.", min=1)
    prompt_file: PromptFile = None
    system: str | None = option(None, "A system message.")
    raw: bool = option(False, "Apply no chat template.", flag=True)
    seed: int | None = option(None, "Seed for sampling.")
    prefill_chunk: int | None = option(
        None,
        "Feed the prompt in chunks of this many tokens; default: 1,024 if the cache has a budget, "
        "otherwise the whole prompt at once.",
        min=1,
    )
    keep_until: str | None = option(
        None,
        "Never evict the prompt up to this text, such as the end of its instructions.",
        metavar="TEXT",
    )


@with_options(Generate)
def generate(asked: Generate, json: JsonFlag = False) -> None:
    """Answer a prompt with a kvkeep cache.

    The answer is streamed to stdout; everything else goes to stderr.
    """
    from kvkeep.spec import parse_specs

    spec = parse_specs(asked.cache)
    for value, name in ((asked.system, "--system"), (asked.keep_until, "--keep-until")):
        require_utf8(value or "", name)
    text = given_prompt(asked.prompt, asked.prompt_file)
    with Working("starting") as working:
        from kvkeep.hf.compile_ahead import note_tokens
        from kvkeep.hf.generate import Question
        from kvkeep.hf.generate import generate as run

        loaded, tokenizer = asked.load(working)
        compile_if_it_pays(loaded, asked.compile, asked.max_new_tokens, working)
        question = Question(text, asked.system, asked.raw, asked.keep_until)
        shown, pieces = False, 0

        def show(piece: str) -> None:
            nonlocal shown, pieces
            pieces += 1  # about one per token
            if json:
                working("answering", min(1.0, pieces / asked.max_new_tokens))
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
                **asked.some("max_new_tokens", "temperature", "top_p", "seed"),
                **asked.some("prefill_chunk", "compile"),
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
                "model": asked.named,
                "adapter": asked.adapter,
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
