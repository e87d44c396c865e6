"""Prompts of a study: chat, plain text or token ids, one row each, from JSONL or parquet."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl_sis.errors import SisConfigError, StudyFileError

PROMPT_COLUMNS = ("prompt", "messages", "text", "prompt_token_ids")
"""Names under which a prompt is looked for, in this order. verl's own data sets have ``prompt``."""

SAMPLING_COLUMNS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "sampling_params",
)
"""Columns that ask for a sampling of their own: all prompts of a study are sampled alike and without filters."""


def read_prompts(path: Path, tokenizer: Any, *, limit: int | None, max_tokens: int) -> list[list[int]]:
    """Read and tokenize prompts.

    A string is tokenized as it is; a list of messages goes through the tokenizer's chat template, ready for an answer;
    a list of integers is taken as token ids.

    Args:
        path: ``.jsonl`` or ``.parquet`` file.
        tokenizer: transformers' tokenizer of the model.
        limit: At most so many, from the start; all if None.
        max_tokens: Longest prompt allowed.

    Returns:
        Token ids of each prompt.

    Raises:
        StudyFileError: If the file is missing, unreadable, empty, or a row is none of the three kinds.
        SisConfigError: If rows carry sampling settings, or a prompt is too long.
    """
    prompts: list[list[int]] = []
    for number, row in enumerate(_rows(path)):
        if limit is not None and number >= limit:
            break
        ids = _tokenized(row, tokenizer, f"{path}, row {number + 1}")
        if len(ids) > max_tokens:
            raise SisConfigError(
                f"{path}, row {number + 1}: the prompt has {len(ids)} tokens, more than --max-prompt-tokens "
                f"{max_tokens}. A cut prompt is another prompt. Remove it, or type --max-prompt-tokens {len(ids)}"
            )
        prompts.append(ids)
    if not prompts:
        raise StudyFileError(f"{path} holds no prompts")
    return prompts


def digest(prompts: list[list[int]]) -> str:
    """A hash of all prompts, by which a resumed study knows them again."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        raise StudyFileError(f"expected a file of prompts, found none at {path}")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix in (".jsonl", ".json"):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
            if line.strip():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    raise StudyFileError(f"{path}, line {number + 1} is not JSON: {error}") from error
                yield row if isinstance(row, dict) else {"prompt": row}
    else:
        raise StudyFileError(f"expected prompts in a .jsonl or .parquet file, found {path}")


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise StudyFileError(f"{path} is not a complete parquet file: {error}") from error


def _tokenized(row: dict[str, Any], tokenizer: Any, place: str) -> list[int]:
    own = sorted(name for name in SAMPLING_COLUMNS if row.get(name) is not None)
    if own:
        raise SisConfigError(
            f"{place} asks for a sampling of its own ({', '.join(own)}). A study samples every prompt at one "
            "temperature and without filters, or its rates would be about a mixture. Remove these columns, and set "
            "--temperature for all"
        )
    found = [row[name] for name in PROMPT_COLUMNS if row.get(name) is not None]
    if not found:
        raise StudyFileError(f"{place} has none of the columns {', '.join(PROMPT_COLUMNS)}, only {sorted(row)}")
    prompt = found[0]
    if isinstance(prompt, str) and prompt:
        return [int(token) for token in tokenizer(prompt)["input_ids"]]
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return prompt
    if isinstance(prompt, list) and prompt and all(_is_message(message) for message in prompt):
        if tokenizer.chat_template is None:
            raise SisConfigError(f"{place} is a chat, but the model's tokenizer has no chat template. Give plain text")
        return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))
    raise StudyFileError(
        f"{place}: expected a text, a list of messages with role and content, or a list of token ids, found "
        f"{str(prompt)[:80]!r}"
    )


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= set(message)
