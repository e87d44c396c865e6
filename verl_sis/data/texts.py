"""When two questions are the same text."""

import unicodedata
from collections.abc import Iterable


def spaced(text: str) -> str:
    """The text with single spaces."""
    return " ".join(text.split())


def skeleton(text: str) -> str:
    """Letters and digits of a text, without case, accents' encoding, LaTeX signs and punctuation."""
    return "".join(character for character in unicodedata.normalize("NFKC", text).casefold() if character.isalnum())


def overlap(train: Iterable[tuple[str, str]], test: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pairs of questions whose `skeleton` is the same; questions that are only worded alike are not found.

    Args:
        train: Name and text of each training question.
        test: Name and text of each test question.

    Returns:
        Names of the training and of the test question, in the order of the training questions.
    """
    tests: dict[str, list[str]] = {}
    for name, text in test:
        tests.setdefault(skeleton(text), []).append(name)
    # Texts of signs alone have nothing to compare.
    tests.pop("", None)
    return [(name, other) for name, text in train for other in tests.get(skeleton(text), ())]
