"""Layers are found by what they compute, whatever the spelling.

And not only their names are right: what each tag says are inputs, outputs and parameters is checked
to be that, by computing the layer from them.
"""

import jax
import jax.numpy as jnp
import pytest

from curvax import LossFunction
from curvax.layers.detection.program import run, trace_program
from curvax.layers.detection.uses import find_uses
from curvax.layers.registration import RegistrationError, auto_register_tags
from curvax.layers.report import explain_registration
from curvax.layers.tags import LayerTag
from curvax.losses.tag import LossTag
from helpers import assert_same
from layers.layers import part, recompute
from layers.models import AFFINE, GENERIC, SPELLINGS


class Loss(LossFunction):
    """Holds its arguments, and computes nothing."""

    def __init__(self, prediction):
        self.prediction = prediction


Loss.__abstractmethods__ = frozenset()


TAG = LossTag(Loss, ["prediction"], [])
name_of = lambda case: case.name
each_spelling = pytest.mark.parametrize("case", SPELLINGS, ids=name_of)


def with_loss(f):
    def loss(params, x):
        y = f(params, x)
        TAG.bind(y, args_names=("prediction",))
        return jnp.mean(jnp.sin(y.astype(jnp.float64)) ** 2)

    return loss


class Captured:
    """Hooks that collect the operands of all layer tags."""

    def keys_at(self, node):
        return () if isinstance(node.equation.primitive, LayerTag) else None

    def is_per_step(self, key, loop):
        raise NotImplementedError

    def visit(self, node, inputs, values, given):
        tag = node.equation.primitive
        return list(inputs[: tag.num_outputs]), {node: list(inputs)}


def tagged_layers(case, params, x):
    """The tags of a model: each node, the values of its operands, and the parameters it names.

    Operands inside loops have a leading axis for each loop. The last says for each of these
    whether the parameters have it, too.
    """
    tagged = auto_register_tags(with_loss(case.f), (case.params, case.x))
    program, _ = trace_program(tagged, case.params, case.x)
    leaves = jax.tree.leaves((params, x))
    _, captured = run(program, leaves, Captured())
    count = len(jax.tree.leaves(params))
    for node, views in find_uses(program, program.inputs[:count]).explicit:
        params = [part(leaves[view.param], view.slices) for view in views]
        yield node, captured[node], params, [bool(dim) for dim in views[0].axes.looped]


@pytest.mark.parametrize("case", SPELLINGS + AFFINE, ids=name_of)
def test_each_parameter_gets_its_tag(case):
    report = explain_registration(with_loss(case.f), (case.params, case.x))
    found = {row.path[2:-2]: row.tag for row in report.rows}
    assert found == case.tags, str(report)
    assert report.coverage == 1
    assert len({row.layer for row in report.rows}) == case.layers


@each_spelling
def test_tags_do_not_change_the_function(case):
    f, args = with_loss(case.f), (case.params, case.x)
    tagged = auto_register_tags(f, args, compute_only_loss_tags=False)
    only_losses = auto_register_tags(f, args)

    @jax.jit
    def both(*args):
        ((prediction,),) = only_losses(*args)
        ours = jax.value_and_grad(tagged)(*args), prediction
        return ours, (jax.value_and_grad(f)(*args), case.f(*args))

    assert_same(*both(*args), 1e-10, 1e-10)


@each_spelling
def test_inputs_and_parameters_give_the_outputs(case):
    """In the order that the tag says, and with that of each loop for each of its steps."""

    @jax.jit
    def outputs(params, x):
        layers = tagged_layers(case, params, x)
        return [
            (recompute(node, x, stacked, params), y.astype(jnp.float64))
            for node, (y, x, *_), params, stacked in layers
        ]

    found = outputs(case.params, case.x)
    assert found
    for actual, expected in found:
        assert_same(actual, expected, 1e-6, 1e-6)


@pytest.mark.parametrize("case", GENERIC, ids=name_of)
class TestGeneric:
    def test_it_is_reported_why(self, case):
        report = explain_registration(with_loss(case.f), (case.params, case.x))
        assert {row.tag for row in report.rows} == {"generic_tag"}
        assert all(case.reason in row.reason for row in report.rows), str(report)
        assert report.coverage == 0

    def test_strict_rejects_it(self, case):
        with pytest.raises(RegistrationError, match=r"strict=True .* but \d of \d do not:\n  \["):
            auto_register_tags(with_loss(case.f), (case.params, case.x), strict=True)
