"""What curvax does, on small real problems. Run as `python -m examples.demo`."""

import time

import jax

from examples import digits, error_bars, particles, telescope, tsunami

PARTS = (
    ("An autoencoder that trains in fewer steps", digits.run),
    ("A telescope that sees its own faults", telescope.run),
    ("Particles that stay private", particles.run),
    ("A wave traced back to its source", tsunami.run),
    ("A network that knows what it does not know", error_bars.run),
)


def main() -> None:
    print("curvax: the same numbers, within the memory you have")
    print(
        f"JAX {jax.__version__} on {jax.default_backend()}. Memory is what the compiler sets aside"
    )
    print("for temporaries, besides inputs and outputs.")
    begin = time.perf_counter()
    for number, (title, run) in enumerate(PARTS, start=1):
        heading = f"{number}. {title}"
        print(f"\n\n{heading}\n{'-' * len(heading)}")
        run()
    print(f"\n\nThe demonstration took {time.perf_counter() - begin:.0f} seconds.")


if __name__ == "__main__":
    main()
