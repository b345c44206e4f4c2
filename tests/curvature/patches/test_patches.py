"""Patches are what a convolution multiplies with its kernel."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from jax import lax

from curvature.patches.geometries import LETTERS, Conv, convolutions, patches_by_hand, plain
from curvax.curvature.patches.geometry import ConvGeometry
from curvax.curvature.patches.patches import extract_patches


def close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)


def kernel_for(conv: Conv, per_group: int = 2):
    """Random, `(*kernel, channels, output channels)`."""
    channels = conv.channels // conv.feature_group_count
    outputs = per_group * conv.geometry().num_groups
    return jax.random.normal(jax.random.key(1), (*conv.kernel, channels, outputs))


def by_position(conv: Conv, outputs):
    """Outputs as `(groups, images, positions, output channels of the group)`."""
    letters = [letter for letter in conv.layouts[2] if letter in LETTERS]
    moved = jnp.einsum(f"{conv.layouts[2]}->N{''.join(letters)}C", outputs)
    flat = moved.reshape(len(moved), -1, conv.geometry().num_groups, 2)
    return jnp.moveaxis(flat, 2, 0)


@given(conv=convolutions())
def test_a_convolution_is_a_product_with_its_patches(conv):
    """The order of groups, positions and elements is that of `jax.lax`."""
    inputs, kernel, geometry = conv.inputs(), kernel_for(conv), conv.geometry()

    def compute(inputs, kernel):
        outputs = lax.conv_general_dilated(inputs, kernel, **conv.parameters())
        patches = extract_patches(inputs, geometry)
        return by_position(conv, outputs), patches, outputs

    expected, patches, outputs = jax.jit(compute)(inputs, kernel)
    by_hand = patches_by_hand(conv, inputs)
    size = geometry.patch_size(inputs.shape)
    assert patches.ndim == (4 if geometry.num_groups > 1 else 3)
    images, positions = geometry.num_images(inputs.shape), geometry.num_positions(inputs.shape)
    groups = np.asarray(patches).reshape(geometry.num_groups, images, positions, size)
    close(groups, by_hand.reshape(groups.shape))
    matrices = np.moveaxis(np.reshape(kernel, (size, geometry.num_groups, 2)), 1, 0)
    close(groups @ matrices[:, None], expected)

    spatial = [
        n for n, letter in zip(outputs.shape, conv.layouts[2], strict=True) if letter in "XYZ"
    ]
    assert geometry.output_spatial_shape(inputs.shape) == tuple(spatial)


def test_gradients_of_each_image_are_patches_times_cotangents():
    conv = plain(kernel=(3, 2), strides=(1, 2), channels=4, feature_group_count=2)
    inputs, kernel, geometry = conv.inputs(), kernel_for(conv), conv.geometry()

    def outputs_of(kernel, inputs):
        return lax.conv_general_dilated(inputs, kernel, **conv.parameters())

    @jax.jit
    def compute(kernel, inputs):
        one_image = lambda x: jax.grad(lambda w: jnp.sum(outputs_of(w, x[None]) ** 3))(kernel)
        cotangents = by_position(conv, 3 * outputs_of(kernel, inputs) ** 2)
        patches = extract_patches(inputs, geometry)
        return jax.vmap(one_image)(inputs), jnp.einsum("gnpi,gnpo->nigo", patches, cotangents)

    expected, products = compute(kernel, inputs)
    close(products.reshape(expected.shape), expected)


def test_a_geometry_comes_from_the_parameters_of_an_equation():
    conv = plain(kernel=(3, 2), layouts=("CYNX", "IXOY", "YNXC"))
    kernel = jnp.ones((2, 3, 4, 2))
    program = jax.make_jaxpr(
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), conv.padding, dimension_numbers=conv.layouts
        )
    )(conv.inputs(), kernel)
    (equation,) = program.eqns
    names = ConvGeometry.of.__annotations__.keys() - {"kernel_spatial_shape", "return"}
    parameters = {name: equation.params[name] for name in names}
    spec = parameters["dimension_numbers"].rhs_spec
    geometry = ConvGeometry.of([kernel.shape[axis] for axis in spec[2:]], **parameters)
    assert geometry == conv.geometry()
    assert hash(geometry) == hash(conv.geometry())
