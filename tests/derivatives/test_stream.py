"""What goes to disk is what would be in memory, also if the process is killed on the way."""

import errno
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr

import curvax
from curvax import MemoryBudgetError, hessian, jacobian
from curvax.derivatives.disk import stream
from curvax.derivatives.disk.store import BlockStore
from derivatives.functions import MIXED, mixed, mixed_loss, naive_jacobian, normal
from helpers import assert_same

pytestmark = pytest.mark.optimised

X = normal(0, 7)
PROGRAM = Path(__file__).parent / "streamed_program.py"


def loss(x):
    return jnp.sum(jnp.sin(x) ** 3) * x[0]


hessian_of_loss = jax.jit(jax.hessian(loss))


def vector(x):
    return jnp.sin(x[:3]) * x[0]


def test_a_budgeted_plan_is_recorded(tmp_path):
    with curvax.recorded_plans() as plans:
        hessian(loss, X, out=tmp_path / "H.zarr", memory_budget="1MB")
    assert [plan.max_size for plan in plans] == [7]


class TestResult:
    """To the last bits: it is another program than that for memory, which may round otherwise."""

    @pytest.mark.parametrize("way", [{"batch_size": 3}, {"nbatches": 7}], ids=str)
    def test_a_hessian_is_that_in_memory(self, tmp_path, way):
        H, unflatten = hessian(loss, X, **way, out=tmp_path / "H.zarr")
        assert isinstance(H, zarr.Array)
        assert_same(H[...], hessian(loss, X, **way)[0], 1e-14, 1e-14)
        assert_same(unflatten(X), X)

    @pytest.mark.parametrize("mode", ["forward", "reverse"])
    @pytest.mark.parametrize("size", [1, 2, 10])
    def test_a_jacobian_is_that_in_memory(self, tmp_path, mode, size):
        options = {"batch_size": size, "mode": mode, "checkpoint": size == 2}
        J, _ = jacobian(vector, X, **options, out=str(tmp_path / "J.zarr"))
        assert_same(J[...], jacobian(vector, X, **options)[0], 1e-14, 1e-14)

    def test_several_arrays_are_a_group(self, tmp_path):
        J, _ = jacobian(mixed, MIXED, batch_size=3, out=tmp_path / "J.zarr")
        assert_same(
            jax.tree.map(lambda array: array[...], J), naive_jacobian(mixed, MIXED), 1e-5, 1e-5
        )
        group = zarr.open_group(str(tmp_path / "J.zarr"), mode="r")
        assert {name for name, _ in group.arrays()} == {"double_0", "double_1", "single"}

    def test_scalars_and_matrices(self, tmp_path):
        for name, f in (("scalar", loss), ("matrix", lambda x: jnp.outer(x, x[:2]))):
            J, _ = jacobian(f, X, batch_size=2, out=tmp_path / name)
            assert_same(jnp.asarray(J[...]), naive_jacobian(f, X))

    def test_mixed_dtypes_and_numbers(self, tmp_path):
        H, _ = hessian(mixed_loss, MIXED, batch_size=4, out=tmp_path / "H.zarr")
        assert_same(H[...], hessian(mixed_loss, MIXED, batch_size=4)[0], 1e-5, 1e-5)
        f = lambda p: p["a"] ** 2 * p["b"]
        H, _ = hessian(f, {"a": 3.0, "b": np.float64(2.0)}, out=tmp_path / "numbers.zarr")
        np.testing.assert_allclose(H[...], [[4, 6], [6, 0]])

    def test_aux_is_returned_also_when_there_is_nothing_left_to_do(self, tmp_path):
        f = lambda x: (loss(x), {"sum": jnp.sum(x)})
        for _ in range(2):
            H, _, aux = hessian(f, X, batch_size=3, has_aux=True, out=tmp_path / "H.zarr")
            assert_same(aux, f(X)[1])
            assert_same(jnp.asarray(H[...]), hessian_of_loss(X))

    def test_nothing(self, tmp_path):
        H, _ = hessian(jnp.sum, jnp.zeros(0), out=tmp_path / "H.zarr")
        assert H.shape == (0, 0)
        J, _ = jacobian(lambda x: x[:0], X, out=tmp_path / "J.zarr")
        assert J.shape == (0, 7)
        J, _ = jacobian(lambda x: (), X, out=tmp_path / "none.zarr")
        assert J == ()


