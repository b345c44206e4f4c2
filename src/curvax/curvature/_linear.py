"""The one door to lineax and matfree, which are optional."""

from typing import Any

__all__ = ["import_lineax", "import_matfree_decompositions"]

_ADVICE = "which is not installed: pip install 'curvax[linear]'."


def import_lineax() -> Any:
    """The module lineax."""
    try:
        import lineax
    except ImportError as error:
        raise ImportError(f"curvax: operators for lineax need it, {_ADVICE}") from error
    return lineax


def import_matfree_decompositions() -> Any:
    """The module matfree.decomp."""
    try:
        from matfree import decomp
    except ImportError as error:
        raise ImportError(f"curvax.spectral_density: this needs matfree, {_ADVICE}") from error
    return decomp
