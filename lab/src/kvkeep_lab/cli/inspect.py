"""`kvkeep inspect`: which tokens of a prompt a cache keeps."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.text import Text

from kvkeep.cli import output
from kvkeep.cli.generate import Prompt, PromptFile, given_prompt
from kvkeep.cli.options import ModelOptions, cache_option, with_options
from kvkeep.cli.progress import Working
from kvkeep.options import option
from kvkeep_lab.cli.plot import HtmlFile, PlotFile, plot_kept

BARS, ASCII_BARS = " ▁▂▃▄▅▆▇█", " .:-=+*#@"
DOTTED = "dots are tokens that fewer than half of the heads keep"
_HALF = 0.5
_WIDTH = 64  # characters of a bar at most


@dataclass(frozen=True)
class Inspect(ModelOptions):
    """Options of `kvkeep inspect`."""

    prompt: Prompt = ""
    cache: str = cache_option("h2o:256")
    prompt_file: PromptFile = None
    context: int | None = option(None, "Feed this many tokens of a built-in text instead.", min=1)
    chunk: int | None = option(None, "Feed the prompt in chunks of this many tokens.", min=1)
    layer: int | None = option(None, "Show this layer of the model only.", min=0)
    head: int | None = option(None, "Show this kv head only.", min=0)


@with_options(Inspect)
def inspect(
    asked: Inspect, plot: PlotFile = None, html: HtmlFile = None, json: output.JsonFlag = False
) -> None:
    """Show which tokens of a prompt a cache keeps, per layer and kv head.

    The prompt is fed without a chat template.
    """
    from kvkeep.spec import parse_specs

    spec = parse_specs(asked.cache)
    if asked.context is not None and (asked.prompt or asked.prompt_file):
        raise typer.BadParameter("give a prompt or --context, not both")
    text = "" if asked.context is not None else given_prompt(asked.prompt, asked.prompt_file)
    with Working("starting") as working:
        from kvkeep.generate import TokenTexts
        from kvkeep_lab.evals.kept_positions import fed, kept, prompt_ids, shares
        from kvkeep_lab.page.inspection import Frames, inspection

        loaded, tokenizer = asked.load(working)
        ids = prompt_ids(loaded, tokenizer, text, asked.context)
        words = TokenTexts(tokenizer).push(ids[0].tolist())
        frames = Frames(words, asked.chunk)
        watched = {} if html is None else {"after": frames}
        filled = fed(loaded, ids, spec, asked.chunk, on_start=working.reading, **watched)
        layers = dict(zip(filled.places, kept(filled), strict=True))
    tokens, name = ids.shape[1], asked.title
    chosen = _chosen(layers, asked.layer, asked.head)
    lines = _lines(chosen)
    title = f"{spec} of {tokens:,} tokens, {name}"
    if plot is not None:
        plot_kept(title, lines, tokens, plot)
    if html is not None:
        from kvkeep_lab.page.document import write

        facts = {"model": name, "cache": str(spec), "tokens": f"{tokens:,}"}
        facts["dtype"] = str(loaded.dtype).removeprefix("torch.")
        if asked.chunk is not None:
            facts["chunk"] = f"{asked.chunk:,}"
        write(html, inspection(title, facts, frames.pictures))
    if json:
        about = {"model": asked.named, "adapter": asked.adapter, "cache": str(spec)}
        found = {"tokens": tokens, "places": list(layers), "layers": list(layers.values())}
        output.print_json({**about, **found, "ids": ids[0].tolist()})
        return
    each = [positions for heads in chosen.values() for positions in heads.values()]
    _print(words, shares(each, tokens), title, lines)


def _print(
    words: Sequence[str], shares: Sequence[float], title: str, lines: Mapping[str, list[int]]
) -> None:
    """Print the text, brighter where more heads keep a token, or with dots in place of the tokens
    that fewer than half keep; and for each head a bar that shows how many it keeps along it."""
    console, text = Console(), Text()
    coloured = console.color_system is not None and not console.no_color
    dot, bars = (".", ASCII_BARS) if console.options.ascii_only else ("·", BARS)
    for word, share in zip(words, shares, strict=True):
        light = int(70 + 185 * share)
        if coloured:
            text.append(word, style=f"rgb({light},{light},{int(70 + 60 * share)})")
        else:
            text.append(word if share >= _HALF else re.sub(r"\S", dot, word))
    means = "the brighter a token, the more heads keep it" if coloured else DOTTED
    console.print(text)
    console.print(f"\n{title}: {means}\n", style="bold", highlight=False, markup=False)
    width = min(_WIDTH, len(words), max(8, console.width - 34))
    console.print(f"{'':>20} kept  0{len(words) - 1:>{width - 1}}", highlight=False)
    for name, positions in lines.items():
        line = f"{name:>20} {len(positions):>4}  {bar(positions, len(words), width, bars)}"
        console.print(line, highlight=False, markup=False)


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


def bar(positions: Sequence[int], tokens: int, width: int, bars: str = BARS) -> str:
    """`width` characters for `tokens` positions; a taller one means that more are kept there."""
    cells = [position * width // tokens for position in range(tokens)]
    sizes, counts = Counter(cells), Counter(cells[position] for position in positions)
    return "".join(bars[-(-(len(bars) - 1) * counts[x] // sizes[x])] for x in range(width))
