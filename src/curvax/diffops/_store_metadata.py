"""What a store on disk says of itself in its `zarr.json` files, and whether that can be relied on.

Which computation a store belongs to is in the attributes of its root, under "curvax". Each
`zarr.json` also has a SHA-256 of itself there, so that one that is damaged is told from one of
something else.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "FORMAT",
    "ArraySpec",
    "check_specs",
    "damaged_metadata",
    "differences_of",
    "is_ours",
    "is_zarr",
    "metadata_of",
    "recorded_in",
    "seal",
    "should_be_sealed",
    "zarr_names",
]

FORMAT = 2


@dataclass(frozen=True)
class ArraySpec:
    """An array of a store: its name in the user's words, its shape and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def check_specs(specs: Sequence[ArraySpec], axis: str, length: int, where: str) -> None:
    for spec in specs:
        if not spec.shape or spec.shape[0 if axis == "first" else -1] != length:
            raise ValueError(
                f"{where}: array {spec.name!r} of shape {spec.shape} must have {length} rows along "
                f"its {axis} axis."
            )
        if spec.dtype.kind not in "biufc" or spec.dtype.isbuiltin != 1:
            raise TypeError(
                f"{where}: array {spec.name!r} is of dtype {spec.dtype}, which Zarr cannot store. "
                f"Let the function return float32, for example."
            )


def metadata_of(
    specs: tuple[ArraySpec, ...], axis: str, length: int, fingerprint: str
) -> dict[str, Any]:
    """What a store says of itself, but for the block size."""
    arrays = [
        {"name": spec.name, "shape": list(spec.shape), "dtype": str(spec.dtype)} for spec in specs
    ]
    shared = {"axis": axis, "length": length, "fingerprint": fingerprint}
    return {"format": FORMAT, "arrays": arrays, **shared}


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
