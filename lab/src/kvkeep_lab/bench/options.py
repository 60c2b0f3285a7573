"""Options of the benchmarks and of their commands, with defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvkeep.errors import SpecError
from kvkeep.libraries import LIBRARIES
from kvkeep.options import option
from kvkeep_lab.options import names, numbers, spec_list

SPEC = "keep_all"
DYNAMIC, STATIC = "hf-dynamic", "hf-static"
"""transformers' default cache, and its static one under `torch.compile(fullgraph=True)`."""

METHODS = ("kvkeep", "backprop", "checkpointing")
SHORTEST, LONGEST = 200, 1400
"""Tokens of the shortest and the longest prompts."""

_MODEL = "A name from `kvkeep models`, a directory, a GGUF file, or a hub name"


def _model(more: str = "") -> Any:
    return option("smollm2-135m", f"{_MODEL}{more}.", complete="models")


def _model_or_random() -> Any:
    return _model(
        "; or random-1b, with random weights; for `bench serve` random-hybrid, random-latent, "
        "random-shared or random-windowed too"
    )


def _host() -> Any:
    help = f"Library that runs the model: {' or '.join(LIBRARIES)}."
    return option("transformers", help, values=tuple(LIBRARIES))


def _dtype(default: str = "float32") -> Any:
    values = ("bfloat16", "float16", "float32")
    return option(default, "bfloat16, float16 or float32.", values=values)


def _device() -> Any:
    return option(None, "Device, e.g. cpu or cuda; default: CUDA if available.", complete="devices")


def _count(
    default: int | None, help: str = "Rounds of measurement.", least: int = 1, **more: Any
) -> Any:
    return option(default, help, min=least, **more)


@dataclass(frozen=True)
class Benchmark:
    """Options of a benchmark; its docstring is the help of its command."""

    title: ClassVar[str]
    """Of the table, with names of options and of a result's entries in braces."""

    example: ClassVar[str]
    """The arguments of a call."""

    drawn: ClassVar[Sequence[str] | None] = None
    """The columns of --plot; None: all that are measured."""

    seconds: float | None = field(default=None, kw_only=True)
    """Time limit where cases are measured one after the other (append, op, decode): those that have
    not started by then are skipped."""

    def some(self, *names: str) -> dict[str, Any]:
        """The options of these names."""
        return {name: getattr(self, name) for name in names}

    def heading(self, result: Mapping[str, Any]) -> str:
        """The title of a result."""
        return self.title.format_map({**result, **vars(self)})

    def notes(self, result: Mapping[str, Any]) -> str:
        """A line below the table."""
        return ""


@dataclass(frozen=True)
class OfModel(Benchmark):
    """Options of a benchmark of a model, in float32 by default."""

    model: str = _model()
    dtype: str = _dtype()


@dataclass(frozen=True)
class Append(Benchmark):
    """Append one token: concatenation against writing in place (8 heads, width 128).

    CUDA uses bfloat16 and 32 query heads, the CPU float32 and 8.
    """

    title = "Append one token; ratios are concat / growing"
    example = "append --tokens 256,4096"
    tokens: Sequence[int] | None = numbers(
        None, "Tokens held, comma-separated; default: 256 to 4096, on CUDA 512 to 131072."
    )
    device: str | None = _device()
    batches: Sequence[int] | None = numbers(
        None, "Batch sizes, comma-separated; default: 1, on CUDA 1,8,32."
    )
    layouts: Sequence[str] | None = names(
        None, "Of concat, growing and fixed, comma-separated; default: the first two, on CUDA all."
    )
    turns: int = _count(20, "Rounds of ten calls each.")


@dataclass(frozen=True)
class Memory(OfModel):
    """Resident memory of caches after a prompt and a long generation.

    It is compared with the live bytes in them and with transformers' DynamicCache. The prompt is
    fed at once and in chunks.
    """

    title = "Memory after {tokens} tokens, {model}, {dtype}"
    example = 'memory --specs "keep_all;h2o:512;hf-dynamic"'
    specs: Sequence[str] = option(
        ("keep_all", "h2o:512", "h2o:512+int4", "adakv(h2o:512)", "window:512", DYNAMIC),
        "Cache specs, separated by semicolons, or hf-dynamic; default: exact caches, budgets and "
        "codecs.",
        separator=";",
        show_default=False,
    )
    tokens: int = _count(2100, "Total tokens fed.", 2)
    prompt: int = _count(1000, "Tokens of the prompt among them.", 2)
    chunk: int = _count(500, "Tokens of each chunk of the prompt, in the chunked runs.")

    def __post_init__(self) -> None:
        if self.prompt >= self.tokens:
            raise SpecError(f"--prompt {self.prompt} must be below --tokens {self.tokens}")
        if self.chunk >= self.prompt:
            raise SpecError(f"--chunk {self.chunk} must be below --prompt {self.prompt}")


