"""Responses to look at: their tokens, colored by how likely SIS accepts them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_sis.records.schema import LOG_PROBS
from verl_sis.study import measures
from verl_sis.study.pool import Example
from verl_sis.study.summary import Summary

MAX_TOKENS = 400
"""Tokens of a response that are shown."""


@dataclass(frozen=True)
class Token:
    """One token of an example.

    Attributes:
        text: As the tokenizer decodes it; its id in brackets without a tokenizer.
        color: CSS color: white where it is accepted for certain, red where it is rejected for certain.
        note: Acceptance, membership and ``log w`` in words.
    """

    text: str
    color: str
    note: str


@dataclass(frozen=True)
class ShownResponse:
    """One response.

    Attributes:
        title: Why it is shown, and where it stands.
        tokens: Its tokens, ``MAX_TOKENS`` at most.
        cut: Number of tokens that are not shown.
    """

    title: str
    tokens: list[Token]
    cut: int


def load_tokenizer(source: dict[str, Any]) -> Any:
    """The tokenizer of the study's model if it is at hand, without asking a hub; None if not."""
    from transformers import AutoTokenizer

    model = source.get("model")
    if not isinstance(model, str):
        return None
    try:
        return AutoTokenizer.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError):
        return None


def decode(tokenizer: Any, token: int) -> str:
    """Text of one token; its id in brackets without a tokenizer."""
    return f"[{token}]" if tokenizer is None else str(tokenizer.decode([token]))


def shown_responses(summary: Summary, tokenizer: Any) -> list[ShownResponse]:
    """The study's examples, read again from its files.

    Args:
        summary: Of the study.
        tokenizer: Of its model, or None.
    """
    pool = summary.pool
    if pool.layout.headline_pair is None:
        return []
    shown = [_shown(summary, example, "first of the study", tokenizer) for example in pool.first[:2]]
    seen = {(example.file.path, example.sequence) for example in pool.first[:2]}
    for example in pool.worst:
        if (example.file.path, example.sequence) not in seen:
            shown.append(_shown(summary, example, "largest mean |log w|", tokenizer))
    return shown


def _shown(summary: Summary, example: Example, why: str, tokenizer: Any) -> ShownResponse:
    pair = summary.pool.layout.headline_pair
    assert pair is not None
    old, current = LOG_PROBS[pair]
    acceptance, rank = f"{pair}_acceptance", measures.rank_of(pair)
    column = measures.headline(summary.pool.layout.ks)
    names = ["sequence", "token", old, current, acceptance, rank]
    parts: list[dict[str, np.ndarray]] = []
    for batch in example.file.batches(names):
        mine = batch["sequence"] == example.sequence
        if mine.any():
            parts.append({name: values[mine] for name, values in batch.items()})
    rows = {name: np.concatenate([part[name] for part in parts]) for name in names}
    tokens = [
        _token(decode(tokenizer, int(token)), float(a), int(r), float(w), summary.headline_k)
        for token, a, r, w in zip(
            rows["token"][:MAX_TOKENS],
            rows[acceptance][:MAX_TOKENS, column],
            rows[rank][:MAX_TOKENS],
            rows[current][:MAX_TOKENS] - rows[old][:MAX_TOKENS],
            strict=True,
        )
    ]
    title = f"{why}: response {example.sequence} of {example.file.path.name}, mean |log w| {example.score:.2g}"
    return ShownResponse(title, tokens, max(len(rows["token"]) - MAX_TOKENS, 0))


def _token(text: str, acceptance: float, rank: int, log_ratio: float, k: int) -> Token:
    inside = f"rank {rank + 1}" if 0 <= rank < k else f"outside the top-{k}"
    share = max(0.0, 1.0 - acceptance)
    color = f"rgba(214, 39, 40, {share:.3f})"
    return Token(text, color, f"acceptance {acceptance:.3f}, {inside}, log w {log_ratio:+.4f}")
