"""Calls of kfac_jax's `patches_second_moment` that are run with kfac_jax 0.0.8 and with curvax.

    .venv-kfac/bin/python tests/drop_in/patches_cases.py > tests/drop_in/patches_values.json

records what kfac_jax returns; `test_patches.py` compares. Of arrays, the shape and some sums are
recorded.
"""

import itertools
import json
import sys

import jax.numpy as jnp
import numpy as np

IMAGES = jnp.asarray(np.sin(np.arange(2 * 4 * 5 * 4.0)).reshape(2, 4, 5, 4), jnp.float32)
CHANNELS_FIRST = jnp.moveaxis(IMAGES, -1, 1)
PADDINGS = (("SAME", (1, 2)), ("VALID", 1), (((1, 1), (0, 2)), 2), (1, (2, 1)), ((1, 0), 1))


def summary(arrays):
    """Of each array its shape, and sums without cancellation, one of which weighs positions."""
    found = []
    for x in map(np.asarray, arrays):
        weights = 1 + np.arange(x.size).reshape(x.shape) / x.size
        values = [float(np.sum(x**2)), float(np.sum(weights * x**2)), float(np.sum(np.abs(x)))]
        found.append([list(x.shape), values])
    return found


def moments(psm, **options):
    options = {"inputs": IMAGES, "kernel_spatial_shape": (2, 3), **options}
    both = (psm.patches_moments, psm.patches_moments_explicit)
    return [summary(compute(**options)) for compute in both]


CASES = {
    **{
        f"{padding}, {strides}, {groups}": lambda psm, p=padding, s=strides, g=groups: moments(
            psm, padding=p, strides=s, feature_group_count=g
        )
        for (padding, strides), groups in itertools.product(PADDINGS, (1, 4))
    },
    "channels first": lambda psm: moments(psm, inputs=CHANNELS_FIRST, data_format="NCHW"),
    "channels first, in groups": lambda psm: moments(
        psm, inputs=CHANNELS_FIRST, data_format="NCHW", feature_group_count=4, padding="SAME"
    ),
    "integers": lambda psm: moments(psm, kernel_spatial_shape=2, strides=2),
    "unrolled": lambda psm: moments(psm, unroll_loop=True),
    "a weight for each image": lambda psm: moments(
        psm, padding="SAME", weighting_array=jnp.array([0.5, 3.0])
    ),
    "a weight for each patch": lambda psm: moments(
        psm, padding="SAME", weighting_array=jnp.arange(40.0).reshape(2, 4, 5)
    ),
    "num_conv_locations": lambda psm: [
        psm.num_conv_locations((8, 8), (3, 3), (1, 1), "SAME"),
        psm.num_conv_locations((8, 8), (3, 3), (1, 1), "VALID"),
        psm.num_conv_locations((8, 8), 3, 2, "VALID"),
        psm.num_conv_locations((8, 9), (3, 2), (2, 3), ((1, 1), (0, 2))),
        psm.num_conv_locations((8, 8), 3, 1, 1),
    ],
}

if __name__ == "__main__":
    from kfac_jax import patches_second_moment

    found = {name: case(patches_second_moment) for name, case in CASES.items()}
    json.dump(found, sys.stdout, indent=1)