@dataclass(frozen=True)
class Op(Benchmark):
    """The attention operation alone, on every backend and in other libraries."""

    title = (
        "Attention of {shape[n]} x {shape[Hq]}/{kv_heads} heads, width {head_dim}, {dtype}; {speed}"
    )
    example = "op --lengths 2048,32768 --codecs plain,int8"
    device: str | None = _device()
    dtype: str = _dtype("bfloat16")
    rows: int | None = _count(None, "Batch size; default: 1, on CUDA 8.")
    heads: Sequence[int] = numbers((32,), "Numbers of query heads, comma-separated.")
    kv_heads: int = _count(8, "Key-value heads.")
    head_dim: int = _count(128, "Width of a head.")
    latent: int | None = _count(
        None,
        "Values are this many first elements of their keys, as in latent attention: --heads 128 "
        "--kv-heads 1 --head-dim 576 --latent 512 is a layer of DeepSeek V3.",
    )
    queries: Sequence[int] = numbers((1,), "New tokens of a call, comma-separated.")
    lengths: Sequence[int] | None = numbers(
        None, "Tokens held, comma-separated; default: 256 to 32768, on CUDA 2048 to 131072."
    )
    codecs: Sequence[str] | None = names(
        None,
        "Codecs, each for both or as keys/values, comma-separated; default: plain, on CUDA also "
        "int8, int4 and fp8.",
    )
    mass: bool | None = option(None, "Compute the attention mass too; default: no, on CUDA both.")
    against: Sequence[str] | None = names(
        None,
        "Of torch-sdpa, torch-folded, torch-expanded, torch-math and flex, comma-separated; "
        "default: the first three, on CUDA all; with --latent torch-folded and torch-math.",
    )
    turns: int = _count(10)

    def __post_init__(self) -> None:
        for heads in self.heads:
            if heads % self.kv_heads:
                raise SpecError(f"--heads {heads} must be a multiple of --kv-heads {self.kv_heads}")
        if self.latent is not None and self.latent >= self.head_dim:
            raise SpecError(
                f"--latent {self.latent} must be below --head-dim {self.head_dim}, of which it is "
                "a part"
            )

    def heading(self, result: Mapping[str, Any]) -> str:
        """See `Benchmark`."""
        reads = result.get("read_gb_per_s")
        does = f"reads at {reads:.0f}" if reads else f"copies at {result['copy_gb_per_s']:.0f}"
        multiplies = f"matrices multiply at {result['product_gflop_per_s']:.0f} GFLOP/s"
        speed = f"memory {does} GB/s, {multiplies}"
        return super().heading({**result, "speed": speed})


@dataclass(frozen=True)
class Linear(Benchmark):
    """Linear layers on the CPU, as in an attached model and by torch."""

    title = "Linear layers, {dtype}; memory reads at {read_gb_per_s:.0f} GB/s"
    example = "linear --shapes 576x1536,1536x576"
    shapes: Sequence[str] | None = names(
        None,
        "Layers as INPUTSxOUTPUTS, comma-separated; default: the layers of SmolLM2-135M and of "
        "Llama 3.2 1B.",
    )
    rows: Sequence[int] | None = numbers(
        None, "Numbers of rows, comma-separated; default: 1,2,4,8,16,32."
    )
    dtype: str = _dtype("bfloat16")
    turns: int = _count(10)


@dataclass(frozen=True)
class Decode(Benchmark):
    """Decode steps of a whole model at several contexts, and their time per token held."""

    title = "One decode step of {model}, {dtype}"
    example = "decode --model random-1b --contexts 2048,8192"
    model: str = _model_or_random()
    host: str = _host()
    device: str | None = _device()
    dtype: str = _dtype("bfloat16")
    weights: str | None = option(
        None,
        "Quantise the weights of linear layers, on the CPU: int8 or int4; default: no.",
        values=("int8", "int4"),
    )
    contexts: Sequence[int] | None = numbers(
        None,
        "Tokens fed, comma-separated; default: 128,2048,7936, for a random model 2048 to 131072.",
    )
    specs: Sequence[str] = spec_list((SPEC,))
    ways: Sequence[str] | None = names(
        None,
        "How kvkeep's steps run, comma-separated: default (as attach() makes them), eager "
        "(without kvkeep's linear layers), compile (in a compiled graph), graph (a CUDA graph), "
        "compiled (in a CUDA graph too); default: default and compile, on CUDA default, graph and "
        "compiled.",
    )
    against: Sequence[str] | None = names(
        None,
        "Of hf-dynamic, hf-static (compiled) and llama.cpp, comma-separated; default: the first, "
        "on CUDA the first two. With --host litgpt: litgpt, its own cache.",
    )
    turns: int = _count(10, "Rounds of four steps each.")
    beside: Sequence[int] | None = numbers(
        None,
        "Generate beside these numbers of busy processes instead, e.g. 0,1,2: with one thread, "
        "all, and those that kvkeep chooses. --ways also takes batch.",
        0,
    )
    burst: int = 4
    """Steps of each round."""

    def __post_init__(self) -> None:
        if self.beside is not None and self.weights is not None:
            raise SpecError("--weights and --beside exclude each other; give one")

    def heading(self, result: Mapping[str, Any]) -> str:
        """See `Benchmark`."""
        if self.beside is None:
            return super().heading(result)
        return f"Generating with {self.model}, {self.dtype}, beside others"

    def notes(self, result: Mapping[str, Any]) -> str:
        """See `Benchmark`."""
        slopes = result.get("slope_us_per_token", {}).items()
        cost = ", ".join(f"{name} {slope:.2f}" for name, slope in slopes if slope is not None)
        if not cost:
            return ""
        floor = f"{result['bandwidth_floor_us_per_token']:.2f} to read the token's slots once"
        return f"microseconds per token held: {cost}; {floor}"


