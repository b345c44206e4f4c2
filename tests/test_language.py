"""The words of the glossary in CONTRIBUTING.md are used, and `help()` of a public name is complete.

A failure lists what to change, with file and line or with the name of the function.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import curvax

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
OTHERS = [
    path
    for folder in ("tests", "examples", "benchmarks", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != Path(__file__)
]

# Old words, as regular expressions, and what to write instead. Only words that are never right are
# here; the glossary has more. A space matches any white space, also across lines of a comment.
OLD_WORDS = {
    "inside of": "inside",
    "anew": "again",
    "shall": "will, must",
    "so many": "n, the number of",
    "foretells?|foretold|foretelling": "predict",
    "rehears(e|es|ed|al|ing)": "benchmark",
    "whole numbers?": "integer",
    "undivided": "replicated",
    "ma(ke|kes|de|king) whole": "gather",
    "of the (user|caller)'s": "user-supplied",
    "in front": "leading axis",
    "facade": "shell, wrapper",
    "in turn|is_turn": "one after another; schedule",
    "as in `": "a description of its own",
    "beside": "besides, next to",
    "takes? in(?! (place|each|every)\\b)|take_in": "update",
    "remember(s|ed|ing)?": "save, cache, rematerialise",
    "tells": "returns, says",
    "drawn": "sampled",
    "expected change": "predicted change",
    "foundation": "base",
}


def pattern(words: str) -> re.Pattern[str]:
    """Return a pattern for whole words; underscores in identifiers separate words."""
    spaced = words.replace(" ", r"\s+(?:#\s*)?")
    return re.compile(rf"(?<![A-Za-z])(?:{spaced})(?![A-Za-z])", re.IGNORECASE)


def without_glossary(text: str) -> str:
    """Blank the glossary, which quotes the old words, and keep the numbers of lines."""
    section = re.compile(r"^## Glossary$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    return section.sub(lambda match: "\n" * match[0].count("\n"), text)


def old_words(path: Path) -> Iterator[str]:
    text = without_glossary(path.read_text())
    for words, better in OLD_WORDS.items():
        for match in pattern(words).finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            name = path.relative_to(ROOT).as_posix()
            yield f"{name}:{line}: {' '.join(match[0].split())!r}; write: {better}"


def test_old_words_are_gone_from_the_source():
    assert [line for path in SOURCES for line in old_words(path)] == []


def test_old_words_are_gone_from_the_documentation():
    assert [line for path in PAGES for line in old_words(path)] == []


def test_old_words_are_gone_from_tests_examples_and_benchmarks():
    assert [line for path in OTHERS for line in old_words(path)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It is computed inside\n    # of a loop.", ["inside # of"]),
        ("besides, insider, marshall, facades", []),
        ("def take_in(x): ...", ["take_in"]),
        ("Options it takes in each call, exponentials taken in float32", []),
        ("It takes in a value, and remembers it.", ["takes in", "remembers"]),
    ],
)
def test_old_words_are_found(text, found):
    matches = [match[0] for words in OLD_WORDS for match in pattern(words).finditer(text)]
    assert [" ".join(match.split()) for match in matches] == found


# Public methods that need no example, with the reason: of every class, or of the one that is named.
# Abstract methods need none either, as the classes that implement them have one.
WITHOUT_EXAMPLE = {
    "steps of an update or a refresh, which estimators run and new kinds of blocks override": {
        "as_matrices",
        "averages",
        "cache_requests",
        "check_examples",
        "estimate",
        "estimate_here",
        "finiteness_probe",
        "fixed_scale",
        "flattened",
        "has_linear_estimates",
        "is_cached",
        "needs_examples",
        "of_matrices",
        "ravelled",
        "refresh",
        "scale",
        "state_dependent_scale",
        "statistics",
        "terms",
        "total_gradient",
        "unflattened",
        "update_averages",
        "update_from_data",
        "update_from_gradient",
        "with_cache",
    },
    "run by an estimator, whose methods of the same names have examples, on each of its blocks": {
        "CurvatureBlock.eigenvalues",
        "CurvatureBlock.init",
        "CurvatureBlock.multiply",
        "CurvatureBlock.multiply_inverse",
        "CurvatureBlock.multiply_matpower",
        "CurvatureBlock.norm",  # By `block_norms`.
        "CurvatureBlock.to_dense_matrix",
        "CurvatureBlock.update_cache",
        "CurvatureBlock.update_curvature_matrix_estimate",
        "Full.to_dense_matrix",
    },
    "what a new loss class implements; users call the methods without `_unweighted`": {
        "checked_inputs",
        "copy_with_different_inputs",
        "evaluate_unweighted",
        "multiply_fisher_factor_replicated_one_hot_unweighted",
        "multiply_fisher_factor_transpose_unweighted",
        "multiply_fisher_factor_unweighted",
        "multiply_fisher_unweighted",
        "multiply_ggn_factor_replicated_one_hot_unweighted",
        "multiply_ggn_factor_transpose_unweighted",
        "multiply_ggn_factor_unweighted",
        "multiply_ggn_unweighted",
    },
}
EXEMPT = set().union(*WITHOUT_EXAMPLE.values())


def public_callables() -> dict[str, Callable[..., object]]:
    """Return public functions and classes, and public methods of these, by name.

    A method that several classes inherit is listed once, by the class that defines it.
    """
    found = [x for x in (getattr(curvax, name) for name in curvax.__all__) if callable(x)]
    for cls in filter(inspect.isclass, tuple(found)):
        methods = dict(inspect.getmembers(cls, inspect.isroutine))
        found += [method for name, method in methods.items() if not name.startswith("_")]
    is_ours = lambda x: (getattr(x, "__module__", None) or "").startswith("curvax.")
    return {x.__qualname__: x for x in found if is_ours(x)}


CALLABLES = public_callables()

# An override without a docstring has that of the method that it overrides, as `help()` shows it.
DOCSTRINGS = {name: inspect.getdoc(x) or "" for name, x in CALLABLES.items()}


def names(qualified: str) -> set[str]:
    """Return a name with that of its class, and without."""
    return {qualified, qualified.rpartition(".")[2]}


def test_public_names_and_methods_have_an_example():
    without = [name for name, text in DOCSTRINGS.items() if ">>>" not in text]
    concrete = [x for x in without if not getattr(CALLABLES[x], "__isabstractmethod__", False)]
    assert [name for name in concrete if not names(name) & EXEMPT] == []


def test_exempt_methods_exist():
    assert set().union(*map(names, CALLABLES)) >= EXEMPT


def test_docstrings_describe_their_arguments_themselves():
    """A reader in a notebook has only this docstring."""
    elsewhere = r"as\s+in\s+`|:\s*(see|as)\s+`|see\s+`[^`]+`\s+for\s+(the|its)\s+arguments"
    assert [name for name, text in DOCSTRINGS.items() if re.search(elsewhere, text)] == []


def names_in_code(text: str) -> set[str]:
    """Return the names in the inline code of a page that are those of functions or classes."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    names = re.findall(r"(?<![\w/])_?[A-Za-z]\w*", " ".join(re.findall("`([^`]+)`", text)))
    return {name for name in names if "_" in name or re.match("[A-Z][a-z]{2}", name)}


def test_the_design_page_names_what_exists():
    scripts = [*(ROOT / "scripts").glob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    known = set(re.findall(r"\w+", " ".join(path.read_text() for path in [*SOURCES, *scripts])))
    known |= {path.stem for path in (*SOURCES, *scripts, *(ROOT / "tests").rglob("*.py"))}
    known |= {"platform_dependent"}  # Of JAX; the page says why curvax does not use it.
    page = (ROOT / "docs" / "design.md").read_text()
    assert sorted(names_in_code(page) - known) == []


def test_files_that_the_pages_name_exist():
    text = " ".join(path.read_text() for path in PAGES)
    named = set(re.findall(r"`((?:\w+/)+\w+\.\w+)`", text))
    roots = (ROOT, ROOT / "src", ROOT / "src" / "curvax")
    missing = [name for name in named if not any((root / name).exists() for root in roots)]
    assert sorted(missing) == []
