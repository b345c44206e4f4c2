"""Arrays on disk that are computed block by block and survive being killed.

A `BlockStore` is a Zarr array, or a Zarr group of arrays, whose chunks are the blocks. All its
arrays share an axis, their first or their last, and block i has the same rows of it in each.

Nothing here is ever half there. A store is made beside its place and moved into it by one rename.
A block counts as done by a file named after it, its mark, made when the block is on the disk: not
only handed to the system, so machines that vanish are survived too. Killed before that, the block
is computed again. Which computation a store belongs to is in its attributes, under "curvax", and
no other may write to it. Floating-point rows that are not done yet read as NaN.

Damage is noticed. A chunk ends with its CRC-32C, by Zarr's own codec, so that whoever reads it,
with whatever program, gets the numbers that were written or an error. That checksum covers bytes
and not their position, so the mark of a block holds its index and the checksums of its chunks: a
chunk that is copied over another one does not match the mark there. `open` looks whether the chunks
of all blocks that are done are there, have their size and end with the checksum in the mark; on
request it also reads them; and it removes the marks of those that fail. Each `zarr.json` has a
checksum of what the meaning of chunks depends on. A lost or damaged mark costs no more than its
block.

In stores of earlier versions marks are empty. These are continued all the same; such a mark only
says that its block is done. The `zarr.json` of newer ones has `marks: "crc32c"`, and there a mark
must match.

The marks lie in `.curvax/done` of the array; of the first array, if there are several, because
Zarr warns of directories in a group that are not arrays.
"""

import hashlib
import json
import math
import os
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from curvax._errors import check_size, where

FORMAT = 2

MARKS = "crc32c"
"""What a mark holds besides the index of its block, as the `zarr.json` at the root says."""


@dataclass(frozen=True)
class ArraySpec:
    """An array of a store: its name in the user's words, its shape and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def check_specs(specs: Sequence[ArraySpec], axis: str, length: int) -> None:
    """Check that arrays have a row for each of `length` columns, and a dtype that Zarr can hold."""
    for spec in specs:
        if not spec.shape or spec.shape[0 if axis == "first" else -1] != length:
            raise ValueError(
                f"{where()}: array {spec.name!r} of shape {spec.shape} must have {length} rows "
                f"along its {axis} axis."
            )
        if spec.dtype.kind not in "biufc" or spec.dtype.isbuiltin != 1:
            raise TypeError(
                f"{where()}: array {spec.name!r} is of dtype {spec.dtype}, which Zarr cannot "
                f"store. Let the function return float32, for example."
            )


def metadata_of(
    specs: tuple[ArraySpec, ...], axis: str, length: int, fingerprint: str
) -> dict[str, Any]:
    """What a store says of itself, but for the block size.

    Which computation a store belongs to is in the attributes of its root, under "curvax". Each
    `zarr.json` also has a SHA-256 of itself there, so that one that is damaged is told from one of
    something else.
    """
    arrays = [
        {"name": spec.name, "shape": list(spec.shape), "dtype": str(spec.dtype)} for spec in specs
    ]
    shared = {"axis": axis, "length": length, "fingerprint": fingerprint}
    return {"format": FORMAT, "marks": MARKS, "arrays": arrays, **shared}


def recorded_in(path: Path) -> dict[str, Any]:
    """What the store at `path` says of itself; nothing if curvax did not write it."""
    file = path / "zarr.json"
    if not file.is_file():
        return {}
    described = described_in(file) or {}
    recorded = described.get("attributes", {}).get("curvax")
    return recorded if isinstance(recorded, dict) else {}


def is_zarr(path: Path) -> bool:
    """Whether a Zarr store is there, of whatever origin; format 2 has other files at its root."""
    if any((path / name).is_file() for name in (".zarray", ".zgroup")):
        return True
    return "zarr_format" in (described_in(path / "zarr.json") or {})


def is_ours(path: Path, specs: Sequence[ArraySpec]) -> bool:
    """Whether this is a store of such arrays, and nothing else, also if its zarr.json is damaged.

    It may be replaced then, so a folder with stores in it must not be mistaken for one.
    """
    if not path.is_dir():
        return False
    found = {entry.name for entry in path.iterdir()}
    names = [""] if ".curvax" in found else zarr_names(specs)
    expected = {"zarr.json", *names} if names != [""] else {"zarr.json", "c", ".curvax"}
    is_marked = bool(names) and (path / names[0] / ".curvax" / "done").is_dir()
    return is_marked and found <= expected and (names == [""] or "zarr.json" in found)


def described_in(file: Path) -> dict[str, Any] | None:
    """What a `zarr.json` says, or None if it is damaged or missing."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    attributes = found.get("attributes", {}) if isinstance(found, dict) else None
    return found if isinstance(attributes, dict) else None


