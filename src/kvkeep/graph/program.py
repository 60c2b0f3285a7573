"""Program: a decode step and its cache, exported by torch and saved as a .pt2 file.

Running a loaded program needs torch and kvkeep, but neither transformers nor the model's files.
Loading a file runs code: torch compiles text of the file to Python, so load only files you trust.
Nothing is unpickled, and content that no export writes is refused (see `vetting.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import BytesIO, FileIO, RawIOBase
from pathlib import Path
from typing import IO, Any, cast
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from kvkeep.errors import (
    CapacityError,
    KVKeepError,
    SavedCacheError,
    ShapeError,
    StateError,
    reason_of,
)
from kvkeep.files.atomic import whole_file, write_all
from kvkeep.files.headers import typed
from kvkeep.graph.consistency import require_consistent
from kvkeep.graph.export_op import read_in as _read_in  # noqa: F401  (what programs call)
from kvkeep.graph.export_op import step_in as _step_in  # noqa: F401
from kvkeep.graph.linear_op import grouped as _grouped  # noqa: F401
from kvkeep.graph.vetting import why_refused
from kvkeep.reading import open_file
from kvkeep.storage.allocate import free_bytes

FORMAT = 1
"""The only version of the file format that is written and read."""

STATES = "states."
"""What the names of the buffers with the states of recurrent layers begin with."""

_HEADER = "kvkeep.json"
_MOST_JSON = 1 << 28
_ENCRYPTED = 1
_OURS = re.compile(
    r"archive/(archive_format|archive_version|byteorder|\.data/(version|serialization_id)"
    r"|models/model\.json|data/sample_inputs/model\.pt|extra/kvkeep\.json"
    r"|data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json))"
)
"""Names of the parts that `torch.export.save` writes for a program whose state is all tensors."""


@dataclass(frozen=True)
class Header:
    """The metadata of a program.

    Args:
        format: version of the file format.
        version: version of the exporting kvkeep.
        specs: spec of each layer, as text.
        rows: batch size.
        room: number of columns that fit its cache.
        vocabulary: number of token ids, which start at 0.
        fingerprint: everything that the keys and values depend on, by name.
    """

    format: int
    version: str
    specs: list[str]
    rows: int
    room: int
    vocabulary: int
    fingerprint: dict[str, str]


class Program:
    """A decode step and its cache.

    Args:
        traced: the program that `kvkeep.export` made.
        header: its metadata.
    """

    def __init__(self, traced: ExportedProgram, header: Header) -> None:
        self.header = header
        self._traced = traced
        self._path: Path | None = None  # the file the program was loaded from
        self._step: nn.Module = traced.module()
        self._single: Callable[..., Any] = self._step
        self._state = {
            name: tensor
            for name, tensor in self._step.named_buffers()
            if name.startswith(("layers.", STATES))
        }
        self._by_token = tokens_of(traced) == 1

    def __repr__(self) -> str:
        kept = " ".join(dict.fromkeys(self.header.specs))
        return f"kvkeep.Program({kept!r}, rows={self.header.rows}, fed={self.fed})"

    @property
    def fed(self) -> int:
        """Columns fed, including padding.

        Raises:
            StateError: a step was interrupted, so the layers' counts differ.
        """
        return self._agreed()

    def _agreed(self) -> int:
        fed = {int(x[0]) for name, x in self._state.items() if name.endswith(".counts")}
        if len(fed) > 1 or min(fed) < 0:
            raise StateError(
                f"the layers' counts of tokens are {sorted(fed)}, which differ or are unknown: a "
                "step was interrupted; reset() the program"
            )
        return fed.pop()

    def __call__(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Feed new tokens and return the logits of the next one.

        Args:
            input_ids: int64 or int32 (rows, n): a prompt, part of a prompt, or the newest token.
            attention_mask: (rows, n), 0 where a new token is padding; None: no padding.

        Returns:
            Logits (rows, V) after the last new token.

        Raises:
            ShapeError: the tensors do not fit the program; nothing was fed.
            CapacityError: the tokens do not fit its cache; nothing was fed.
            StateError: a step was interrupted; `reset` the program.
            SavedCacheError: an operator of a program loaded from a file fails.
        """
        rows, room = self.header.rows, self.header.room
        if not all(isinstance(x, Tensor) for x in (input_ids, attention_mask) if x is not None):
            raise ShapeError(
                f"token ids are {type(input_ids).__name__}; give tensors for the ids and the mask"
            )
        if input_ids.dim() != 2 or len(input_ids) != rows or not input_ids.shape[1]:
            raise ShapeError(
                f"token ids {tuple(input_ids.shape)} for a program of {rows} rows: give "
                f"({rows}, n), or export it with rows={len(input_ids)}"
            )
        if input_ids.dtype not in (torch.int64, torch.int32):
            raise ShapeError(f"token ids are {input_ids.dtype}; give int64")
        if attention_mask is not None and attention_mask.shape != input_ids.shape:
            raise ShapeError(
                f"attention mask {tuple(attention_mask.shape)} for token ids "
                f"{tuple(input_ids.shape)}; give the same shape, for the new tokens only"
            )
        vocabulary = self.header.vocabulary
        if not 0 <= int(input_ids.min()) <= int(input_ids.max()) < vocabulary:
            raise ShapeError(
                f"token ids from {int(input_ids.min())} to {int(input_ids.max())}, but its "
                f"vocabulary has 0 to {vocabulary - 1}; use the tokenizer of the exported model"
            )
        if attention_mask is not None and not bool(attention_mask[:, -1].all()):
            raise ShapeError("the last token of a row is padding; pad on the left")
        if self.fed + input_ids.shape[1] > room:
            raise CapacityError(
                f"{input_ids.shape[1]} tokens after {self.fed}, but this program's cache is fixed "
                f"at {room}; reset() it, or export it with more, such as @fixed:{2 * room}"
            )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        by_token = self._by_token or input_ids.shape[1] == 1
        step, size = (self._single, 1) if by_token else (self._step, input_ids.shape[1])
        parts = zip(
            *(torch.split(x, size, 1) for x in (input_ids.long(), mask.bool())), strict=True
        )
        try:
            with torch.inference_mode():
                return [cast(Tensor, step(*part)) for part in parts][-1]
        except (KVKeepError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # raised by a file's operators
            if self._path is None or step is not self._step:
                raise
            raise _unusable(self._path, "run", error) from error

    def compile(self, **options: Any) -> None:
        """Compile the single-token step with `torch.compile(**options)`. The next such step takes
        the time to compile."""
        self._single = torch.compile(self._step, **{"fullgraph": True} | options)

    def reset(self) -> None:
        """Remove all tokens."""
        with torch.inference_mode():
            for tensor in self._state.values():
                tensor.zero_()

    def save(self, path: str | os.PathLike[str], *, sync: bool = True) -> None:
        """Write the program, with the contents of its cache, to a .pt2 file atomically.

        Args:
            path: file name ending in .pt2.
            sync: flush to disk, so that the file survives a power loss.

        Raises:
            SavedCacheError: the file cannot be written; the previous file is unchanged.
            StateError: a step was interrupted.
        """
        named(path)
        self._agreed()
        extra = {_HEADER: json.dumps(asdict(self.header))}
        try:
            with whole_file(Path(path), sync=sync) as file:
                whole = _Whole(file)
                torch.export.save(self._traced, cast(IO[bytes], whole), extra_files=extra)
                if whole.error is not None:
                    raise whole.error
        except (OSError, RuntimeError) as error:
            raise SavedCacheError(
                f"cannot save a program to {path}: {error}; the previous file is unchanged"
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Program:
        """Load a saved program. This runs code: torch evaluates expressions from the file and runs
        the operators it names. Load only files from people whose code you would run.

        The file is read once, into memory. Its parts and their checksums are checked, then copied
        to a new archive; torch reads that archive, never the file itself.

        Raises:
            SavedCacheError: the file is not a program, is incomplete, or has another format; it
                contains pickles, or expressions, operators or names that kvkeep's export never
                writes; or its parts do not fit each other.
        """
        header, archive = _checked(named(path))
        try:
            traced = torch.export.load(archive)
            require_consistent(traced, header.specs, header.rows, header.room, header.vocabulary)
            program = cls(traced, header)
        except Exception as error:  # torch raises many types for malformed files
            raise _unusable(path, "loaded", error) from error
        program._path = Path(path)
        return program


def tokens_of(traced: ExportedProgram) -> int | torch.SymInt:
    """How many tokens a traced step takes: 1, or a symbol if torch could trace it for any number. A
    model with recurrent layers computes several tokens in another way."""
    name = traced.graph_signature.user_inputs[0]
    found = next(node for node in traced.graph.nodes if node.name == name)
    return cast("int | torch.SymInt", found.meta["val"].shape[1])


def _unusable(path: str | os.PathLike[str], how: str, error: Exception) -> SavedCacheError:
    return SavedCacheError(f"{path} cannot be {how}: {reason_of(error)[:200]}; export it again")


class _Whole(RawIOBase):
    """A file for torch's writer, which aborts the process if `write` raises. Writes are complete;
    `error` keeps the first error, and later writes do nothing."""

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            if self.error is None:
                write_all(self._file.fileno(), view)
        except OSError as error:
            self.error = error
        return len(view)


def named(path: str | os.PathLike[str]) -> Path:
    """Return the path, after checking its suffix.

    Raises:
        SavedCacheError: the path does not end in .pt2.
    """
    if Path(path).suffix != ".pt2":
        raise SavedCacheError(f"{path}: torch requires program names that end in .pt2; rename it")
    return Path(path)


def _checked(path: Path) -> tuple[Header, BytesIO]:
    """Check that a file is complete and contains only parts that an export writes. Return its
    header and a new archive of the checked parts.

    ZIP readers disagree about unusual archives, such as two in one file, so torch never reads the
    file itself.
    """
    try:
        with open_file(path) as handle, ZipFile(FileIO(handle, closefd=False)) as archive:
            _require_ours(archive.infolist(), os.fstat(handle).st_size, path)
            return _copied(archive, path)
    except FileNotFoundError as error:
        raise SavedCacheError(f"no file {path}; check the path it was saved to") from error
    except SavedCacheError:
        raise
    except Exception as error:  # zipfile raises many types
        raise SavedCacheError(f"{path} cannot be read: {error}; export it again") from error


def _require_ours(members: list[ZipInfo], size: int, path: Path) -> None:
    """Raise SavedCacheError for parts that no export writes, before reading any part."""
    if f"archive/extra/{_HEADER}" not in {member.filename for member in members}:
        raise SavedCacheError(
            f"{path} is not a kvkeep program: it has no {_HEADER}; give a file that kvkeep saved"
        )
    odd = _not_ours(members)
    if odd:
        raise _may_be_pickle(odd, path)
    total = sum(member.file_size for member in members)
    if total > size:  # the parts overlap
        raise SavedCacheError(
            f"{path} cannot be read: {total} bytes of parts in a file of {size}; export it again"
        )
    free = free_bytes(torch.device("cpu"))
    if free is not None and total > free:
        raise SavedCacheError(
            f"{path} needs {total} bytes of memory, but {free} are free; load it on a "
            "larger machine"
        )


def _may_be_pickle(name: str, path: Path) -> SavedCacheError:
    return SavedCacheError(
        f"{path} holds {name}, which may be a pickle: kvkeep writes none and reads none"
    )


def _copied(archive: ZipFile, path: Path) -> tuple[Header, BytesIO]:
    """Copy all parts to a new archive, checking each; return the header and the archive."""
    copy = BytesIO()
    header = None
    with ZipFile(copy, "w", ZIP_STORED) as target:
        for member in archive.infolist():
            name = member.filename
            try:
                data = archive.read(member)
            except BadZipFile as error:
                raise SavedCacheError(f"{path} is damaged in {name}; export it again") from error
            if name.endswith("_config.json") and _any_pickled(json.loads(data)):
                raise _may_be_pickle(name, path)
            if name.endswith("models/model.json"):
                odd = why_refused(json.loads(data))
                if odd:
                    raise SavedCacheError(
                        f"{path} contains {odd}, which torch would turn into code and kvkeep's "
                        "export never writes; export it again"
                    )
            if name.endswith(_HEADER):
                header = _header(json.loads(data), path)
            target.writestr(ZipInfo(name), data)
    assert header is not None  # `_require_ours` has checked it
    copy.seek(0)
    return header, copy


def _header(fields: Any, path: Path) -> Header:
    """The header from its parsed JSON."""
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        version = fields.get("format") if isinstance(fields, dict) else None
        raise SavedCacheError(
            f"{path} is a program of format {version}; this kvkeep reads {FORMAT}; export it again"
        )
    try:
        return typed(Header, fields)
    except (KeyError, TypeError) as error:
        raise SavedCacheError(
            f"{path}: its header is not valid: {error}; export it again"
        ) from error


def _not_ours(members: list[ZipInfo]) -> str:
    """Describe a part that kvkeep does not write and torch might unpickle; empty if none."""
    seen = set[str]()
    for member in members:
        name = member.filename
        # Of two equal names torch reads the first; it ignores case.
        if name.casefold() in seen or not _OURS.fullmatch(name):
            return name
        if member.compress_type != ZIP_STORED or member.file_size != member.compress_size:
            return f"{name}, compressed"  # its expanded size is unlimited
        if member.flag_bits & _ENCRYPTED:
            return f"{name}, encrypted"
        if name.endswith(".json") and member.file_size > _MOST_JSON:
            return f"{name} of {member.file_size} bytes"
        seen.add(name.casefold())
        if name.endswith("sample_inputs/model.pt") and member.file_size:
            return name
    missing = {"archive/archive_format", "archive/models/model.json"} - seen
    return f"no {min(missing)}" if missing else ""


def _any_pickled(config: Any) -> bool:
    entries = config.get("config", {}).values() if isinstance(config, dict) else [{}]
    return any(not isinstance(entry, dict) or entry.get("use_pickle", True) for entry in entries)
