"""What is written in blocks reads back whole, whatever happens in between."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings, strategies as st

from curvax.derivatives.disk.store import (
    ArraySpec,
    BlockStore,
    DamagedStoreWarning,
    check_path,
    seal,
)
from curvax.derivatives.disk.stream import disk_errors

WHERE = "curvax"


def spec(name="", shape=(10, 3), dtype="float64"):
    return ArraySpec(name, shape, np.dtype(dtype))


def open_store(path, specs=None, **changes):
    options = {"axis": "first", "length": 10, "block_size": 4, "fingerprint": "a" * 64}
    options |= {"overwrite": False} | changes
    return BlockStore.open(path, [spec()] if specs is None else specs, **options)


def values(of, number=0):
    return np.arange(number, number + np.prod(of.shape)).reshape(of.shape).astype(of.dtype)


def blocks_of(store, index):
    rows = store.rows(index)
    key = rows if store.axis == "first" else (..., rows)
    return [values(of, number)[key] for number, of in enumerate(store.specs)]


def fill(store, indices=None):
    for index in store.unfinished() if indices is None else indices:
        store.write(index, blocks_of(store, index))


def assert_complete(store):
    assert store.unfinished() == []
    for number, (array, of) in enumerate(zip(store.arrays(), store.specs, strict=True)):
        assert array.dtype == of.dtype
        np.testing.assert_array_equal(array[...], values(of, number))


def refuses(error, words):
    return pytest.raises(error, match=rf"^{WHERE}: .*{words}")


class TestRoundTrip:
    @settings(max_examples=15)
    @given(
        length=st.integers(0, 9),
        block_size=st.integers(1, 10),
        axis=st.sampled_from(["first", "last"]),
        other=st.sampled_from([(), (3,), (2, 0), (2, 3)]),
        dtype=st.sampled_from(["float32", "float64", "complex64", "float16", "int32", "bool"]),
    )
    def test_blocks_make_up_the_array(
        self, tmp_path_factory, length, block_size, axis, other, dtype
    ):
        shapes = [other, (2,)]
        shapes = [(length, *s) if axis == "first" else (*s, length) for s in shapes]
        specs = [spec("['w'][0]", shapes[0], dtype), spec("['w'][1]", shapes[1])]
        path = tmp_path_factory.mktemp("stores") / "x.zarr"
        options = {"axis": axis, "length": length, "block_size": block_size}
        store = open_store(path, specs, **options)
        fill(store)
        assert_complete(store)
        assert_complete(open_store(path, specs, **options | {"block_size": None}))

    def test_one_array_without_a_name_is_the_root(self, tmp_path):
        store = open_store(tmp_path / "x.zarr")
        fill(store)
        array = zarr.open_array(str(tmp_path / "x.zarr"), mode="r")
        np.testing.assert_array_equal(array[...], values(spec()))
        assert array.chunks == (4, 3)
        assert array.attrs["curvax"]["fingerprint"] == "a" * 64

    def test_names_are_safe_unique_and_stored(self, tmp_path):
        names = ["['w'][0]", "['W'](0)", "", "../x", "b", "b"]
        fill(open_store(tmp_path / "x.zarr", [spec(name) for name in names]))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            members = dict(zarr.open_group(str(tmp_path / "x.zarr"), mode="r").members())
        assert set(members) == {"w_0", "W_0_2", "array", "x", "b", "b_2"}
        assert sorted(x.attrs["curvax"]["name"] for x in members.values()) == sorted(names)

    def test_a_store_of_no_elements_has_no_blocks(self, tmp_path):
        cases = [(0, [spec("", (0, 3))]), (10, [spec("", (10, 0))]), (10, [])]
        for number, (length, specs) in enumerate(cases):
            store = open_store(tmp_path / f"{number}", specs, length=length)
            assert store.unfinished() == []
            assert_complete(open_store(tmp_path / f"{number}", specs, length=length))

    @pytest.mark.parametrize("value", [0.0, np.nan, np.int32(0), False], ids=str)
    def test_blocks_of_zeros_are_written_too(self, tmp_path, value):
        block = np.full((4, 3), value)
        store = open_store(tmp_path / "x.zarr", [spec("", (10, 3), block.dtype)])
        store.write(0, [block])
        checksum = 4
        assert (tmp_path / "x.zarr/c/0/0").stat().st_size == block.nbytes + checksum

    def test_unfinished_blocks_read_as_nan(self, tmp_path):
        store = open_store(tmp_path / "x.zarr")
        fill(store, [1])
        (array,) = store.arrays()
        assert np.isnan(array[:4]).all()
        assert np.isnan(array[8:]).all()
        np.testing.assert_array_equal(array[4:8], values(spec())[4:8])

    def test_arrays_are_for_reading(self, tmp_path):
        (array,) = open_store(tmp_path / "x.zarr").arrays()
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0


class TestResume:
    def test_only_unfinished_blocks_are_left(self, tmp_path):
        store = open_store(tmp_path / "x.zarr")
        assert store.unfinished() == [0, 1, 2]
        fill(store, [1])
        store = open_store(tmp_path / "x.zarr", block_size=None)
        assert (store.block_size, store.unfinished()) == (4, [0, 2])
        fill(store)
        assert_complete(open_store(tmp_path / "x.zarr", overwrite=True))

    def test_the_recorded_block_size_can_be_asked_for(self, tmp_path):
        options = {"axis": "first", "length": 10, "fingerprint": "a" * 64}
        ask = lambda **more: BlockStore.recorded_block_size(
            tmp_path / "x.zarr", [spec()], **options | {"overwrite": False} | more
        )
        assert ask() is None
        open_store(tmp_path / "x.zarr")
        assert ask() == 4
        assert ask(fingerprint="b" * 64, overwrite=True) is None
        with refuses(ValueError, "fingerprint"):
            ask(fingerprint="b" * 64)

    def test_another_block_size_is_rejected(self, tmp_path):
        fill(open_store(tmp_path / "x.zarr"))
        with refuses(ValueError, r"in blocks of 4, but blocks of 5 .* give 4.*overwrite=True"):
            open_store(tmp_path / "x.zarr", block_size=5)
        assert_complete(open_store(tmp_path / "x.zarr"))
        assert open_store(tmp_path / "x.zarr", block_size=5, overwrite=True).unfinished() == [0, 1]

    def test_a_block_as_long_as_all_is_one_block(self, tmp_path):
        assert open_store(tmp_path / "x.zarr", block_size=100).block_size == 10
        assert open_store(tmp_path / "x.zarr", block_size=200).unfinished() == [0]

    def test_a_link_is_followed(self, tmp_path):
        (tmp_path / "link").symlink_to(tmp_path / "x.zarr")
        fill(open_store(tmp_path / "link"))
        assert_complete(open_store(tmp_path / "x.zarr"))


OTHERS = {
    "fingerprint": ({"fingerprint": "b" * 64}, "fingerprint is aaaaaaaaaaaa instead of bbbb"),
    "shape": ({"specs": [spec("", (10, 4))]}, r"shape of array '' is \[10, 3\] instead of \[10, 4"),
    "dtype": ({"specs": [spec("", (10, 3), "float32")]}, "is float64 instead of float32"),
    "axis": (
        {"axis": "last", "length": 3},
        "axis is first instead of last; its length is 10 instead of 3",
    ),
    "names": ({"specs": [spec("w")]}, r"the arrays \[''\] instead of \['w'\]"),
}


class TestWhatIsInTheWay:
    @pytest.mark.parametrize("what", OTHERS)
    def test_a_store_of_something_else_is_rejected_and_kept(self, tmp_path, what):
        changes, words = OTHERS[what]
        path = tmp_path / "x.zarr"
        fill(open_store(path))
        with refuses(ValueError, rf"holds something else: .*{words}.*overwrite=True"):
            open_store(path, **changes)
        assert_complete(open_store(path))
        fill(open_store(path, **changes, overwrite=True))
        assert_complete(open_store(path, **changes))
        assert os.listdir(tmp_path) == ["x.zarr"]

    @pytest.mark.parametrize("zarr_format", [2, 3])
    def test_a_foreign_store_is_rejected_and_kept(self, tmp_path, zarr_format):
        path = tmp_path / "x.zarr"
        array = zarr.create_array(str(path), shape=3, dtype="f8", zarr_format=zarr_format)
        array[:] = 1.0
        with refuses(ValueError, "a Zarr store that curvax did not write"):
            open_store(path)
        assert (zarr.open_array(str(path), mode="r")[:] == 1.0).all()
        fill(open_store(path, overwrite=True))
        assert_complete(open_store(path))

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_path_that_is_no_store_is_never_touched(self, tmp_path, overwrite):
        (tmp_path / "home").mkdir()
        for name in ("file", "home/thesis.tex", "home/zarr.json"):
            (tmp_path / name).write_text("mine")
        for name, kind in {"file": "a file", "home": "a directory that is not a Zarr"}.items():
            with refuses(FileExistsError, rf"is {kind}.* not touched"):
                open_store(tmp_path / name, overwrite=overwrite)
        for name in ("file", "home/thesis.tex", "home/zarr.json"):
            assert (tmp_path / name).read_text() == "mine"

    def test_an_empty_directory_is_used(self, tmp_path):
        (tmp_path / "x.zarr").mkdir()
        fill(open_store(tmp_path / "x.zarr"))
        assert_complete(open_store(tmp_path / "x.zarr"))

    def test_a_store_of_a_later_format_is_rejected(self, tmp_path):
        open_store(tmp_path / "x.zarr")
        file = tmp_path / "x.zarr/zarr.json"
        file.write_text(file.read_text().replace('"format": 2', '"format": 9'))
        with refuses(ValueError, "in format 9, and this curvax uses format 2"):
            open_store(tmp_path / "x.zarr")


class TestArguments:
    def test_a_block_must_fit(self, tmp_path):
        store = open_store(tmp_path / "x.zarr")
        for block in (np.zeros((3, 3)), np.zeros((4, 3), np.float32)):
            with pytest.raises(ValueError, match=r"block 0 of array '' must be float64\[4, 3\], g"):
                store.write(0, [block])
        with pytest.raises(ValueError, match="2 blocks for 1 arrays"):
            store.write(0, [np.zeros((4, 3))] * 2)
        with pytest.raises(IndexError, match=r"block 3 of .*which has 3 blocks"):
            store.write(3, [np.zeros((4, 3))])
        assert store.unfinished() == [0, 1, 2]

    def test_a_new_store_needs_a_block_size(self, tmp_path):
        with refuses(ValueError, "needs a block_size"):
            open_store(tmp_path / "x.zarr", block_size=None)
        with refuses(ValueError, "block_size must be at least 1, got 0"):
            open_store(tmp_path / "x.zarr", block_size=0)

    @pytest.mark.parametrize("shape", [(), (9, 10)])
    def test_arrays_have_the_shared_axis(self, tmp_path, shape):
        with refuses(ValueError, "must have 10 rows along its first axis"):
            open_store(tmp_path / "x.zarr", [spec("", shape)])

    def test_a_dtype_that_zarr_lacks_is_rejected(self, tmp_path):
        with refuses(TypeError, "of dtype bfloat16, which Zarr cannot store"):
            open_store(tmp_path / "x.zarr", [spec("", (10, 3), "bfloat16")])

    def test_out_is_a_path_in_a_directory(self, tmp_path):
        assert check_path(str(tmp_path / "x")) == check_path(tmp_path / "x")
        for out in (3, None, b"x"):
            with refuses(TypeError, "out must be a path, got"):
                check_path(out)
        with refuses(ValueError, "out must be a path such as"):
            check_path("")
        with refuses(FileNotFoundError, r"no is not an existing directory\. Create it"):
            check_path(tmp_path / "no" / "x")

    @pytest.mark.parametrize("missing", [None, type(sys)("zarr")])
    def test_a_missing_zarr_says_what_to_install(self, tmp_path, monkeypatch, missing):
        if missing is not None:
            missing.__version__ = "2.18"
        monkeypatch.setitem(sys.modules, "zarr", missing)
        with refuses(ImportError, r"pip install 'curvax\[disk\]'"):
            open_store(tmp_path / "x.zarr")


SPECS = {"array": [spec()], "group": [spec("a"), spec("b", (10,), "float32")]}


def emptied(file):
    file.write_bytes(b"")


def truncated(file):
    file.write_bytes(file.read_bytes()[:-1])


def flipped(file, position=None, bit=1):
    content = bytearray(file.read_bytes())
    content[len(content) // 2 if position is None else position] ^= bit
    file.write_bytes(content)


FAULTS = {
    "deleted": Path.unlink,
    "emptied": emptied,
    "truncated": truncated,
    "first byte": lambda file: flipped(file, 0),
    "a byte": flipped,
    "last byte": lambda file: flipped(file, -1),
}


def files_of(path):
    return sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file())


class TestDamage:
    """Whatever happens to a file of a store, no other number is read than was written."""

    @pytest.fixture(params=SPECS)
    def stored(self, request, tmp_path):
        """A finished store, and its arrays."""
        path = tmp_path / "finished.zarr"
        fill(open_store(path, SPECS[request.param]))
        return path, SPECS[request.param]

    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("verify", [False, True])
    def test_each_kind_of_file(self, stored, tmp_path, fault, verify):
        path, specs = stored
        for name in files_of(path):
            copy = tmp_path / name.replace("/", "-") / "x.zarr"
            shutil.copytree(path, copy)
            FAULTS[fault](copy / name)
            found = self.reopened(copy, specs, verify)
            kind = "mark" if "done" in name else "metadata" if "zarr.json" in name else "chunk"
            # The last bytes of a chunk are its checksum, which the mark has, too.
            flipped = fault in ("first byte", "a byte")
            assert (
                found
                == {
                    "mark": "as it was" if fault == "deleted" else "repaired",
                    "metadata": "refused",
                    "chunk": "Zarr's error" if flipped and not verify else "repaired",
                }[kind]
            ), name

    def test_any_byte_of_the_metadata(self, stored):
        """It is refused, or says the same: in white space, for example."""
        path, specs = stored
        random = np.random.default_rng(0)
        outcomes = []
        for name in (name for name in files_of(path) if name.endswith("zarr.json")):
            file = path / name
            before = file.read_bytes()
            for position in random.choice(len(before), 60, replace=False):
                flipped(file, position, 1 << random.integers(7))
                outcomes.append(self.reopened(path, specs, verify=False, refill=False))
                file.write_bytes(before)
        assert set(outcomes) <= {"as it was", "refused"}
        assert outcomes.count("refused") > len(outcomes) / 2

    def reopened(self, path, specs, verify, refill=True):
        """What becomes of a store that is opened, finished and read. All that is read is right."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                store = open_store(path, specs, verify=verify)
            except (ValueError, FileExistsError) as error:
                assert str(error).startswith(f"{WHERE}: {path} ")  # noqa: PT017
                return "refused"
        warned = {each.category for each in caught}
        if refill:
            fill(store)
        try:
            assert_complete(store)
        except ValueError as error:
            assert "checksum do not match" in str(error)  # noqa: PT017
            return "Zarr's error"
        assert warned <= {DamagedStoreWarning}
        return "repaired" if warned else "as it was"

    def test_what_is_said(self, stored, tmp_path):
        path, specs = stored
        copy = tmp_path / "x.zarr"
        shutil.copytree(path, copy)
        chunks = [name for name in files_of(copy) if "/c/" in f"/{name}"]
        (copy / chunks[0]).unlink()
        words = rf"^{WHERE}: 1 of the 3 blocks of .* are damaged: .*\(blocks 0\)"
        with pytest.warns(DamagedStoreWarning, match=words):
            assert open_store(copy, specs).unfinished() == [0]

    @pytest.mark.parametrize("verify", [False, True])
    def test_a_chunk_moved_to_another_index(self, stored, tmp_path, verify):
        """Its own checksum is right, but not in this place: also where the mark was copied, too."""
        path, specs = stored
        for chunk in (file for file in path.rglob("*") if "c" in file.relative_to(path).parts):
            if not chunk.is_file():
                continue
            name = str(chunk.relative_to(path))
            other = re.sub(r"\bc/(\d)", lambda found: f"c/{(int(found[1]) + 1) % 3}", name)
            for with_mark in (False, True):
                copy = tmp_path / f"{name.replace('/', '-')}-{with_mark}" / "x.zarr"
                shutil.copytree(path, copy)
                shutil.copyfile(copy / other, copy / name)
                if with_mark:
                    done = next(copy.rglob("done"))
                    numbers = [re.search(r"\bc/(\d)", each)[1] for each in (other, name)]
                    shutil.copyfile(*(done / number for number in numbers))
                assert self.reopened(copy, specs, verify) == "repaired", name

    @pytest.mark.parametrize("verify", [False, True])
    def test_marks_of_earlier_versions_are_empty(self, stored, verify):
        """Their stores do not say what a mark holds. They are read and continued."""
        path, specs = stored
        for mark in next(path.rglob("done")).iterdir():
            mark.write_bytes(b"")
        described = json.loads((path / "zarr.json").read_text())
        del described["attributes"]["curvax"]["marks"]
        (path / "zarr.json").write_text(json.dumps(described))
        seal(path / "zarr.json")
        assert self.reopened(path, specs, verify) == "as it was"
        (next(path.rglob("done")) / "1").unlink()
        assert open_store(path, specs).unfinished() == [1]
        assert self.reopened(path, specs, verify) == "as it was"
        folder = path / (specs[0].name and "a")
        shutil.copyfile(folder / "c/0/0", folder / "c/1/0")
        assert self.reopened(path, specs, verify) == "repaired"  # Block 1 has a mark of today.

    def test_damaged_metadata_can_be_overwritten(self, stored, tmp_path):
        path, specs = stored
        for number, fault in enumerate(FAULTS.values()):
            copy = tmp_path / f"{number}.zarr"
            shutil.copytree(path, copy)
            fault(copy / "zarr.json")
            if len(specs) > 1 and not (copy / "zarr.json").exists():
                with refuses(FileExistsError, "not a Zarr store.* remove it yourself"):
                    open_store(copy, specs, overwrite=True)
                shutil.rmtree(copy)
            else:
                words = r"is damaged: zarr.json cannot be read .*overwrite=True to compute them a"
                with refuses(ValueError, words):
                    open_store(copy, specs)
            fill(open_store(copy, specs, overwrite=True))
            assert_complete(open_store(copy, specs))

    @pytest.mark.parametrize("which", SPECS)
    def test_a_folder_of_stores_is_no_damaged_store(self, tmp_path, which):
        """It must not be replaced, whatever is overwritten."""
        folder = tmp_path / "results"
        folder.mkdir()
        for name in "ab":
            fill(open_store(folder / name))
        (folder / "thesis.tex").write_text("mine")
        (folder / "zarr.json").write_text("")
        with refuses(FileExistsError, "not a Zarr store"):
            open_store(folder, SPECS[which], overwrite=True)
        assert_complete(open_store(folder / "a"))

    def test_attributes_of_others_are_no_damage(self, tmp_path):
        fill(open_store(tmp_path / "x.zarr"))
        zarr.open_array(str(tmp_path / "x.zarr"), mode="r+").attrs["comment"] = "from May"
        assert_complete(open_store(tmp_path / "x.zarr"))

    @pytest.mark.parametrize(
        ("code", "words"),
        [(errno.ENOSPC, "Make room, or choose"), (errno.EROFS, "Choose a path that can be wr")],
    )
    def test_the_system_refuses_to_write(self, tmp_path, code, words):
        refused = pytest.raises(OSError, match=rf"{WHERE}: cannot write to .*{words}")
        with refused as info, disk_errors(tmp_path):
            raise OSError(code, "raw")
        assert info.value.errno == code
        with pytest.raises(OSError, match="raw"), disk_errors(tmp_path):
            raise OSError(errno.EIO, "raw")


