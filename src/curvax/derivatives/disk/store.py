"""Arrays on disk that are written block by block and survive interruptions.

A `BlockStore` is a Zarr array, or a Zarr group of arrays, whose chunks are the blocks. All arrays
have a common axis, their first or their last, and block i holds the same rows of it in each.

Nothing is ever half there. A new store is created next to its final path and renamed into place. A
block is done if there is a file named after it, its mark. The mark is written once the block has
been flushed to the disk, so that it also survives a crash of the machine. A block without a mark is
computed again. The attributes of a store, under "curvax", say which computation it belongs to, and
no other may write to it. Floating-point rows that are not done yet read as NaN.

Damage is detected. A chunk ends with its CRC-32C, by a codec of Zarr, so that any program that
reads it gets the values that were written or an error. That checksum covers bytes and not their
position, so the mark of a block holds its index and the checksums of its chunks: a chunk that is
copied over another one does not match the mark there. `open` checks for all blocks that are done
that their chunks exist, have the right size and end with the checksum in the mark; on request it
also reads them. It removes the marks of those that fail. Each `zarr.json` has a checksum of all
that the meaning of chunks depends on. A lost or damaged mark costs no more than its block.

In stores of earlier versions marks are empty. These stores are resumed all the same; an empty mark
only says that its block is done. The `zarr.json` of newer stores has `marks: "crc32c"`, and their
marks must match.

The marks are in `.curvax/done` of the array; of the first array, if there are several, because
Zarr warns about directories in a group that are not arrays.
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
from types import EllipsisType, ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from curvax._errors import check_size, where
from curvax._types import DType

if TYPE_CHECKING:
    import zarr

    ZarrArray: TypeAlias = zarr.Array[Any]
else:

    @runtime_checkable
    class ZarrArray(Protocol):
        """A `zarr.Array`. Zarr itself is optional, and takes long to import."""

        shape: tuple[int, ...]

        def __getitem__(self, selection: slice) -> NDArray[np.generic]: ...


FORMAT = 2

MARKS = "crc32c"
"""Content of marks besides the index of the block, as recorded in the `zarr.json` at the root."""

CommonAxis: TypeAlias = Literal["first", "last"]
"""The axis of all arrays of a store along which blocks are rows."""

Metadata: TypeAlias = dict[str, Any]
"""A JSON object: the attributes of a store under "curvax", or a `zarr.json`."""


@dataclass(frozen=True)
class ArraySpec:
    """An array of a store: its path in the output of `f`, its shape and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: DType


def check_specs(specs: Sequence[ArraySpec], axis: str, length: int) -> None:
    """Check that arrays have `length` rows along the common axis, and dtypes of Zarr."""
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


def metadata_of(specs: tuple[ArraySpec, ...], axis: str, length: int, fingerprint: str) -> Metadata:
    """Return the metadata of a store, except for the block size.

    They identify the computation, and are in the attributes of the root, under "curvax". Each
    `zarr.json` also has a SHA-256 of itself there, which distinguishes a damaged store from one of
    a different computation.
    """
    arrays = [
        {"name": spec.name, "shape": list(spec.shape), "dtype": str(spec.dtype)} for spec in specs
    ]
    common = {"axis": axis, "length": length, "fingerprint": fingerprint}
    return {"format": FORMAT, "marks": MARKS, "arrays": arrays, **common}


def recorded_in(path: Path) -> Metadata:
    """Return the metadata of the store at `path`; empty if curvax did not write it."""
    file = path / "zarr.json"
    if not file.is_file():
        return {}
    described = described_in(file) or {}
    recorded = described.get("attributes", {}).get("curvax")
    return recorded if isinstance(recorded, dict) else {}


def is_zarr(path: Path) -> bool:
    """Return whether there is a Zarr store at `path`, of any origin."""
    # The root of Zarr format 2.
    if any((path / name).is_file() for name in (".zarray", ".zgroup")):
        return True
    return "zarr_format" in (described_in(path / "zarr.json") or {})


def is_ours(path: Path, specs: Sequence[ArraySpec]) -> bool:
    """Return whether this is a store of such arrays and nothing else, even if it is damaged.

    It may be overwritten then, so a folder that contains stores must not be mistaken for one.
    """
    if not path.is_dir():
        return False
    found = {entry.name for entry in path.iterdir()}
    names = [""] if ".curvax" in found else zarr_names(specs)
    expected = {"zarr.json", *names} if names != [""] else {"zarr.json", "c", ".curvax"}
    is_marked = bool(names) and (path / names[0] / ".curvax" / "done").is_dir()
    return is_marked and found <= expected and (names == [""] or "zarr.json" in found)