def checksum(described: dict[str, Any]) -> str:
    """A checksum of what a `zarr.json` says, but for attributes that users may have added."""
    said = {key: value for key, value in described.items() if key != "attributes"}
    own = {key: x for key, x in described["attributes"]["curvax"].items() if key != "checksum"}
    return hashlib.sha256(json.dumps([said, own], sort_keys=True).encode()).hexdigest()


def seal(file: Path) -> None:
    """Add the checksum to a `zarr.json`."""
    described = json.loads(file.read_text())
    described["attributes"]["curvax"]["checksum"] = checksum(described)
    file.write_text(json.dumps(described, indent=2))


def should_be_sealed(path: Path, recorded: dict[str, Any]) -> bool:
    """Whether curvax made what is there, in this format, as far as one can tell."""
    return not is_zarr(path) or recorded.get("format") == FORMAT


def damaged_metadata(path: Path, names: Sequence[str]) -> list[str]:
    """Which `zarr.json` files of arrays of a store are not as they were written."""
    files = {f"{name}/zarr.json".lstrip("/"): path / name / "zarr.json" for name in names}
    return [name for name, file in files.items() if not is_sealed(file)]


def is_sealed(file: Path) -> bool:
    """Return whether a `zarr.json` has the checksum of what it says."""
    described = described_in(file)
    own = None if described is None else described.get("attributes", {}).get("curvax")
    return isinstance(own, dict) and own.get("checksum") == checksum(described or {})


