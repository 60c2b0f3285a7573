"""`kvkeep inspect`: which tokens of a prompt a cache keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvkeep.cli.generate import Prompt, PromptFile, given_prompt
from kvkeep.cli.output import (
    AdapterName,
    CacheSpec,
    JsonFlag,
    ModelDtype,
    ModelName,
    model_for,
    print_json,
    titled,
)
from kvkeep.cli.progress import Working
from kvkeep_lab.cli.html import HtmlFile, check_html
from kvkeep_lab.cli.plot import PlotFile, plot_kept

BARS, ASCII_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
DOTTED = "dots are tokens that fewer than half of the heads keep"
_HALF = 0.5
_WIDTH = 64  # characters of a bar at most


def inspect(
    prompt: Prompt = "",
    model: ModelName = None,
    adapter: AdapterName = None,
    cache: CacheSpec = "h2o:256",
    prompt_file: PromptFile = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="Feed this many tokens of a built-in text instead.")
    ] = None,
    chunk: Annotated[
        int | None, typer.Option(min=1, help="Feed the prompt in chunks of this many tokens.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(min=0, help="Show this layer of the model only.")
    ] = None,
    head: Annotated[int | None, typer.Option(min=0, help="Show this kv head only.")] = None,
    dtype: ModelDtype = "auto",
    plot: PlotFile = None,
    html: HtmlFile = None,
    json: JsonFlag = False,
) -> None:
    """Show which tokens of a prompt a cache keeps, per layer and kv head.

    The prompt is fed without a chat template.
    """
    check_html(html)
    model = model_for(model, adapter)
    from kvkeep.spec import parse_specs

    spec = parse_specs(cache)
    if context is not None and (prompt or prompt_file):
        raise typer.BadParameter("give a prompt or --context, not both")
    text = "" if context is not None else given_prompt(prompt, prompt_file)
    with Working("starting") as working:
        from kvkeep.generate import TokenTexts
        from kvkeep.hf.models import load
        from kvkeep_lab.evals.kept_positions import fed, kept, prompt_ids, shares
        from kvkeep_lab.page.inspection import Frames

        loaded, tokenizer = load(model, dtype, progress=working, adapter=adapter)
        ids = prompt_ids(loaded, tokenizer, text, context)
        words = TokenTexts(tokenizer).push(ids[0].tolist())
        frames = None if html is None else Frames(words, chunk)
        filled = fed(loaded, ids, spec, chunk, frames, working.reading)
        layers = dict(zip(filled.places, kept(filled), strict=True))
    tokens = ids.shape[1]
    chosen = _chosen(layers, layer, head)
    lines = _lines(chosen)
    title = f"{spec} of {tokens:,} tokens, {titled(model, adapter)}"
    if plot is not None:
        plot_kept(title, lines, tokens, plot)
    if html is not None and frames is not None:
        from kvkeep_lab.page.document import write
        from kvkeep_lab.page.inspection import inspection

        facts = {"model": titled(model, adapter), "cache": str(spec), "tokens": f"{tokens:,}"}
        facts["dtype"] = str(loaded.dtype).removeprefix("torch.")
        if chunk is not None:
            facts["chunk"] = f"{chunk:,}"
        write(html, inspection(title, facts, frames.pictures))
    if json:
        asked = {"model": model, "adapter": adapter, "cache": str(spec)}
        found = {"places": list(layers), "layers": list(layers.values())}
        print_json({**asked, "tokens": tokens, **found, "ids": ids[0].tolist()})
        return
    console = Console()
    each = [positions for heads in chosen.values() for positions in heads.values()]
    coloured = console.color_system is not None and not console.no_color
    plain = partial(_dotted, dot=".") if console.options.ascii_only else _dotted
    show = _shaded if coloured else plain
    means = "the brighter a token, the more heads keep it" if coloured else DOTTED
    console.print(show(words, shares(each, tokens)))
    console.print(f"\n{title}: {means}\n", style="bold", highlight=False, markup=False)
    _print_bars(console, lines, tokens)


def _chosen(
    layers: Mapping[int, Sequence[list[int]]], layer: int | None, head: int | None
) -> dict[int, dict[int, list[int]]]:
    """Kept positions by layer and head, of the layer and the head that are asked for.

    Raises:
        BadParameter: no layer with attention has this index, or no head of it.
    """
    if layer is not None and layer not in layers:
        raise _no_such("layer", layer, "layers that attend", list(layers))
    some = {place: each for place, each in layers.items() if layer in (None, place)}
    most = max(map(len, some.values()))
    if head is not None and head >= most:
        raise _no_such("head", head, "kv heads", range(most))
    return {
        place: {index: one for index, one in enumerate(each) if head in (None, index)}
        for place, each in some.items()
        if head is None or head < len(each)
    }


def _no_such(what: str, given: int, of: str, known: Sequence[int]) -> typer.BadParameter:
    joined = known[-1] - known[0] + 1 == len(known)
    some = f"{known[0]}..{known[-1]}" if joined else ", ".join(map(str, known))
    return typer.BadParameter(f"--{what} {given}: the model has {len(known)} {of}; give {some}")


def _lines(chosen: Mapping[int, Mapping[int, list[int]]]) -> dict[str, list[int]]:
    """Kept positions by the names of layers and heads; one line if several heads of a layer keep
    the same."""
    lines = {}
    for place, heads in chosen.items():
        first, *others = heads.values()
        if others and all(one == first for one in others):
            lines[f"layer {place} all heads"] = first
        else:
            lines |= {f"layer {place} head {head}": one for head, one in heads.items()}
    return lines


def _shaded(tokens: Sequence[str], shares: Sequence[float]) -> Text:
    """The text, with brighter tokens for larger shares."""
    text = Text()
    for token, share in zip(tokens, shares, strict=True):
        light = int(70 + 185 * share)
        text.append(token, style=f"rgb({light},{light},{int(70 + 60 * share)})")
    return text


def _dotted(tokens: Sequence[str], shares: Sequence[float], dot: str = "·") -> Text:
    """The text, with dots in place of the tokens that fewer than half of the heads keep."""
    text = Text()
    for token, share in zip(tokens, shares, strict=True):
        text.append(token if share >= _HALF else re.sub(r"\S", dot, token))
    return text


def _print_bars(console: Console, lines: dict[str, list[int]], tokens: int) -> None:
    """Print a bar for each head that shows how many tokens are kept along the prompt."""
    bars = ASCII_BARS if console.options.ascii_only else BARS
    width = min(_WIDTH, tokens, max(8, console.width - 34))
    console.print(f"{'':>20} kept  0{tokens - 1:>{width - 1}}", highlight=False)
    for name, positions in lines.items():
        console.print(
            f"{name:>20} {len(positions):>4}  {bar(positions, tokens, width, bars)}",
            highlight=False,
            markup=False,
        )


def bar(positions: Sequence[int], tokens: int, width: int, bars: str = BARS) -> str:
    """`width` characters for `tokens` positions; a taller one means that more are kept there."""
    counts, sizes = [0] * width, [0] * width
    for position in range(tokens):
        sizes[position * width // tokens] += 1
    for position in positions:
        counts[position * width // tokens] += 1
    most = len(bars) - 1
    return "".join(
        bars[-(-most * count // size)] for count, size in zip(counts, sizes, strict=True)
    )
