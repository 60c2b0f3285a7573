"""`kvkeep chat`: a conversation in the terminal that can be resumed."""

from __future__ import annotations

import difflib
import json as json_module
import sys
from dataclasses import dataclass, replace
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvkeep.cli.compile import compile_if_it_pays
from kvkeep.cli.complete import sessions as completed
from kvkeep.cli.errors import Group, print_error
from kvkeep.cli.generate import require_utf8
from kvkeep.cli.options import AnswerOptions, cache_option, with_options
from kvkeep.cli.output import JsonFlag, examples, print_json, print_table, say, titled
from kvkeep.cli.progress import Working
from kvkeep.options import option

if TYPE_CHECKING:
    from kvkeep.generate import Answer
    from kvkeep.hf.session import Session

HELP = """\
/undo        remove the last turn
/fork NAME   continue under another name; this session does not change
/save        save now (a session with a name is saved after every answer)
/stats       show the cache's size
/exit        quit; the end of input quits too
/help        show this list"""
COMMANDS = [line.split()[0] for line in HELP.splitlines()]


@dataclass(frozen=True)
class Chat(AnswerOptions):
    """Options of `kvkeep chat`."""

    session: str | None = option(
        None,
        "Save the conversation under this name, or continue the saved one.",
        complete="sessions",
    )
    cache: str | None = cache_option(None)
    system: str | None = option(None, "A system message for the start.")
    max_new_tokens: int = option(512, "Most tokens of an answer.", min=1)
    reread: bool = option(False, "Recompute the conversation's cache with this model.", flag=True)


@with_options(Chat)
def chat(asked: Chat) -> None:
    """Chat with a model. A named session continues from its saved cache without a new prefill."""
    with Working("starting") as working:
        from kvkeep.hf.session import ModelNames, Session, has_spec, info, path_of
        from kvkeep.spec import parse_specs

        session, known = asked.session, None
        given = None if asked.cache is None else str(parse_specs(asked.cache))
        if session is not None and path_of(session).exists():
            known = info(session)
        if known is not None and given is not None and not has_spec(known, given):
            raise typer.BadParameter(
                f"session {session} has the cache {known.spec}, not {given}; leave out --cache "
                "or use another name"
            )
        if known is not None and asked.model is None and asked.adapter is None:
            asked = replace(asked, model=known.model or None, adapter=known.adapter or None)
        loaded, tokenizer = asked.load(working)
        compile_if_it_pays(loaded, asked.compile, asked.max_new_tokens, working)
        working("opening the session")
        talk = Session(
            loaded,
            tokenizer,
            cache=given or "keep_all",
            name=session,
            names=ModelNames(asked.named or "", asked.adapter or ""),
            system=asked.system,
            reread=asked.reread,
            compile=asked.compile,
        )
    try:
        _converse(talk, **asked.some("max_new_tokens", "temperature", "top_p"))
    finally:
        talk.close()


def _converse(talk: Session, **options: Any) -> None:
    from kvkeep.errors import KVKeepError
    from kvkeep.hf.compile_ahead import note_tokens

    for message in talk.messages:
        if message["role"] != "system":
            sign = "> " if message["role"] == "user" else ""
            typer.echo(f"{sign}{message['content']}\n")
    say(f"{_status(talk)}; /help lists commands\n", err=True)
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # require_utf8 reports the lines at fault
    while sys.stdin is not None:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            typer.echo(err=True)
            return
        try:
            require_utf8(text, "the message")
            if text.split(" ")[0] == "/exit":
                return
            if text.startswith("/"):
                _command(talk, text)
            elif text:
                result = _answered(talk, text, **options)
                typer.echo("\n")
                if talk.name is not None:
                    talk.save()
                note_tokens(talk.model, len(result.tokens))
                say(
                    f"{_status(talk)}, {result.tokens_per_s:.1f} tokens/s, first token after "
                    f"{result.ttft_s:.2f} s",
                    err=True,
                )
        except KeyboardInterrupt:
            typer.echo("\ninterrupted; the turn was removed", err=True)
        except (KVKeepError, typer.BadParameter) as error:
            print_error(str(error))


def _answered(talk: Session, text: str, **options: Any) -> Answer:
    """Ask, and show the answer while it is generated."""
    with Working("reading") as working:

        def show(piece: str) -> None:
            working.stop()
            typer.echo(piece, nl=False)

        reading = working.reading if working.live else lambda cache, tokens: None
        return talk.ask(text, on_text=show, on_start=reading, **options)


def _command(talk: Session, text: str) -> None:
    word, _, argument = text.partition(" ")
    argument = argument.strip()
    if word == "/undo":
        typer.echo(f"removed: {talk.undo()['content']}", err=True)
        if talk.name is not None:
            talk.save()
    elif word == "/fork":
        talk.fork(argument)
        typer.echo(f"now in session {talk.name}", err=True)
    elif word == "/save":
        talk.save()
        typer.echo(f"saved session {talk.name}", err=True)
    elif word == "/stats":
        stats = talk.cache.stats()
        fed = stats.seen[0] if stats.seen else 0
        say(
            f"{talk.spec}: {stats.length} of {fed} tokens kept, {stats.kept:.0%} of their slots, "
            f"{stats.live_bytes / 2**20:.1f} MiB in use, {stats.nbytes / 2**20:.1f} allocated",
            err=True,
        )
    elif word == "/help":
        typer.echo(HELP, err=True)
    else:
        close = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]}?" if close else "; /help lists commands"
        typer.echo(f"no command {word}{hint}", err=True)


def _status(talk: Session) -> str:
    used, most = talk.context
    name = "not saved" if talk.name is None else f"session {talk.name}"
    return f"[{name}, context {used}{'' if most is None else f'/{most}'}]"


sessions = typer.Typer(
    cls=Group,
    name="sessions",
    help="List, export and delete sessions.",
    invoke_without_command=True,
    epilog=examples("kvkeep sessions"),
)


@sessions.callback()
def listing(context: typer.Context, json: JsonFlag = False) -> None:
    """List, export and delete sessions."""
    if context.invoked_subcommand is not None:
        return
    with Working("reading the sessions"):
        from kvkeep.hf.session import sessions as kept

        found = kept()
    rows = [
        {
            "session": one.name,
            "model": titled(one.model, one.adapter),
            "turns": sum(message["role"] == "user" for message in one.messages),
            "tokens": one.tokens,
            "MiB": one.bytes / 2**20,
            "keeps": one.spec,
        }
        for one in found
    ]
    if json:
        print_json({"sessions": rows})
    elif rows:
        print_table("sessions", rows)
    else:
        typer.echo("no sessions yet; `kvkeep chat --session NAME` starts one")


SessionName = Annotated[str, typer.Argument(help="The session.", autocompletion=completed)]


@sessions.command(epilog=examples("kvkeep sessions export work > work.md"))
def export(name: SessionName, json: JsonFlag = False) -> None:
    """Print a conversation as Markdown, or its messages as JSON."""
    from kvkeep.hf.session import info

    messages = info(name).messages
    if json:
        typer.echo(json_module.dumps(messages))
        return
    for message in messages:
        typer.echo(f"**{message['role']}**\n\n{message['content']}\n")


@sessions.command(epilog=examples("kvkeep sessions delete work"))
def delete(name: SessionName) -> None:
    """Delete a session."""
    from kvkeep.hf.session import delete as remove

    remove(name)
    typer.echo(f"deleted session {name}")


__all__ = ["chat", "sessions"]