class TestBlocks:
    """A block is a chunk of the array."""

    def test_without_a_size_a_small_result_is_one_block(self, tmp_path):
        assert hessian(loss, X, out=tmp_path / "H.zarr")[0].chunks == (7, 7)

    def test_without_a_size_blocks_have_some_bytes(self, tmp_path, monkeypatch):
        monkeypatch.setattr(stream, "BLOCK_BYTES", 8 * 7 * 3)
        H, _ = hessian(loss, X, out=tmp_path / "H.zarr")
        assert H.chunks == (3, 7)
        assert_same(jnp.asarray(H[...]), hessian_of_loss(X))

    @pytest.mark.parametrize("way", [{"batch_size": 3}, {"nbatches": 3}], ids=str)
    def test_columns_are_blocks_of_the_last_axis(self, tmp_path, way):
        J, _ = jacobian(vector, X, **way, mode="forward", out=tmp_path / "J.zarr")
        assert J.chunks == (3, 3)

    def test_a_budget_chooses_blocks_that_fit(self, tmp_path):
        x = normal(1, 300)
        budget = 200_000
        H, _ = hessian(loss, x, memory_budget=budget, out=tmp_path / "H.zarr")
        size = H.chunks[0]
        assert 8 * 300 * size < budget
        assert 10 < size < 300
        in_memory, _ = hessian(loss, x, batch_size=size)
        np.testing.assert_allclose(H[...], in_memory, rtol=1e-12, atol=1e-12)

    def test_a_budget_below_one_block_says_what_would_do(self, tmp_path):
        with pytest.raises(MemoryBudgetError, match=r"^curvax\.hessian: .*checkpoint") as info:
            hessian(loss, X, memory_budget=100, out=tmp_path / "H.zarr")
        budget = info.value.smallest_budget
        H, _ = hessian(loss, X, memory_budget=budget, out=tmp_path / "H.zarr")
        assert_same(jnp.asarray(H[...]), hessian_of_loss(X))

    def test_a_store_that_was_begun_keeps_its_blocks(self, tmp_path):
        hessian(loss, X, batch_size=2, out=tmp_path / "H.zarr")
        for way in ({}, {"batch_size": 2}, {"memory_budget": "1MB"}):
            assert hessian(loss, X, **way, out=tmp_path / "H.zarr")[0].chunks == (2, 7)

    def test_a_budget_below_the_blocks_of_a_store(self, tmp_path):
        hessian(loss, X, batch_size=7, out=tmp_path / "H.zarr")
        with pytest.raises(MemoryBudgetError, match="begun in blocks of 7, which do not fit"):
            hessian(loss, X, memory_budget=600, out=tmp_path / "H.zarr")

    def test_another_size_is_rejected_unless_it_may_start_again(self, tmp_path):
        hessian(loss, X, batch_size=2, out=tmp_path / "H.zarr")
        words = r"^curvax\.hessian: .*begun in blocks of 2, but blocks of 3.*overwrite=True"
        with pytest.raises(ValueError, match=words):
            hessian(loss, X, batch_size=3, out=tmp_path / "H.zarr")
        H, _ = hessian(loss, X, batch_size=3, out=tmp_path / "H.zarr", overwrite=True)
        assert H.chunks == (3, 7)


SCALE = normal(5, 7)
OTHERS = {
    "function": (lambda x: jnp.sum(jnp.cos(x) ** 3) * x[0], X),
    "constants": (lambda x: jnp.sum(x**3 * (SCALE + 1)), X),
    "inputs": (lambda x: jnp.sum(x**3 * SCALE), X.at[6].add(1e-15)),
    "dtype": (lambda x: jnp.sum(x**3 * SCALE.astype(x.dtype)), X.astype(jnp.float32)),
    "shape": (lambda x: jnp.sum(x**3 * SCALE[:6]), X[:6]),
}


@pytest.mark.parametrize(("f", "x"), OTHERS.values(), ids=OTHERS)
def test_the_store_of_something_else_is_rejected_unless_it_may_be_replaced(tmp_path, f, x):
    ours = lambda x: jnp.sum(x**3 * SCALE)
    path = tmp_path / "H.zarr"
    H, _ = hessian(ours, X, batch_size=3, out=path)
    before = H[...]
    with pytest.raises(ValueError, match=r"^curvax\.hessian: .*something else: .*overwrite=True"):
        hessian(f, x, batch_size=3, out=path)
    np.testing.assert_array_equal(zarr.open_array(str(path), mode="r")[...], before)
    H, _ = hessian(f, x, batch_size=3, out=path, overwrite=True)
    assert_same(H[...], hessian(f, x, batch_size=3)[0], *([1e-5 if x.dtype == "f4" else 1e-14] * 2))


