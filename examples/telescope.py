"""A star seen through an imperfect telescope, and the imperfection recovered from its image.

Light of wavelength λ reaches the pixel in direction θ from all points r of the mirror, with phases
2π/λ · (θ·r + W(r)), where the wavefront error W is the path length that the mirror's errors add.
The intensity is the squared modulus of the sum, and an image sums over many wavelengths. There are
two images, one of them out of focus by a known amount, because one alone cannot distinguish W from
its mirror image.

So each pixel needs an array of wavelengths by mirror points. `jax.vmap` computes these arrays for
all pixels at once; `chunked_vmap` does so for a chunk of pixels at a time.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from curvax import chunked_vmap
from examples import _show

WAVELENGTHS = np.linspace(0.5, 0.7, 8, dtype=np.float32)  # micrometres
PIXELS = 35  # on a side
PIXEL = 0.55  # in units of the mean wavelength over the diameter
CHUNK = 40  # pixels at once
ERRORS = ("defocus", "astigmatism", "oblique astigmatism", "coma", "oblique coma", "spherical")
FOCUS = np.array([0.0, 0.15], np.float32)  # micrometres of deliberate defocus


def mirror() -> tuple[np.ndarray, np.ndarray]:
    """Return points of a round mirror of diameter one, and each error's shape at these points."""
    side = (np.arange(28) + 0.5) / 14 - 1
    x, y = (a.ravel() for a in np.meshgrid(side, side))
    inside = x**2 + y**2 <= 1
    x, y, r = x[inside], y[inside], np.hypot(x, y)[inside]
    shapes = [
        np.sqrt(3) * (2 * r**2 - 1),
        np.sqrt(6) * (x**2 - y**2),
        np.sqrt(6) * 2 * x * y,
        np.sqrt(8) * (3 * r**2 - 2) * x,
        np.sqrt(8) * (3 * r**2 - 2) * y,
        np.sqrt(5) * (6 * r**4 - 6 * r**2 + 1),
    ]
    points = np.stack([x, y], axis=1) / 2
    return points.astype(np.float32), np.stack(shapes, axis=1).astype(np.float32)


def pixels() -> np.ndarray:
    """Return the directions of all pixels, in units of a micrometre over the diameter."""
    side = (np.arange(PIXELS) - PIXELS // 2) * PIXEL * WAVELENGTHS.mean()
    return np.stack(np.meshgrid(side, side), axis=-1).reshape(-1, 2).astype(np.float32)


def intensities(
    direction: Float[Array, " 2"], errors: Float[Array, " errors"], wavelengths: Float[Array, " w"]
) -> Float[Array, " images"]:
    """Return the intensities in one direction, relative to the centre of a perfect image."""
    points, shapes = mirror()
    number = 2 * jnp.pi / wavelengths[:, None]
    phase = number * (points @ direction + shapes @ errors)
    defocus = number[..., None] * shapes[:, 0, None] * FOCUS
    total = partial(jnp.einsum, "wp,wpi->wi")
    real = total(jnp.cos(phase), jnp.cos(defocus)) - total(jnp.sin(phase), jnp.sin(defocus))
    imaginary = total(jnp.cos(phase), jnp.sin(defocus)) + total(jnp.sin(phase), jnp.cos(defocus))
    return jnp.mean(real**2 + imaginary**2, axis=0) / len(points) ** 2


def images_by(vmap):
    """Return the images as a function of the mirror's errors, with `vmap` over pixels."""
    mapped = vmap(intensities, in_axes=(0, None, None))
    return lambda errors: mapped(jnp.asarray(pixels()), errors, jnp.asarray(WAVELENGTHS))


def in_chunks(fun, in_axes):
    return chunked_vmap(fun, CHUNK, in_axes=in_axes)


def first_dark_ring(wavelength: float) -> float:
    """Return the radius of a perfect image's first dark ring, in wavelengths/diameter."""
    angles = np.linspace(0.9, 1.5, 601, dtype=np.float32)
    directions = np.stack([angles * wavelength, np.zeros_like(angles)], axis=1)
    look = jax.jit(in_chunks(intensities, (0, None, None)))
    light = look(directions, np.zeros(len(ERRORS), np.float32), np.array([wavelength], np.float32))
    return float(angles[np.argmin(light[:, 0])])


def run() -> None:
    truth = np.array([0.03, -0.05, 0.02, 0.04, -0.02, 0.025], np.float32)
    num_pixels = PIXELS**2
    _show.text(
        f"""A telescope sees a star at {len(WAVELENGTHS)} wavelengths on {PIXELS} x {PIXELS} pixels,
        once in focus and once out of focus. Its mirror is not perfect. We compute the images
        from the errors of the mirror, and then the errors from the images. Each pixel needs an
        array of wavelengths by mirror points: jax.vmap computes {num_pixels} of them at once,
        chunked_vmap {CHUNK} at a time, and {CHUNK} does not divide {num_pixels}."""
    )

    with_jacobian = lambda images: lambda errors: (images(errors), jax.jacfwd(images)(errors))
    _, naive_size = _show.compiled(images_by(jax.vmap), truth)
    ours, our_size = _show.compiled(images_by(in_chunks), truth)
    naive_both, naive_both_size = _show.compiled(with_jacobian(images_by(jax.vmap)), truth)
    our_both, our_both_size = _show.compiled(with_jacobian(images_by(in_chunks)), truth)
    _show.memory(
        [
            ("the images", naive_size, our_size),
            ("the images and their Jacobian", naive_both_size, our_both_size),
        ],
        "jax.vmap",
        "chunked_vmap",
    )
    same = _show.agreement(our_both(truth), naive_both(truth))
    print(f"\n  Images and Jacobian agree {same}.")
    ring = first_dark_ring(0.6)
    print(f"  A perfect mirror's first dark ring is at {ring:.3f} wavelengths over the diameter;")
    print("  Airy's formula gives 1.220, for a mirror that is not discretised.")

    photons = 2e5
    exact = np.asarray(ours(truth))
    seen = exact + np.sqrt(exact / photons) * np.random.default_rng(0).normal(size=exact.shape)
    errors = np.zeros_like(truth)
    for _ in range(6):  # Gauss-Newton
        images, jacobian = our_both(errors)
        step = np.linalg.lstsq(np.reshape(jacobian, (-1, len(ERRORS))), (seen - images).ravel())[0]
        errors = errors + step.astype(np.float32)
    square = lambda image: np.sqrt(np.abs(image)).reshape(PIXELS, PIXELS)
    perfect = np.asarray(ours(np.zeros_like(truth)))
    _show.pictures(
        [square(perfect[:, 0]), square(seen[:, 0]), square(seen[:, 1])],
        ["a perfect mirror", "our mirror", "our mirror, defocused"],
    )
    print("\n  error of the mirror [nm]      true    found")
    for name, right, found in zip(ERRORS, truth, errors, strict=True):
        print(f"  {name:26}{1e3 * float(right):8.1f} {1e3 * float(found):8.1f}")
