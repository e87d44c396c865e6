r"""The answer of a response: what stands in its last ``\boxed{...}``."""

import re

_BOX = re.compile(r"\\boxed\s*\{")


def last_boxed(response: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}``, braces inside it balanced.

    ``\{`` and ``\}`` are characters, not braces. Where boxes are nested, the last one to open counts. A last box that
    never closes, as in a response that was cut off, holds no answer, even if earlier boxes do.

    Args:
        response: Text of the response.

    Returns:
        The text between the braces, as it stands; None if there is no box or the last one does not close.
    """
    start = None
    for match in _BOX.finditer(response):
        start = match.end()
    if start is None:
        return None
    depth, position = 1, start
    while position < len(response):
        character = response[position]
        if character == "\\":
            position += 2
            continue
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return response[start:position]
        position += 1
    return None