def test_a_jacobian_is_not_a_hessian(tmp_path):
    hessian(loss, X, out=tmp_path / "x.zarr")
    with pytest.raises(ValueError, match=r"^curvax\.jacobian: .*holds something else"):
        jacobian(jax.grad(lambda x: 2 * loss(x)), X, mode="forward", out=tmp_path / "x.zarr")


@pytest.mark.parametrize("function", [hessian, jacobian])
class TestErrors:
    @pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=lambda t: t.__name__)
    def test_under_a_transformation(self, tmp_path, function, transform):
        run = transform(lambda x: jnp.sum(function(loss, x, out=tmp_path / "H.zarr")[0]))
        words = rf"^curvax\.{function.__name__}: out=.*H.zarr writes to disk, .*outside"
        with pytest.raises(ValueError, match=words):
            run(X[None] if transform is jax.vmap else X)
        assert not (tmp_path / "H.zarr").exists()

    def test_with_traced_constants(self, tmp_path, function):
        run = jax.jit(lambda s: function(lambda x: s * loss(x), X, out=tmp_path / "H.zarr")[0])
        with pytest.raises(ValueError, match="cannot be done under a transformation"):
            run(2.0)

    def test_a_directory_that_is_missing(self, tmp_path, function):
        with pytest.raises(FileNotFoundError, match=rf"^curvax\.{function.__name__}: .*Create it"):
            function(loss, X, out=tmp_path / "no" / "H.zarr")

    def test_something_else_in_the_way(self, tmp_path, function):
        (tmp_path / "H.zarr").write_text("mine")
        with pytest.raises(FileExistsError, match=r"a file\. It is not touched"):
            function(loss, X, out=tmp_path / "H.zarr", overwrite=True)


def test_rows_of_several_arrays_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"one array with one axis\. Use mode='forward'"):
        jacobian(mixed, MIXED, mode="reverse", out=tmp_path / "J.zarr")


