"""Finds models by name or path, and loads them with transformers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from kvkeep.errors import KVKeepError, MissingPackageError, ModelError, reason_of
from kvkeep.hf.inputs import argument_names
from kvkeep.hf.loading import adapter_files
from kvkeep.hf.loading.gguf_files import config_in
from kvkeep.hf.loading.hub import download, weights_in
from kvkeep.hf.loading.rebuilt import rebuilt as rebuilt
from kvkeep.hf.quantised import quantise
from kvkeep.host.placement import dtype_on
from kvkeep.host.progress import Progress, silent
from kvkeep.named_models import OF_LAB, installed, loaded


def obtain(name: str, progress: Progress = silent) -> Path:
    """Download a model if necessary, and check its files: config and tokenizer can be read, weights
    exist, and no safetensors file is truncated.

    Args:
        name: a short name or a hub name, whose model is downloaded; or an existing directory or
            GGUF file. For an adapter, the base model is downloaded and checked too.

    Returns:
        The directory or the file.

    Raises:
        ModelError: the name is none of these, or a file is missing or cannot be read.
        AdapterError: the model is an adapter without weights, or of an unsupported kind.
        HubError: the model cannot be downloaded.
        MissingPackageError: the model is a GGUF file, and the packages that read GGUF files are not
            installed; or it is a short name of kvkeep-lab, which is not installed.
    """
    path = _downloaded(resolve(name, progress), progress)
    if not adapter_files.is_adapter(path):
        _check(name, path, progress)
    elif base := adapter_files.base_of(path):
        model = _downloaded(resolve(base, progress), progress)
        if adapter_files.is_adapter(model):
            raise ModelError(f"{base} is an adapter, and so is {name}; give an adapter of a model")
        _check(base, model, progress)
    return Path(path)


def _downloaded(path: str, progress: Progress) -> str:
    """A path that `resolve` returned, or the directory of the hub name."""
    return path if Path(path).exists() else download(path, progress)


def _check(name: str, path: str, progress: Progress) -> None:
    """Check the files of a model; see `obtain`."""
    where, options = located(path)
    progress(f"checking {name}", None)
    with _reading(name):
        config_of(where, options)
        weights = [] if options else weights_in(Path(where))
        for file in weights:
            if file.suffix == ".safetensors":
                with safe_open(file, "pt"):
                    pass
            else:
                file.stat()
    if not options and not weights:
        raise ModelError(f"no weights in {path}: save them with save_pretrained()")
    _tokenizer(where, options)


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """A context that turns all errors except kvkeep's own into ModelError."""
    try:
        yield
    except KVKeepError:
        raise
    except ImportError as error:  # for quantised weights; the error says what to install
        raise MissingPackageError(f"cannot load {name!r}: {reason_of(error)}") from error
    except Exception as error:  # libraries may raise any exception on an invalid file
        raise ModelError(
            f"cannot load {name!r}: {reason_of(error)}; save it again, or download it again"
        ) from error


def located(path: str) -> tuple[str, dict[str, Any]]:
    """The directory or hub name from which transformers loads a model, and options for loading it.

    Raises:
        ModelError: the path is a directory without a model, or with several GGUF files.
    """
    place = Path(path)
    if place.is_file():
        return str(place.parent), {"gguf_file": place.name}
    if not place.is_dir() or (place / "config.json").exists():
        return path, {}
    found = sorted(file.name for file in place.glob("*.gguf"))
    if len(found) > 1:
        raise ModelError(
            f"{path} has {len(found)} GGUF files ({', '.join(found[:3])}); give the path of one"
        )
    if not found:
        raise ModelError(
            f"no model in {path}: it has no config.json, no GGUF file and no adapter_config.json; "
            "see `kvkeep models`"
        )
    return path, {"gguf_file": found[0]}


def config_of(where: str, options: Mapping[str, Any]) -> Any:
    """The config of a model, given the result of `located`.

    Raises:
        ModelError, MissingPackageError: see `kvkeep.hf.loading.gguf_files.config_in`.
    """
    if options:
        return config_in(Path(where, options["gguf_file"]))
    return AutoConfig.from_pretrained(where)


def resolve(name: str, progress: Progress = silent) -> str:
    """The path or hub name that transformers can load. A model with a short name is fetched; a
    directory, a GGUF file or a hub name is returned unchanged.

    Raises:
        ModelError: the name is none of these; the error suggests the nearest short name, or the
            nearest model in the same directory.
        MissingPackageError: the name is a short name of kvkeep-lab, which is not installed.
    """
    if name in installed():
        return str(loaded(name).fetch(progress))
    try:
        if Path(name).is_dir() or (name.endswith(".gguf") and Path(name).is_file()):
            return name
    except OSError as error:  # the name is too long for a path, or access is denied
        raise ModelError(
            f"no model {name[:40]!r}: {error.strerror}; see `kvkeep models`"
        ) from error
    if "/" in name and not name.startswith((".", "/", "~")):
        return name
    if name in OF_LAB:
        raise MissingPackageError(
            f"{name} is a model of kvkeep-lab; pip install kvkeep-lab, or give a directory, a GGUF "
            "file or a hub name (owner/name)"
        )
    path, known = Path(name), sorted({*OF_LAB, *installed()})
    there = {one: one for one in known} | _models_in(path.parent)
    close = difflib.get_close_matches(path.name, there, n=1, cutoff=0.5)
    hint = f"did you mean {there[close[0]]!r}?" if close else f"known: {', '.join(known)}"
    raise ModelError(
        f"no model {name!r}: it is neither a directory nor a hub name (owner/name); {hint}"
    )