def described_in(file: Path) -> Metadata | None:
    """Return the content of a `zarr.json`, or None if it is damaged or missing."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return None
    attributes = found.get("attributes", {}) if isinstance(found, dict) else None
    return found if isinstance(attributes, dict) else None


def checksum(described: Metadata) -> str:
    """Return a checksum of a `zarr.json`, except for attributes that users may have added."""
    of_zarr = {key: value for key, value in described.items() if key != "attributes"}
    of_curvax = described["attributes"]["curvax"]
    of_curvax = {key: value for key, value in of_curvax.items() if key != "checksum"}
    return hashlib.sha256(json.dumps([of_zarr, of_curvax], sort_keys=True).encode()).hexdigest()


def seal(file: Path) -> None:
    """Add the checksum to a `zarr.json`."""
    described = json.loads(file.read_text())
    described["attributes"]["curvax"]["checksum"] = checksum(described)
    file.write_text(json.dumps(described, indent=2))


def should_be_sealed(path: Path, recorded: Metadata) -> bool:
    """Return whether the store was apparently written by curvax, in this format."""
    return not is_zarr(path) or recorded.get("format") == FORMAT


def damaged_metadata(path: Path, names: Sequence[str]) -> list[str]:
    """Return which `zarr.json` files, of the arrays with these names, fail their checksum."""
    files = {f"{name}/zarr.json".lstrip("/"): path / name / "zarr.json" for name in names}
    return [name for name, file in files.items() if not is_sealed(file)]


def is_sealed(file: Path) -> bool:
    """Return whether a `zarr.json` matches its checksum."""
    described = described_in(file)
    if described is None:
        return False
    of_curvax = described.get("attributes", {}).get("curvax")
    return isinstance(of_curvax, dict) and of_curvax.get("checksum") == checksum(described)


def differences_of(recorded: Metadata, wanted: Metadata) -> list[str]:
    """Return the differences between a store and the one that is wanted, in words."""
    if not recorded:
        return ["it is a Zarr store that curvax did not write"]
    if recorded.get("format") != FORMAT:
        return [f"it is in format {recorded.get('format')}, and this curvax uses format {FORMAT}"]
    found: list[str] = []
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
            f"{wanted['fingerprint'][:12]} (the function, a constant or the inputs differ)"
        )
    return found


def zarr_names(specs: Sequence[ArraySpec]) -> list[str]:
    """Return unique, readable names that are valid on every file system; "" is the root."""
    if [spec.name for spec in specs] == [""]:
        return [""]
    names: list[str] = []
    taken: set[str] = set()
    for spec in specs:
        plain = re.sub(r"[^A-Za-z0-9_-]+", "_", spec.name).strip("_")[:100] or "array"
        count, name = 1, plain
        while name.casefold() in taken:
            count += 1
            name = f"{plain}_{count}"
        taken.add(name.casefold())
        names.append(name)
    return names


_CHECKSUM_BYTES = 4  # Of a chunk, by Zarr's codec "crc32c".
_ABANDONED = 60.0  # Seconds after which an unfinished new store is considered a leftover.


class DamagedStoreWarning(UserWarning):
    """Warning that blocks of a store were damaged, and are computed again.

    Examples:
        Raise an error instead:

        >>> import warnings
        >>> import curvax
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", curvax.DamagedStoreWarning)
        ...     # H, unflatten = curvax.hessian(f, x, out="hessian.zarr", verify=True)
    """


@dataclass(frozen=True)
class BlockStore:
    """Arrays on disk in blocks, open for writing. Created by `BlockStore.open`."""

    path: Path
    specs: tuple[ArraySpec, ...]
    axis: CommonAxis
    length: int
    block_size: int

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        specs: Sequence[ArraySpec],
        *,
        axis: CommonAxis,
        length: int,
        block_size: int | None,
        fingerprint: str,
        overwrite: bool,
        resume: bool = True,
        verify: bool = False,
    ) -> "BlockStore":
        """Open the store at `path`: resume one of the same computation, or create a new one.

        Arguments:
            path: Path of the store. A single array named "" is the root of the store.
            specs: The arrays, each with `length` rows along the common axis.
            axis: The common axis.
            length: Number of rows along the common axis.
            block_size: Number of rows in a block. None takes the size that the store has; a new
                store needs a size.
            fingerprint: Hash that identifies the computation.
            overwrite: Whether to replace a Zarr store of a different computation or block size, or
                a damaged one. A store of the same computation and block size is resumed anyway.
            resume: Whether to resume a store of the same computation. Otherwise it is replaced,
                even without `overwrite`.
            verify: Whether to read all blocks that are done and check their checksums. Otherwise it
                is only checked that their chunks exist, have the right size, and end with the
                checksum in the mark of the block.

        Returns:
            The store. Its `unfinished` blocks are to be written.

        Warns:
            DamagedStoreWarning: If blocks that were done are damaged. They count as unfinished.

        Raises:
            ImportError: If Zarr is not installed.
            TypeError: If Zarr does not support a dtype.
            FileExistsError: If there is something other than a Zarr store at `path`.
            ValueError: If the store is of a different computation, has another block size or
                damaged metadata, and `overwrite` is False; if the store is new and `block_size` is
                None; or if an array does not have `length` rows.
        """
        zarr = _import_zarr()
        given = check_size("block_size", block_size)
        size = None if given is None else min(given, max(1, length))
        path = Path(os.path.realpath(path))
        _remove_leftovers(path)
        recorded = cls.recorded_block_size(
            path, specs, axis=axis, length=length, fingerprint=fingerprint, overwrite=overwrite
        )
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
        rows_per_block = size if recorded is None else recorded
        assert rows_per_block is not None  # Checked above.
        store = cls(path, tuple(specs), axis, length, rows_per_block)
        if recorded is None:
            _create(zarr, store, metadata_of(store.specs, axis, length, fingerprint))
        else:
            store._discard_damaged(verify)
            if store.unfinished():
                store._remove_partial_chunks()
        return store

    @classmethod
    def recorded_block_size(
        cls,
        path: str | os.PathLike[str],
        specs: Sequence[ArraySpec],
        *,
        axis: CommonAxis,
        length: int,
        fingerprint: str,
        overwrite: bool,
    ) -> int | None:
        """Return the block size of the store that `open` would resume; None if it would create one.

        The errors of `open` are raised here already, except for those about the block size.
        """
        wanted = metadata_of(tuple(specs), axis, length, fingerprint)
        check_specs(specs, axis, length)
        path = Path(os.path.realpath(path))
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return None
        if not is_zarr(path) and not is_ours(path, specs):
            kind = "a directory that is not a Zarr store" if path.is_dir() else "a file"
            raise FileExistsError(
                f"{where()}: {path} is {kind}. It is not touched, even with overwrite=True: choose "
                f"another path, or remove it yourself."
            )
        recorded = recorded_in(path)
        differences: list[str] = []
        # The metadata of a damaged store cannot be compared.
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
                f"it was written, so that its values cannot be trusted. Pass overwrite=True to "
                f"compute them again, or choose another path."
            )
        raise ValueError(
            f"{where()}: {path} holds something else: {'; '.join(differences)}. Choose another "
            f"path, or pass overwrite=True to replace it."
        )

    @property
    def num_blocks(self) -> int:
        """Number of blocks; zero if the arrays have no elements."""
        some = any(0 not in spec.shape for spec in self.specs)
        return -(-self.length // self.block_size) if some else 0

    def rows(self, index: int) -> slice:
        """Return the rows of a block along the common axis."""
        return slice(index * self.block_size, min((index + 1) * self.block_size, self.length))

    def unfinished(self) -> list[int]:
        """Return the indices of the blocks that are not done, in order."""
        marks = self._marks()
        done = set(os.listdir(marks)) if marks.is_dir() else set[str]()
        return [index for index in range(self.num_blocks) if str(index) not in done]

    def write(self, index: int, blocks: Sequence[NDArray[Any]]) -> None:
        """Write one block of every array, flush it to the disk, and mark it as done."""
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
        """Return the indices of the blocks that are marked as done, but damaged.

        Arguments:
            verify: Whether to read them and check their checksums, one block at a time. Otherwise
                only the sizes of their chunks are checked, and the checksums at the ends of chunks
                are compared with the marks.
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
            except (ValueError, OSError):  # Of Zarr, for a wrong checksum; of the disk.
                return False
            return True

        return [index for index in done if not is_intact(index)]

    def _discard_damaged(self, verify: bool) -> None:
        """Unmark damaged blocks as done, with a warning, so that they are computed again."""
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

    def arrays(self) -> list[ZarrArray]:
        """Return the arrays as read-only `zarr.Array`s, in the order of the specs."""
        return self._open("r")

    def _open(self, mode: Literal["r", "r+"]) -> list[ZarrArray]:
        zarr = _import_zarr()
        store = zarr.storage.LocalStore(self.path, read_only=mode == "r")
        # Write chunks of zeros like any other, so that every mark has its chunks. Zarr reads this
        # setting when it opens an array, and does not always respect the argument.
        with zarr.config.set({"array.write_empty_chunks": True}):
            return [zarr.open_array(store=store, path=name, mode=mode) for name in self._names()]

    def _names(self) -> list[str]:
        return zarr_names(self.specs)

    def _marks(self) -> Path:
        return self.path / next(iter(self._names()), "") / ".curvax" / "done"

    def _key(self, index: int) -> slice | tuple[EllipsisType, slice]:
        """Return the index expression of a block in an array."""
        rows = self.rows(index)
        return rows if self.axis == "first" else (..., rows)

    def _chunks(self, index: int) -> list[Path]:
        """Return the chunk files of a block, one for each array that has elements."""
        arrays = zip(self.specs, self._names(), strict=True)
        return [
            self._chunk(self.path / name, spec, index)
            for spec, name in arrays
            if 0 not in spec.shape
        ]

    def _chunk(self, array: Path, spec: ArraySpec, index: int) -> Path:
        """Return the chunk file of a block of an array."""
        position = _with_axis((0,) * len(spec.shape), self.axis, index)
        return array.joinpath("c", *map(str, position))

    def _mark(self, index: int) -> bytes:
        """Return the content of the mark of a block on the disk: its index and its checksums."""
        checksums = [_last_bytes(chunk, _CHECKSUM_BYTES).hex() for chunk in self._chunks(index)]
        return " ".join([str(index), *checksums]).encode()

    def _flush_chunk(self, array: Path, chunk: Path) -> None:
        above = [parent for parent in chunk.parents if parent.is_relative_to(array)]
        _flush([chunk, *above])

    def _remove_partial_chunks(self) -> None:
        """Remove temporary files of chunks and marks that a killed process left."""
        folders = [self._marks(), *(self.path / name / "c" for name in self._names())]
        for partial in (file for folder in folders for file in folder.rglob("*.partial")):
            partial.unlink(missing_ok=True)