@dataclass(frozen=True)
class Prefill(OfModel):
    """A whole prompt in one forward, compared with transformers and sdpa."""

    title = "Prefill of {model}, {dtype}"
    example = "prefill --lengths 2000,7900 --json > prefill.json"
    lengths: Sequence[int] = numbers((2000, 7900), "Prompt lengths, comma-separated.")
    turns: int = _count(3)


@dataclass(frozen=True)
class Save(OfModel):
    """Saving a cache compared with copying its file, and loading it compared with a prefill."""

    title = "The cache of {tokens} tokens, {model}, {dtype}"
    example = 'save --specs "keep_all;keep_all+int8"'
    tokens: int = _count(7900, "Tokens of the prompt.")
    specs: Sequence[str] = spec_list((SPEC, "keep_all+int8"))
    directory: Path | None = option(None, "Directory for the files.", exists=True, file_okay=False)
    turns: int = _count(5)


@dataclass(frozen=True)
class Fork(OfModel):
    """Forks of one prompt: their memory, and a step of a batch with and without sharing."""

    title = "A batch that continues {tokens} tokens, {model}, {dtype}"
    example = "fork --tokens 4000 --forks 100"
    tokens: int = _count(4000, "Tokens of the prompt they share.")
    forks: int = _count(100, "Caches that share it.")
    new: int = _count(32, "Tokens of each fork's own.")
    rows: int = _count(16, "Continuations in one batch.", 2)
    turns: int = _count(5)

    def notes(self, result: Mapping[str, Any]) -> str:
        """See `Benchmark`."""
        held, ratio = result["forks"]["bytes"] / 2**20, result["forks"]["ratio"]
        return (
            f"{self.forks} forks of {self.new} tokens: {held:.0f} MiB, {ratio:.2f} times one "
            "cache and the new tokens"
        )


@dataclass(frozen=True)
class Reuse(OfModel):
    """Reuse of stored documents: time to the first token, and the loss of quality."""

    model: str = _model("; or random-windowed, with random weights and sliding windows of 512")
    title = "{documents} documents and a question, {tokens} tokens, {model}, {dtype}"
    example = "reuse --documents 6 --turns 3"
    documents: int = _count(6, "Documents before the question.", 2)
    shortest: int = _count(500, "Tokens of the shortest, at least.")
    longest: int = _count(1000, "Tokens of the longest, at most.")
    answer: int = _count(64, "Tokens over which quality is measured.")
    turns: int = _count(3, "Orders of the documents.")
    redis: str | None = option(None, "URL of a Redis server; default: one is started.")

    def __post_init__(self) -> None:
        _require_order(self.shortest, self.longest)

    def notes(self, result: Mapping[str, Any]) -> str:
        """See `Benchmark`."""
        found = {row["mode"] for row in result["rows"]}
        notes = []
        if "redis" not in found:
            notes.append("redis-server is not installed, so the redis mode is left out")
        if "blocks:0.15" not in found:
            notes.append("layers have a sliding window, so no blocks are recomputed in part")
        return "; ".join(notes)


