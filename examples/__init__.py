"""Small real problems, solved with curvax; `python -m examples.demo` runs them all."""