def check_path(out: object) -> Path:
    """Return the user-supplied path of a store as an absolute path with links resolved."""
    if not isinstance(out, str | os.PathLike) or not isinstance(os.fspath(out), str):
        raise TypeError(f"{where()}: out must be a path, got {type(out).__name__} {out!r}.")
    if not os.fspath(out):
        raise ValueError(f"{where()}: out must be a path such as 'result.zarr', got ''.")
    path = Path(os.path.realpath(out))
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{where()}: out={os.fspath(out)!r} cannot be created, because {path.parent} is not an "
            f"existing directory. Create it first."
        )
    return path


def _import_zarr() -> ModuleType:
    advice = f"{where()}: results on disk need zarr 3.1 or newer. Run pip install 'curvax[disk]'."
    try:
        import zarr
    except ImportError as error:
        raise ImportError(advice) from error
    if not hasattr(zarr, "create_array"):
        raise ImportError(f"{advice} The one installed is {zarr.__version__}.")
    return zarr


def _create(zarr: ModuleType, store: BlockStore, metadata: Metadata) -> None:
    """Create an empty store next to its final path, and rename it, replacing an old one."""
    path, attributes = store.path, {"curvax": {**metadata, "block_size": store.block_size}}
    names = zarr_names(store.specs)
    new = _temporary_path(path, "new")
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
            old = _temporary_path(path, "old")
            os.rename(path, old)
            os.rename(new, path)
            shutil.rmtree(old)
        else:  # There is nothing, or an empty directory, which a rename replaces.
            os.rename(new, path)
        _flush([path.parent])
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _temporary_path(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.curvax-{kind}-{uuid.uuid4().hex[:12]}")


def _remove_leftovers(path: Path) -> None:
    """Remove what processes left that were killed while they created or replaced this store."""
    if not path.parent.is_dir():
        return
    for other in path.parent.iterdir():
        old = other.name.startswith(f".{path.name}.curvax-old-")
        new = other.name.startswith(f".{path.name}.curvax-new-")
        # Another process may be creating a new one right now.
        if old or (new and time.time() - other.stat().st_mtime > _ABANDONED):
            shutil.rmtree(other, ignore_errors=True)


def _flush(paths: Iterable[Path]) -> None:
    """Flush files and directories to the disk."""
    if os.name != "posix":  # On Windows directories cannot be opened.
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
    """Return `values`, one for each axis, with another value for the common axis."""
    return (value, *values[1:]) if axis == "first" else (*values[:-1], value)