def _models_in(directory: Path) -> dict[str, str]:
    """The models, adapters and GGUF files in a directory: the path of each, by its last part."""
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
    weights: str | None = None,
    images: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model for inference, and its tokenizer. Files that are missing are downloaded.

    Args:
        name: a short name, a hub name, a GGUF file, or a directory with a model, a GGUF file, or an
            adapter, whose base model is then loaded too. None: the adapter's base model.
        dtype: "auto" (float32 on the CPU, bfloat16 elsewhere) or the name of a torch dtype.
        device: a torch device; None: the accelerator if there is one, otherwise the CPU.
        adapter: the directory of a PEFT adapter, such as the output of `kvkeep finetune`.
        labels: names of classes, to load a model that classifies texts. If the model already has
            classes, it keeps them; otherwise it gets these and a head of random weights.
        weights: "int8" or "int4" to quantise the weights of linear layers; see
            `kvkeep.hf.quantised.quantise`.
        images: load a model with its parts for images, even if its text model can be loaded alone.

    Raises:
        ModelError: the name or the dtype does not exist, or transformers cannot load the model.
        UnsupportedError: the model's weights cannot be quantised.
        AdapterError: the adapter does not exist, or cannot be loaded into the model.
        HubError: the model cannot be downloaded.
        MissingPackageError: the model is a GGUF file or has quantised weights, and the packages
            that read these are not installed; or it is a short name of kvkeep-lab, which is not
            installed.
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
        more: dict[str, Any] = {"labels": labels, "weights": weights, "images": images}
        return load(None, dtype, device, progress, adapter=path, **more)
    where, options = located(path)
    progress(f"loading {name}", None)
    transformers_logging.disable_progress_bar()
    with _reading(name):
        model, tokenizer = _read(where, torch_dtype, labels, images, **options)
    # Set the hub name, not a directory of the hub's cache, because an adapter's config records it.
    model.name_or_path = model.config.name_or_path = found
    if adapter is not None:
        progress(f"loading {adapter}", None)
        model = adapter_files.with_adapter(model, adapter)
    model.eval().to(device=place)
    if weights is not None:
        progress(f"quantising weights to {weights}", None)
        quantise(model, weights)
    return model, tokenizer


def processor_of(model: PreTrainedModel) -> Any:
    """The processor that turns texts and images into arguments of a model loaded by `load`; None:
    the model reads text only.

    Raises:
        ModelError: transformers cannot load the processor.
    """
    if "pixel_values" not in argument_names(model):
        return None
    try:
        processor = AutoProcessor.from_pretrained(model.name_or_path, local_files_only=True)
    except Exception as error:  # libraries may raise any exception on an invalid directory
        raise ModelError(
            f"no image processor in {model.name_or_path}: {reason_of(error)}; save one with "
            "save_pretrained(), and install the packages that it needs"
        ) from error
    if not hasattr(processor, "image_processor"):
        return None
    if processor.tokenizer.chat_template is None:
        processor.tokenizer.chat_template = processor.chat_template
    return processor


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a directory.

    Raises:
        ModelError: transformers cannot load a tokenizer, or loads one without a vocabulary.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory, local_files_only=True
        )
    except Exception as error:  # libraries may raise any exception on an invalid directory
        raise ModelError(
            f"no tokenizer in {directory}: {reason_of(error)}; save one with save_pretrained()"
        ) from error
    # Without files, transformers creates some tokenizers with only their special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ModelError(
            f"no tokenizer in {directory}: no file has a vocabulary; save one with "
            "save_pretrained()"
        )
    return tokenizer


def _tokenizer(where: str, options: dict[str, Any]) -> Any:
    """The tokenizer of a model, given the result of `located`."""
    return AutoTokenizer.from_pretrained(where, **options) if options else load_tokenizer(where)


def _read(
    where: str, dtype: torch.dtype, labels: Sequence[str] | None, images: bool, **options: Any
) -> tuple[PreTrainedModel, Any]:
    """Load a model and its tokenizer with transformers. A model from a GGUF file gets ordinary
    weights and no trace of its quantization."""
    # Read the config first, so that its error does not look like the tokenizer's.
    config = config_of(where, options)
    tokenizer = _tokenizer(where, options)
    model: Any
    if labels is None:
        plain = type(config) in AutoModelForCausalLM._model_mapping
        sees = type(config) in AutoModelForImageTextToText._model_mapping
        auto: Any = (
            AutoModelForImageTextToText if sees and (images or not plain) else AutoModelForCausalLM
        )
        found: Any = auto.from_pretrained(
            where, config=config, dtype=dtype, output_loading_info=True, **options
        )
        model, read = found
        if odd := [*read["missing_keys"], *read["mismatched_keys"]]:
            raise ModelError(
                f"{where} lacks {len(odd)} weights of its model, such as {odd[0]}; save it again, "
                "or download it again"
            )
    else:
        if not any("SequenceClassification" in name for name in config.architectures or ()):
            config.id2label = dict(enumerate(labels))
            config.label2id = {name: index for index, name in enumerate(labels)}
        classifier: Any = AutoModelForSequenceClassification
        model = classifier.from_pretrained(where, config=config, dtype=dtype, **options)
        if model.config.pad_token_id is None:  # the model needs it to find a text's last token
            pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
            model.config.pad_token_id = end if pad is None else pad
    if options:
        # The weights are dequantised, so the config must not say that they come from a GGUF file.
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.hf_quantizer = None
        model.is_quantized = False
    return model, tokenizer