def differences_of(recorded: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """In which respects a store is not the one that is wanted, in words."""
    if not recorded:
        return ["it is a Zarr store that curvax did not write"]
    if recorded.get("format") != FORMAT:
        return [f"it is in format {recorded.get('format')}, and this curvax uses format {FORMAT}"]
    found = []
    names = lambda metadata: [array["name"] for array in metadata["arrays"]]
    if names(recorded) != names(wanted):
        found.append(f"it has the arrays {names(recorded)} instead of {names(wanted)}")
    else:
        found += [
            f"the {key} of array {new['name']!r} is {old[key]} instead of {new[key]}"
            for old, new in zip(recorded["arrays"], wanted["arrays"], strict=True)
            for key in ("shape", "dtype")
            if old[key] != new[key]
        ]
    found += [
        f"its {key} is {recorded[key]} instead of {wanted[key]}"
        for key in ("axis", "length")
        if recorded[key] != wanted[key]
    ]
    if recorded["fingerprint"] != wanted["fingerprint"]:
        found.append(
            f"its fingerprint is {recorded['fingerprint'][:12]} instead of "
            f"{wanted['fingerprint'][:12]} (the function, a constant or the inputs are others)"
        )
    return found


def zarr_names(specs: Sequence[ArraySpec]) -> list[str]:
    """Names that are safe on every file system, readable, and unique; "" is the root itself."""
    if [spec.name for spec in specs] == [""]:
        return [""]
    names: list[str] = []
    taken: set[str] = set()
    for spec in specs:
        plain = re.sub(r"[^A-Za-z0-9_-]+", "_", spec.name).strip("_")[:100] or "array"
        number, name = 1, plain
        while name.casefold() in taken:
            number += 1
            name = f"{plain}_{number}"
        taken.add(name.casefold())
        names.append(name)
    return names


_CHECKSUM_BYTES = 4  # Of a chunk, by Zarr's codec "crc32c".
_ABANDONED = 60.0  # Seconds after which a store that is being made is taken for a leftover.


class DamagedStoreWarning(UserWarning):
    """Blocks of a store that were done are damaged, and are computed again.

    Examples:
        >>> import warnings
        >>> import curvax
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", curvax.DamagedStoreWarning)  # Stop there instead.
    """


@dataclass(frozen=True)
class BlockStore:
    """Arrays on disk in blocks, open for writing. Made by `BlockStore.open`."""

    path: Path
    specs: tuple[ArraySpec, ...]
    axis: Literal["first", "last"]
    length: int
    block_size: int

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        specs: Sequence[ArraySpec],
        *,
        axis: Literal["first", "last"],
        length: int,
        block_size: int | None,
        fingerprint: str,
        overwrite: bool,
        resume: bool = True,
        verify: bool = False,
    ) -> "BlockStore":
        """The store at `path`: continued if it is of the same computation, else a new one.

        Args:
            path: where it is or will be. A single array named "" is the root of the store.
            specs: the arrays, each of `length` along the shared axis.
            axis: which axis of all arrays that is.
            length: the number of rows along it.
            block_size: rows in a block. None takes the size that the store has.
            fingerprint: says which computation it is.
            overwrite: replace a Zarr store of something else. One of the same computation and the
                same block size is continued all the same.
            resume: continue a store of the same computation; otherwise it is replaced.
            verify: read all blocks that are done, and check their checksums. Otherwise it is only
                checked that their chunks are there, have the right size, and end with the checksum
                that the mark of the block has.

        Warns:
            DamagedStoreWarning: blocks that were done are not as they were written. They are to do
                again.

        Raises:
            ImportError: Zarr is missing.
            TypeError: a dtype has no counterpart in Zarr.
            FileExistsError: something that is no Zarr store is in the way.
            ValueError: the store is of something else, or has another block size.
        """
        zarr = _import_zarr()
        given = check_size("block_size", block_size)
        size = None if given is None else min(given, max(1, length))
        path = Path(os.path.realpath(path))
        _remove_leftovers(path)
        computation: Any = {"axis": axis, "length": length, "fingerprint": fingerprint}
        recorded = cls.recorded_block_size(path, specs, **computation, overwrite=overwrite)
        if not resume:
            recorded = None
        if recorded is not None and size not in (None, recorded):
            if not overwrite:
                raise ValueError(
                    f"{where()}: {path} was begun in blocks of {recorded}, but blocks of {size} "
                    f"are asked for. Leave the size out (or give {recorded}) to continue, choose "
                    f"another path, or pass overwrite=True to start again."
                )
            recorded = None
        if recorded is None and size is None:
            raise ValueError(f"{where()}: a new store needs a block_size, got None.")
        store = cls(path, tuple(specs), axis, length, recorded or size or 1)
        if recorded is None:
            _create(zarr, store, metadata_of(store.specs, **computation))
        else:
            store._take_back_damaged(verify)
            if store.unfinished():
                store._remove_partial_chunks()
        return store

    @classmethod
    def recorded_block_size(
        cls,
        path: str | os.PathLike[str],
        specs: Sequence[ArraySpec],
        *,
        axis: Literal["first", "last"],
        length: int,
        fingerprint: str,
        overwrite: bool,
    ) -> int | None:
        """The block size of the store that `open` would continue; None if it would make one.

        Whatever makes `open` refuse, other than a block size, is refused here already.
        """
        wanted = metadata_of(tuple(specs), axis, length, fingerprint)
        check_specs(specs, axis, length)
        path = Path(os.path.realpath(path))
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return None
        if not is_zarr(path) and not is_ours(path, specs):
            kind = "a directory that is not a Zarr store" if path.is_dir() else "a file"
            raise FileExistsError(
                f"{where()}: {path} is {kind}. It is not touched, also with overwrite=True: choose "
                f"another path, or remove it yourself."
            )
        recorded = recorded_in(path)
        differences: list[str] = []
        # Of a store that is damaged, nothing that it says of itself can be compared.
        damaged = damaged_metadata(path, [""]) if should_be_sealed(path, recorded) else []
        if not damaged:
            differences = differences_of(recorded, wanted)
        if not damaged and not differences:
            damaged = damaged_metadata(path, zarr_names(specs))
        if not differences and not damaged:
            return int(recorded["block_size"])
        if overwrite:
            return None
        if damaged:
            raise ValueError(
                f"{where()}: {path} is damaged: {', '.join(damaged)} cannot be read or is not as "
                f"it was written, so that nothing can be said about its numbers. Pass "
                f"overwrite=True to compute them again, or choose another path."
            )
        raise ValueError(
            f"{where()}: {path} holds something else: {'; '.join(differences)}. Choose another "
            f"path, or pass overwrite=True to replace it."
        )

    @property
    def num_blocks(self) -> int:
        """How many blocks there are; none if the arrays have no elements."""
        some = any(0 not in spec.shape for spec in self.specs)
        return -(-self.length // self.block_size) if some else 0

    def rows(self, index: int) -> slice:
        """The rows of a block along the shared axis."""
        return slice(index * self.block_size, min((index + 1) * self.block_size, self.length))

    def unfinished(self) -> list[int]:
        """The blocks that are still to do, in order."""
        marks = self._marks()
        done = set(os.listdir(marks)) if marks.is_dir() else set[str]()
        return [index for index in range(self.num_blocks) if str(index) not in done]

    def write(self, index: int, blocks: Sequence[NDArray[Any]]) -> None:
        """Write one block of every array, and mark it as done when it is on the disk."""
        if not 0 <= index < self.num_blocks:
            raise IndexError(f"block {index} of {self.path}, which has {self.num_blocks} blocks")
        if len(blocks) != len(self.specs):
            raise ValueError(f"got {len(blocks)} blocks for {len(self.specs)} arrays")
        rows = self.rows(index)
        for spec, block in zip(self.specs, blocks, strict=True):
            shape = _with_axis(spec.shape, self.axis, rows.stop - rows.start)
            if block.shape != shape or block.dtype != spec.dtype:
                raise ValueError(
                    f"block {index} of array {spec.name!r} must be {spec.dtype}{list(shape)}, got "
                    f"{block.dtype}{list(block.shape)}"
                )
        arrays = zip(self._open("r+"), self.specs, self._names(), blocks, strict=True)
        for array, spec, name, block in arrays:
            if block.size:
                array[self._key(index)] = block
                self._flush_chunk(self.path / name, self._chunk(self.path / name, spec, index))
        mark = self._marks() / str(index)
        mark.parent.mkdir(parents=True, exist_ok=True)
        partial = mark.with_name(f"{index}.partial")
        partial.write_bytes(self._mark(index))
        partial.replace(mark)

    def damaged(self, verify: bool) -> list[int]:
        """Return the blocks that are done, but not as they were written.

        Args:
            verify: read them and check their checksums, one block at a time; otherwise only the
                sizes of their chunks are looked at, and the checksums at their ends are compared
                with the marks.
        """
        undone = set(self.unfinished())
        done = [index for index in range(self.num_blocks) if index not in undone]
        if not done:
            return []
        may_be_empty = recorded_in(self.path).get("marks") != MARKS
        arrays = [
            (array, spec)
            for array, spec in zip(self._open("r"), self.specs, strict=True)
            if 0 not in spec.shape
        ]

        def is_intact(index: int) -> bool:
            chunks = self._chunks(index)
            for chunk, (_, spec) in zip(chunks, arrays, strict=True):
                shape = _with_axis(spec.shape, self.axis, self.block_size)
                size = math.prod(shape) * spec.dtype.itemsize + _CHECKSUM_BYTES
                if not chunk.is_file() or chunk.stat().st_size != size:
                    return False
            mark = (self._marks() / str(index)).read_bytes()
            if mark != self._mark(index) and not (may_be_empty and not mark):
                return False
            try:
                for array, _ in arrays if verify else ():
                    array[self._key(index)]
            except (ValueError, OSError):  # Zarr's for a wrong checksum; the disk's.
                return False
            return True

        return [index for index in done if not is_intact(index)]

    def _take_back_damaged(self, verify: bool) -> None:
        """Let damaged blocks be done again."""
        damaged = self.damaged(verify)
        if not damaged:
            return
        some = ", ".join(map(str, damaged[:10])) + (", ..." if len(damaged) > 10 else "")
        warnings.warn(
            f"{where()}: {len(damaged)} of the {self.num_blocks} blocks of {self.path} are "
            f"damaged: chunks are missing, of another size, fail their checksum or are those of "
            f"another block (blocks {some}). They are computed again.",
            DamagedStoreWarning,
            stacklevel=2,
        )
        for index in damaged:
            (self._marks() / str(index)).unlink(missing_ok=True)

    def arrays(self) -> list[Any]:
        """The arrays as `zarr.Array`, for reading only, in the order of the specs."""
        return self._open("r")

    def _open(self, mode: Literal["r", "r+"]) -> list[Any]:
        zarr = _import_zarr()
        store = zarr.storage.LocalStore(self.path, read_only=mode == "r")
        # A chunk of zeros is written like any other, so that every mark has its chunks. Zarr takes
        # that setting from here when it opens an array, and not always from an argument.
        with zarr.config.set({"array.write_empty_chunks": True}):
            return [zarr.open_array(store=store, path=name, mode=mode) for name in self._names()]

    def _names(self) -> list[str]:
        return zarr_names(self.specs)

    def _marks(self) -> Path:
        return self.path / next(iter(self._names()), "") / ".curvax" / "done"

    def _key(self, index: int) -> Any:
        """What a block is in an array."""
        rows = self.rows(index)
        return rows if self.axis == "first" else (..., rows)

    def _chunks(self, index: int) -> list[Path]:
        """The files of a block, one for each array that has elements."""
        arrays = zip(self.specs, self._names(), strict=True)
        return [
            self._chunk(self.path / name, spec, index)
            for spec, name in arrays
            if 0 not in spec.shape
        ]

    def _chunk(self, array: Path, spec: ArraySpec, index: int) -> Path:
        """The file of a block of an array."""
        position = _with_axis((0,) * len(spec.shape), self.axis, index)
        return array.joinpath("c", *map(str, position))

    def _mark(self, index: int) -> bytes:
        """What the mark of a block that is on the disk holds: its index and its checksums."""
        checksums = [_last_bytes(chunk, _CHECKSUM_BYTES).hex() for chunk in self._chunks(index)]
        return " ".join([str(index), *checksums]).encode()

    def _flush_chunk(self, array: Path, chunk: Path) -> None:
        above = [parent for parent in chunk.parents if parent.is_relative_to(array)]
        _flush([chunk, *above])

    def _remove_partial_chunks(self) -> None:
        """Remove chunks and marks that a killed process was writing next to their place."""
        folders = [self._marks(), *(self.path / name / "c" for name in self._names())]
        for partial in (file for folder in folders for file in folder.rglob("*.partial")):
            partial.unlink(missing_ok=True)


def check_path(out: Any) -> Path:
    """The place of a store as the user gave it, as an absolute path with links resolved."""
    if not isinstance(out, str | os.PathLike) or not isinstance(os.fspath(out), str):
        raise TypeError(f"{where()}: out must be a path, got {type(out).__name__} {out!r}.")
    if not os.fspath(out):
        raise ValueError(f"{where()}: out must be a path such as 'result.zarr', got ''.")
    path = Path(os.path.realpath(out))
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{where()}: out={os.fspath(out)!r} cannot be made, because {path.parent} is not an "
            f"existing directory. Create it first."
        )
    return path