class TestProgress:
    @staticmethod
    def shown(capsys):
        return re.findall(r"(\d+)/(\d+) ", capsys.readouterr().err)

    def test_the_bar_goes_on_where_it_was(self, tmp_path, capsys, monkeypatch):
        compute, calls = stream.BlockPrograms.compute, []

        def interrupted(self, rows):
            calls.extend(each.start for each in rows)
            if len(calls) == 4:
                raise KeyboardInterrupt
            return compute(self, rows)

        run = lambda name="H.zarr": hessian(
            loss, X, batch_size=1, progress=True, out=tmp_path / name
        )
        monkeypatch.setattr(stream.BlockPrograms, "compute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
        capsys.readouterr()
        H, _ = run()
        assert calls == [0, 1, 2, 3, 3, 4, 5, 6]
        shown = self.shown(capsys)
        assert shown[0] == ("3", "7")
        assert shown[-1] == ("7", "7")
        np.testing.assert_array_equal(H[...], run("uninterrupted.zarr")[0][...])

    def test_there_is_none_unless_asked_for(self, tmp_path, capsys):
        hessian(loss, X, batch_size=1, out=tmp_path / "H.zarr")
        assert self.shown(capsys) == []


def run_program(path, seconds=None, pause=0.03):
    """Run it to the end, or kill it after some seconds; whether it was done."""
    command = [sys.executable, str(PROGRAM), str(path), str(pause)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        if seconds is not None:
            time.sleep(seconds)
            process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode in ({0} if seconds is None else {0, -signal.SIGKILL})


def chunks(path):
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_resumes(tmp_path, kills):
    """Files are compared, so nothing that a kill leaves behind may remain either."""
    path = tmp_path / "killed.zarr"
    for _ in range(kills):
        run_program(path, random.uniform(0.0, 2.0), 0.1 if kills == 3 else 1.0)
    run_program(path, pause=0)
    run_program(tmp_path / "whole.zarr", pause=0)
    assert chunks(path) == chunks(tmp_path / "whole.zarr")
    assert not np.isnan(zarr.open_array(str(path), mode="r")[...]).any()


def test_streaming_holds_one_block(tmp_path):
    """What was prepared and a block are all that is there: the program is asked."""
    n, size = 1000, 10
    x = normal(2, n)
    budget = 10 * 8 * n * size
    H, _ = hessian(loss, x, memory_budget=budget, out=tmp_path / "H.zarr")
    assert H.chunks[0] >= size
    assert curvax.memory_usage(lambda x: hessian(loss, x)[0], x).added_bytes > 9 * budget


@pytest.mark.parametrize("options", [{"jit": False}, {"memory_budget": "1MB", "objective": "time"}])
def test_options_that_do_not_go_with_the_disk_are_rejected(tmp_path, options):
    with pytest.raises(ValueError, match="out= does not go with jit=False or objective='time'"):
        hessian(loss, X, out=tmp_path / "H.zarr", **options)


class TestDamage:
    """What each file of a store is good for is shown in `test_disk`; here, what a user sees."""

    def test_a_chunk_that_is_lost_is_computed_again(self, tmp_path):
        H, _ = hessian(loss, X, batch_size=3, out=tmp_path / "H.zarr")
        before = H[...]
        (tmp_path / "H.zarr/c/1/0").unlink()
        with pytest.warns(curvax.DamagedStoreWarning, match=r"^curvax\.hessian: 1 of the 3 blocks"):
            H, _ = hessian(loss, X, batch_size=3, out=tmp_path / "H.zarr")
        np.testing.assert_array_equal(H[...], before)

    def test_a_byte_that_changed_is_an_error_or_computed_again(self, tmp_path):
        options = {"mode": "forward", "batch_size": 2, "out": tmp_path / "J.zarr"}
        before = jacobian(vector, X, **options)[0][...]
        chunk = tmp_path / "J.zarr/c/0/2"
        content = bytearray(chunk.read_bytes())
        content[5] ^= 16
        chunk.write_bytes(content)
        J, _ = jacobian(vector, X, **options)
        with pytest.raises(ValueError, match="checksum do not match"):
            J[...]
        with pytest.warns(curvax.DamagedStoreWarning, match=r"\(blocks 2\)"):
            J, _ = jacobian(vector, X, **options, verify=True)
        np.testing.assert_array_equal(J[...], before)

    def test_verification_of_a_good_store_changes_nothing(self, tmp_path):
        hessian(loss, X, batch_size=3, out=tmp_path / "H.zarr")
        before = chunks(tmp_path / "H.zarr")
        hessian(loss, X, batch_size=3, out=tmp_path / "H.zarr", verify=True)
        assert chunks(tmp_path / "H.zarr") == before

    @pytest.mark.parametrize("call", ["write", "open"])
    def test_a_full_disk(self, tmp_path, monkeypatch, call):
        def full(*_, **__):
            raise OSError(errno.ENOSPC, "raw")

        with monkeypatch.context() as patch:
            patch.setattr(BlockStore, call, full)
            words = r"curvax\.hessian: cannot write to .*H.zarr: No space left.* Make room"
            with pytest.raises(OSError, match=words):
                hessian(loss, X, batch_size=3, out=tmp_path / "H.zarr")
        H, _ = hessian(loss, X, batch_size=3, out=tmp_path / "H.zarr")
        assert_same(jnp.asarray(H[...]), hessian_of_loss(X))


def times(scale):
    """`x * scale`, by a callback whose name says nothing of the scale."""

    @jax.custom_jvp
    def f(x):
        return on_host(x)

    def on_host(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: x * scale, shape, x, vmap_method="broadcast_all")

    f.defjvp(lambda xs, ts: (f(xs[0]), on_host(ts[0])))
    return f


class TestCallbacks:
    @pytest.mark.parametrize(
        "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=lambda w: w.__name__
    )
    def test_a_store_is_not_returned_for_another_function(self, tmp_path, wrap):
        run = lambda scale, **more: jacobian(
            wrap(times(scale)), X, mode="forward", out=tmp_path / "J.zarr", **more
        )[0][...]
        np.testing.assert_allclose(run(2.0), 2 * np.eye(7))
        words = (
            r"^curvax\.jacobian: f calls back to Python \(.*on_host.*\), .* Pass overwrite=True to "
            r"compute it again, choose another path, or read it with zarr.open"
        )
        for scale in (2.0, 5.0):
            with pytest.raises(ValueError, match=words):
                run(scale)
        np.testing.assert_allclose(zarr.open(tmp_path / "J.zarr", mode="r")[...], 2 * np.eye(7))
        np.testing.assert_allclose(run(5.0, overwrite=True), 5 * np.eye(7))

    def test_prints_do_not_count(self, tmp_path):
        def f(x):
            jax.debug.callback(lambda x: None, x[0])
            return jnp.sin(x)

        for _ in range(2):
            J, _ = jacobian(f, X, mode="forward", out=tmp_path / "J.zarr")
        assert_same(jnp.asarray(J[...]), jnp.diag(jnp.cos(X)))
