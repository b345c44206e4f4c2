"""What `benchmarks/scaling.py` predicts from shapes is what compiled programs do."""

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from helpers import slow_but

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def _benchmarks_can_be_imported(monkeypatch, jax_defaults):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name.startswith(("_scaling", "_flops"))]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("model", "count", "plan"),
    [
        slow_but([("transformer", 8, "split")], *case)
        for case in itertools.product(
            ("transformer", "resnet"), (2, 4, 8), ("replicated", "shared", "split")
        )
    ],
)
def test_devices_send_and_keep_what_is_predicted(model, count, plan):
    """To the byte: operands of collective operations, and the state on a device."""
    from _scaling_side import MODELS, compare

    found = compare(MODELS[model], plan, count)
    assert found["found"]
    assert found["found"] == found["predicted"]
    assert found["found state"] == found["predicted state"]


def test_products_are_counted_as_the_compiler_does():
    """Matrices, and convolutions with padding, strides and dilation, with their gradients."""
    from _flops import flops

    def products(x, kernel, w):
        layout = ("NHWC", "HWIO", "NHWC")
        y = jax.lax.conv_general_dilated(x, kernel, (2, 1), "SAME", dimension_numbers=layout)
        y = jax.lax.conv_general_dilated(
            y, kernel[..., :4], (1, 1), "VALID", rhs_dilation=(2, 1), dimension_numbers=layout
        )
        return jnp.einsum("nhwc,cd->nd", y, w).sum()

    shapes = [(2, 9, 8, 4), (3, 3, 4, 4), (4, 5)]
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    for fun in (products, jax.grad(products, (0, 1, 2))):
        whole = jax.jit(fun).lower(*args).cost_analysis()["flops"]
        ours = flops(fun, *args)
        assert ours <= whole <= 1.1 * ours  # Sums, which we leave out, are the rest.


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    from _flops import flops

    w = jax.ShapeDtypeStruct((7, 3, 3), jnp.float32)
    x = jax.ShapeDtypeStruct((5, 3), jnp.float32)
    stack = lambda x, w: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]
    assert flops(stack, x, w) == 7 * 2 * 5 * 3 * 3
    with pytest.raises(ValueError, match="not known how often"):
        flops(lambda x, w: jax.lax.while_loop(lambda _: True, lambda x: x @ w[0], x), x, w)


def test_the_models_have_the_sizes_that_they_are_said_to_have():
    from _scaling_models import resnet, transformer

    assert resnet((3, 4, 6, 3), 64, 224, 1000).num_params == 25_557_032
    assert 1.0e9 < transformer(2048, 18, 8192, 32000, 2048, 128).num_params < 1.1e9