@dataclass(frozen=True)
class Train(Benchmark):
    """One gradient of a long text's loss, compared with backprop and gradient checkpointing.

    It is the gradient with respect to all weights.
    """

    title = "One gradient of {model}, float32, {cache}"
    example = "train --tokens 2048,4096 --cache h2o:1024"
    drawn = ("peak_bytes", "seconds")
    model: str = _model()
    host: str = _host()
    tokens: Sequence[int] = numbers((2048, 4096, 8192), "Lengths of the text, comma-separated.", 2)
    cache: str = option("h2o:1024", "kvkeep's cache spec.", complete="specs")
    chunk: int = _count(1024, "Tokens in each of kvkeep's chunks.")
    methods: Sequence[str] = names(METHODS, "Methods, comma-separated.", values=METHODS)
    check: bool = option(True, "Compare kvkeep's gradients with plain autograd's.")
    processes: Sequence[int] = numbers(
        (1,), "Numbers of processes that share kvkeep's text, comma-separated."
    )
    memory: int | None = None
    """Bytes that a gradient may take; None: the available memory minus one GiB."""

    def __post_init__(self) -> None:
        if not self.methods:
            raise SpecError("--methods is empty; give at least one, e.g. kvkeep")


_SERVED: dict[str, Any] = {
    **{"sequences": (1, 4, 16, 64), "arrivals": ("at once", "poisson"), "repeats": 3},
    **{"shortest": SHORTEST, "longest": LONGEST, "new_tokens": 64},
}
_SERVED_BRIEFLY: dict[str, Any] = {
    **{"sequences": (1, 16), "arrivals": ("at once",), "repeats": 1},
    **{"shortest": 32, "longest": 160, "new_tokens": 128},
}
"""Defaults for models that show how a batch computes layers of one kind, in minutes."""


@dataclass(frozen=True)
class Serve(Benchmark):
    """Many sequences at once: throughput, delays and memory.

    random-hybrid, random-latent, random-shared and random-windowed are measured briefly by default:
    1 and 16 prompts of 32 to 160 tokens at once, with 128 new tokens each, beside kvkeep alone.
    """

    example = "serve --sequences 1,16 --http"
    model: str = _model_or_random()
    device: str | None = _device()
    dtype: str = _dtype("bfloat16")
    sequences: Sequence[int] = numbers(
        None,
        "Numbers of sequences, comma-separated; default: 1,4,16,64, or 1,16.",
    )
    specs: Sequence[str] = spec_list((SPEC,))
    against: Sequence[str] | None = names(
        None,
        "Of kvkeep alone (one after the other), kvkeep compiled, transformers padded, transformers "
        "generate_batch (its continuous batching), llama.cpp, and llama.cpp unified (one buffer), "
        "comma-separated; default: all but llama.cpp, and none in other measurements.",
    )
    http: bool = option(False, "Measure `kvkeep serve` too, through HTTP streams.", flag=True)
    new_tokens: int = _count(None, "Tokens of each answer; default: 64, or 128.")
    arrivals: Sequence[str] = names(
        None,
        "How prompts arrive, comma-separated; default: at once,poisson, or at once.",
    )
    rate: float | None = option(
        None,
        "Prompts per second that arrive in poisson; default: as many as kvkeep completes per "
        "second when they come at once.",
        min=1e-3,
    )
    shortest: int = _count(None, f"Tokens of the shortest prompt; default: {SHORTEST}, or 32.")
    longest: int = _count(None, f"Tokens of the longest prompt; default: {LONGEST}, or 160.")
    shared_prefix: int = _count(0, "Tokens before them with which all prompts begin.", 0)
    interrupt: int | None = _count(
        None, "Measure how long a prompt of this many tokens delays the other sequences."
    )
    cpu_time: bool = option(False, "Measure the processor time of one thread per step.", flag=True)
    repeats: int = _count(None, "Rounds of measurement; default: 3, or 1.")

    def __post_init__(self) -> None:
        brief = self.model in ("random-hybrid", "random-latent", "random-shared", "random-windowed")
        for name, default in (_SERVED_BRIEFLY if brief else _SERVED).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if brief and self.against is None and not (self.cpu_time or self.interrupt):
            object.__setattr__(self, "against", ("kvkeep alone",))
        _require_order(self.shortest, self.longest)
        if self.cpu_time and self.interrupt is not None:
            raise SpecError("--cpu-time and --interrupt exclude each other; give one")

    def heading(self, result: Mapping[str, Any]) -> str:
        """See `Benchmark`."""
        what = f"Answers of {self.new_tokens} tokens"
        if self.cpu_time:
            what = "Processor time of one step, one thread"
        elif self.interrupt is not None:
            what = f"Beside a prompt of {self.interrupt} tokens"
        return f"{what}, {self.model}, {self.dtype}"


def _require_order(shortest: int, longest: int) -> None:
    if shortest > longest:
        raise SpecError(f"--shortest {shortest} must be at most --longest {longest}")


BENCHMARKS: dict[str, type[Benchmark]] = {
    kind.__name__.lower(): kind
    for kind in (Append, Memory, Op, Linear, Decode, Prefill, Save, Fork, Reuse, Train, Serve)
}
"""By the name of the command and of the module, whose `run` takes the options."""
