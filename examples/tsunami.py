"""A wave on a shallow sea, and its origin, found from three tide gauges.

The depth h and the velocity (u, v) of the water obey the shallow-water equations

    ∂h/∂t + ∇·(h u) = 0,    ∂u/∂t + (u·∇)u + g ∇h = 0,

here on a square with periodic boundaries. `sliced_scan` keeps every nth frame of a long simulation.
The gradient with respect to the initial state runs back through all steps; for it `jax.lax.scan`
saves residuals of every step, and `checkpoint_chunked_scan` saves the state once per chunk and
rematerialises the rest.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float
from scipy.optimize import minimize

from curvax import checkpoint_chunked_scan, chunked_vmap, sliced_scan
from examples import _show

CELLS = 66
CELL = 1000.0  # metres
DEPTH = 100.0  # metres
GRAVITY = 9.81
SPEED = (GRAVITY * DEPTH) ** 0.5  # of long waves
STEP = 0.4 * CELL / SPEED  # seconds
STEPS = 1000
EVERY = 25
CHUNK = 32
WIDTH = 4.0  # kilometres, of the hump that makes the wave
GAUGES = np.array([(6, 10), (58, 14), (30, 57)])
CENTRES = (np.arange(CELLS) + 0.5) * CELL / 1e3  # kilometres

Sea = tuple[Float[Array, "x y"], Float[Array, "x y"], Float[Array, "x y"]]


def quake(where_and_height: Float[Array, " 3"]) -> Sea:
    """Return a sea at rest, with a round hump of water of given position and height."""
    x, y, height = where_and_height
    apart = lambda a: (a - CENTRES + CELLS / 2) % CELLS - CELLS / 2
    distance = apart(x)[:, None] ** 2 + apart(y)[None, :] ** 2
    depth = DEPTH + height * jnp.exp(-distance / (2 * WIDTH**2))
    return depth, jnp.zeros_like(depth), jnp.zeros_like(depth)


def flow(sea: Sea) -> Sea:
    """Advance one step in time. Velocities live on the faces of cells, depths in their centres.

    The two velocities live on different faces, which the small terms (u·∇)u neglect.
    """
    h, u, v = sea
    after, before = partial(jnp.roll, shift=-1), partial(jnp.roll, shift=1)
    slope = lambda a, axis: (after(a, axis=axis) - before(a, axis=axis)) / (2 * CELL)
    rise = lambda axis: GRAVITY * (after(h, axis=axis) - h) / CELL
    u, v = (
        u - STEP * (rise(0) + u * slope(u, 0) + v * slope(u, 1)),
        v - STEP * (rise(1) + u * slope(v, 0) + v * slope(v, 1)),
    )
    through = lambda speed, axis: speed * (h + after(h, axis=axis)) / 2
    out = lambda a, axis: (a - before(a, axis=axis)) / CELL
    h = h - STEP * (out(through(u, 0), 0) + out(through(v, 1), 1))
    return h, u, v


def film(sea: Sea, _) -> tuple[Sea, Float[Array, "x y"]]:
    sea = flow(sea)
    return sea, sea[0] - DEPTH


def gauges(sea: Sea, _) -> tuple[Sea, Float[Array, " gauges"]]:
    sea = flow(sea)
    return sea, sea[0][GAUGES[:, 0], GAUGES[:, 1]] - DEPTH


checkpointed = partial(checkpoint_chunked_scan, chunk_size=CHUNK)


def misfit(scan, guess, measured):
    """Return the mean squared difference of simulated and measured gauges, in cm²."""
    return jnp.mean((100 * (scan(gauges, quake(guess), None, STEPS)[1] - measured)) ** 2)


def slope_by(scan):
    return jax.value_and_grad(partial(misfit, scan))


def wave_speed(frames: np.ndarray, source: tuple[int, int]) -> float:
    """Return the speed of the crest along a line of cells from the source, in m/s."""

    def crest(frame: np.ndarray) -> float:
        line = np.roll(frame[:, source[1]], -source[0])[: CELLS // 2]
        i = int(np.argmax(line))
        left, top, right = line[i - 1 : i + 2]
        return i + 0.5 * (left - right) / (left - 2 * top + right)

    early, late = 1, 2
    return (crest(frames[late]) - crest(frames[early])) * CELL / ((late - early) * EVERY * STEP)


def run() -> None:
    truth = np.array([41.5, 24.5, 2.0], np.float32)
    _show.text(
        f"""Somewhere in a sea {CELLS} km wide and {DEPTH:.0f} m deep the ground moves, and a hump
        of water runs out as a wave. We simulate {STEPS} steps, {STEPS * STEP / 60:.0f} minutes,
        and keep every {EVERY}th frame. Then we look for the source, from the measurements of three
        tide gauges in every step. The gradient for that runs back through all steps. lax.scan
        saves residuals of each of them, checkpoint_chunked_scan the state of every {CHUNK}nd;
        {CHUNK} does not divide {STEPS}."""
    )
    all_frames, all_size = _show.compiled(
        lambda start: lax.scan(film, quake(start), None, STEPS)[1][::EVERY], truth
    )
    some_frames, some_size = _show.compiled(
        lambda start: sliced_scan(film, quake(start), None, STEPS, step=EVERY)[1], truth
    )
    exact = jax.jit(lambda start: lax.scan(gauges, quake(start), None, STEPS)[1])(truth)
    noise = np.random.default_rng(0).normal(size=exact.shape)
    measured = np.asarray(exact) + (0.01 * noise).astype(np.float32)
    somewhere = np.array([35.0, 30.0, 1.0], np.float32)
    naive, naive_size = _show.compiled(slope_by(lax.scan), somewhere, measured)
    ours, our_size = _show.compiled(slope_by(checkpointed), somewhere, measured)
    _show.memory(
        [
            (f"every {EVERY}th frame", all_size, some_size),
            ("the gradient", naive_size, our_size),
        ],
        "lax.scan",
        "curvax",
    )
    frames = some_frames(truth)
    print(f"\n  Frames agree {_show.agreement(frames, all_frames(truth))},", end=" ")
    same = _show.agreement(ours(somewhere, measured), naive(somewhere, measured))
    print(f"gradients {same}.")

    frames = np.asarray(frames)
    minutes = [f"after {i * EVERY * STEP / 60:.0f} minutes" for i in (0, 1, 3)]
    _show.pictures([frames[0], frames[1], frames[3]], minutes)
    lost = np.abs(frames.sum(axis=(1, 2)) / frames[0].sum() - 1).max()
    print(f"\n  The wave runs at {wave_speed(frames, (41, 24)):.1f} m/s; theory predicts", end=" ")
    print(f"sqrt(g h) = {SPEED:.1f} m/s. Of its water, {100 * lost:.1f} % is lost.")

    side = np.arange(4.0, CELLS, 8.0, dtype=np.float32)
    guesses = np.stack([a.ravel() for a in np.meshgrid(side, side, [np.float32(1)])], axis=1)
    search = chunked_vmap(partial(misfit, lax.scan), 9, in_axes=(0, None))
    start = guesses[np.argmin(jax.jit(search)(guesses, measured))]
    fit = lambda guess: ours(guess.astype(np.float32), measured)
    found = minimize(fit, start, jac=True, method="BFGS", tol=1e-2)
    print(f"\n  The search starts at the best of {len(guesses)} points of a coarse grid.")
    print("\n                          x [km]   y [km]   height of the hump [m]")
    for name, (x, y, height) in (("start", start), ("found", found.x), ("true", truth)):
        print(f"  {name:20}{float(x):10.2f}{float(y):9.2f}{float(height):14.2f}")
    print("\n  The gauges were read to within a centimetre;", end=" ")
    print(f"the remaining misfit is {float(found.fun) ** 0.5:.2f} cm.")