def _import_zarr() -> Any:
    advice = f"{where()}: results on disk need zarr 3.1 or newer. Run pip install 'curvax[disk]'."
    try:
        import zarr
    except ImportError as error:
        raise ImportError(advice) from error
    if not hasattr(zarr, "create_array"):
        raise ImportError(f"{advice} The one installed is {zarr.__version__}.")
    return zarr


def _create(zarr: Any, store: BlockStore, metadata: dict[str, Any]) -> None:
    """Make an empty store beside its place and move it there, in the place of an old one."""
    path, attributes = store.path, {"curvax": {**metadata, "block_size": store.block_size}}
    names = zarr_names(store.specs)
    new = _beside(path, "new")
    new.mkdir()
    try:
        local = zarr.storage.LocalStore(new)
        if names != [""]:
            zarr.create_group(store=local, attributes=attributes)
        for spec, name in zip(store.specs, names, strict=True):
            zarr.create_array(
                store=local,
                name=name or None,
                shape=spec.shape,
                dtype=spec.dtype,
                chunks=_with_axis(
                    tuple(max(1, n) for n in spec.shape), store.axis, store.block_size
                ),
                compressors=zarr.codecs.Crc32cCodec(),
                filters=None,
                fill_value=np.nan if spec.dtype.kind in "fc" else 0,
                attributes={"curvax": {"name": spec.name}} if name else attributes,
                config={"write_empty_chunks": True},
            )
        for name in dict.fromkeys(["", *names]):
            seal(new / name / "zarr.json")
        (new / (names or [""])[0] / ".curvax" / "done").mkdir(parents=True)
        _flush([*new.rglob("*"), new])
        if is_zarr(path) or is_ours(path, store.specs):
            old = _beside(path, "old")
            os.rename(path, old)
            os.rename(new, path)
            shutil.rmtree(old)
        else:  # Nothing is there, or an empty directory, which a rename replaces.
            os.rename(new, path)
        _flush([path.parent])
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _beside(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.curvax-{kind}-{uuid.uuid4().hex[:12]}")


def _remove_leftovers(path: Path) -> None:
    """Remove what processes that were killed while they made or replaced this store left."""
    if not path.parent.is_dir():
        return
    for other in path.parent.iterdir():
        old = other.name.startswith(f".{path.name}.curvax-old-")
        new = other.name.startswith(f".{path.name}.curvax-new-")
        # One that is new may be in the making by another process this very moment.
        if old or (new and time.time() - other.stat().st_mtime > _ABANDONED):
            shutil.rmtree(other, ignore_errors=True)


def _flush(paths: Iterable[Path]) -> None:
    """Wait until files and directories are on the disk."""
    if os.name != "posix":  # Elsewhere directories cannot be opened.
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _last_bytes(file: Path, count: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(-count, os.SEEK_END)
        return opened.read()


def _with_axis(values: tuple[int, ...], axis: str, value: int) -> tuple[int, ...]:
    """`values` with another one for the shared axis."""
    return (value, *values[1:]) if axis == "first" else (*values[:-1], value)