# Slow enough to be killed in the middle, and quick to start: neither JAX programs nor compilers.
WORKER = """
import sys, time, zarr  # Imported before it is ready, so that kills hit the writing.
import numpy as np
from curvax.derivatives.disk.store import ArraySpec, BlockStore

specs = [ArraySpec("a", (40, 2000), np.dtype("f8")), ArraySpec("b", (40,), np.dtype("f4"))]
print("ready", flush=True)
store = BlockStore.open(sys.argv[1], specs, axis="first", length=40, block_size=3,
                        fingerprint="k", overwrite=False)
for index in store.unfinished():
    rows = store.rows(index)
    time.sleep(0.03)
    a, b = np.arange(80000.0).reshape(40, 2000), np.arange(40, dtype="f4")
    store.write(index, [a[rows], b[rows]])
    print(index, flush=True)
"""


def work(path, seconds):
    """Run the worker, killed after some seconds; the blocks it said to be done."""
    command = [sys.executable, "-c", WORKER, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        if seconds is not None:
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)
        said = [int(line) for line in process.stdout.read().split()]
    assert process.returncode in ({0} if seconds is None else {0, -signal.SIGKILL})
    return said


class TestKilled:
    @pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
    def test_the_result_is_that_of_an_uninterrupted_run(self, tmp_path, kills):
        path, random = tmp_path / "x.zarr", np.random.default_rng()
        said = [work(path, random.uniform(0.0, 0.8 if kills == 3 else 0.4)) for _ in range(kills)]
        said.append(work(path, None))
        work(tmp_path / "whole.zarr", None)
        done = [index for run in said for index in run]
        assert len(done) == len(set(done))
        files = lambda root: {
            str(file.relative_to(root)): file.read_bytes()
            for file in Path(root).rglob("*")
            if file.is_file()
        }
        assert files(path) == files(tmp_path / "whole.zarr")

    def test_a_mark_never_precedes_its_data(self, tmp_path, monkeypatch):
        """Whichever array of a block fails to be written, the block is not done."""
        specs = [spec("a"), spec("b")]
        store = open_store(tmp_path / "x.zarr", specs)

        def fail():
            raise KeyboardInterrupt

        for count in range(2):
            calls = iter([lambda: None] * count + [fail])
            with monkeypatch.context() as patch:
                patch.setattr(BlockStore, "_flush_chunk", lambda *_, calls=calls: next(calls)())
                with pytest.raises(KeyboardInterrupt):
                    fill(store, [0])
            assert open_store(tmp_path / "x.zarr", specs).unfinished() == [0, 1, 2]
        replace, made = Path.replace, []

        def checked(partial, mark):
            if mark.parent.name == "done":
                made.append(mark.name)
                assert all((tmp_path / f"x.zarr/{name}/c/{mark.name}/0").is_file() for name in "ab")
            return replace(partial, mark)

        monkeypatch.setattr(Path, "replace", checked)
        fill(store)
        assert made == ["0", "1", "2"]
        assert_complete(store)

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("call", ["mkdir", "_flush", "rename", "rmtree"])
    def test_killed_while_creating_leaves_nothing_or_a_store(self, tmp_path, call, overwrite):
        """The process ends, without clean-up, at the n-th of the calls that change the disk."""
        path = tmp_path / "x.zarr"
        if overwrite:
            open_store(path, fingerprint="b" * 64)
        code = f"""
import os, shutil, sys
import numpy as np, zarr
from pathlib import Path
from curvax.derivatives.disk import store
where = {{"mkdir": Path, "_flush": store, "rename": os, "rmtree": shutil}}[{call!r}]
original = getattr(where, {call!r})
def die_after(*args, **options):
    original(*args, **options) if {call!r} != "rmtree" else None
    os._exit(9)
setattr(where, {call!r}, die_after)
store.BlockStore.open({str(path)!r}, [store.ArraySpec("", (10, 3), np.dtype("f8"))], axis="first",
    length=10, block_size=4, fingerprint="a" * 64, overwrite={overwrite})
"""
        killed = subprocess.run([sys.executable, "-c", code], check=False)
        assert killed.returncode == 9
        for other in tmp_path.iterdir():
            os.utime(other, (0, 0))  # As found by who comes back after a while.
        store = open_store(path, overwrite=overwrite)
        assert store.unfinished() == [0, 1, 2]
        fill(store)
        assert_complete(open_store(path))
        assert os.listdir(tmp_path) == ["x.zarr"]

    def test_a_store_in_the_making_elsewhere_is_left_alone(self, tmp_path):
        (tmp_path / ".x.zarr.curvax-new-0").mkdir()
        open_store(tmp_path / "x.zarr")
        assert (tmp_path / ".x.zarr.curvax-new-0").is_dir()

    def test_partly_written_chunks_are_removed(self, tmp_path):
        fill(open_store(tmp_path / "x.zarr"), [0])
        partial = tmp_path / "x.zarr/c/1/0.0123.partial"
        partial.parent.mkdir()
        partial.write_text("half")
        fill(open_store(tmp_path / "x.zarr"))
        assert not partial.exists()
        assert_complete(open_store(tmp_path / "x.zarr"))
