"""`kvkeep bench`: systems side by side."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvkeep.cli.output import JsonFlag, Working, print_json, print_table, reported

bench = typer.Typer(help="Measure kvkeep beside other caches.", no_args_is_help=True)


@bench.command()
def append(
    tokens: Annotated[
        str, typer.Option(help="Tokens held, comma-separated.")
    ] = "256,1024,2048,4096",
    turns: Annotated[int, typer.Option(min=1, help="Turns of ten calls each.")] = 20,
    json: JsonFlag = False,
) -> None:
    """One more token: concatenation against writing in place (f32, B 1, H 8, D 128)."""
    from kvkeep.bench.append import run

    held = _whole_numbers(tokens)
    with Working("append") as working:
        result = run(held, turns=turns, progress=working)
    _show("Append one token; ratios are concat / growing", result, json)


@bench.command()
def memory(
    model: Annotated[str, typer.Option(help="A model; see `kvkeep models`.")] = "smollm2-135m",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens held at the end.")] = 4100,
    prompt: Annotated[int, typer.Option(min=1, help="How many of them are fed at once.")] = 1024,
    json: JsonFlag = False,
) -> None:
    """Resident memory of a cache after a long generation, against transformers' DynamicCache."""
    if prompt >= tokens:
        raise typer.BadParameter(f"--prompt {prompt} must be below --tokens {tokens}")
    with reported(), Working("memory") as working:
        from kvkeep.bench.memory import run

        result = run(model, tokens=tokens, prompt=prompt, progress=working)
    _show(f"Memory of {tokens} tokens, {model}, float32", result, json)


def _show(title: str, result: dict[str, Any], json: bool) -> None:
    print_table(title, result["rows"], stderr=json)
    if json:
        print_json(result)


def _whole_numbers(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r}: give whole numbers above 0, e.g. 256,1024")
    return [int(part) for part in parts]
