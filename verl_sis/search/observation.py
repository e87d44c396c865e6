"""How passages are written into the policy's context."""

from collections.abc import Sequence

from verl_sis.errors import SisConfigError

PASSAGE_FORMAT = "Doc {rank} (Title: {title}) {text}"
"""One passage; ``rank`` counts from 1."""


def observation(documents: Sequence[dict[str, str]], passage_format: str = PASSAGE_FORMAT) -> str:
    """Write passages one below the other.

    Args:
        documents: Each with ``title`` and ``text``, best first.
        passage_format: Of one passage, with any of ``{rank}``, ``{title}`` and ``{text}``.

    Returns:
        One text.

    Raises:
        SisConfigError: If the format names anything else.
    """
    try:
        return "\n".join(
            passage_format.format(rank=rank, title=document["title"], text=document["text"])
            for rank, document in enumerate(documents, start=1)
        )
    except (KeyError, IndexError, ValueError) as error:
        raise SisConfigError(
            f"expected passage_format with {{rank}}, {{title}} and {{text}}, found {passage_format!r}: {error!r}"
        ) from error
