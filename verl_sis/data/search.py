"""Agentic search: Natural Questions and HotpotQA for training, seven question sets for evaluation.

The data are Search-R1's (arXiv 2503.09516; hub: PeterJinGo/nq_hotpotqa_train). Prompts are for verl's tool agent: the
chat template adds the tool's schema, and the model calls it. verl 0.9.1 needs ``agent_name`` in each row; no
``tools_kwargs``, since a search tool keeps nothing per row.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_sis.data.files import Writer, chat_row, checked_count, new_directory
from verl_sis.data.sources import Input, Row, Source, at_revisions, locate, read_rows
from verl_sis.data.texts import overlap
from verl_sis.errors import DataSetError

if TYPE_CHECKING:
    import pyarrow

SYSTEM_PROMPT = (
    "You answer questions. Think first. If you lack a fact, call the search tool with a short query and read what it "
    "returns; you may call it at most twice. When you know the answer, give it between <answer> and </answer>: a name, "
    "number, date, or yes or no, and no explanation."
)
"""Says what the reward checks and how many tool calls the recipe allows."""

AGENT = "tool_agent"
"""verl's registered agent loop that executes tool calls."""

_HUB_ID, _REVISION = "PeterJinGo/nq_hotpotqa_train", "b7d80abfee334a7a91cb377544f09180d58b34f6"

TRAIN = Source(
    "train", _HUB_ID, _REVISION, "train.parquet", "c3cc21e862a8469105de666101578cbff23cdc77e91a803cef102622c89cc4f6"
)
TEST = Source(
    "test", _HUB_ID, _REVISION, "test.parquet", "30aa887b6d47e06e8c0f6f5307c88fe4e13461ac25a20ec0a5433ad7a4fe25dc"
)

TRAIN_QUESTIONS = {"nq": 79_168, "hotpotqa": 90_447}
"""Training questions per data set in the public file."""

TEST_QUESTIONS = {
    "nq": 3_610,
    "triviaqa": 11_313,
    "popqa": 14_267,
    "hotpotqa": 7_405,
    "2wikimultihopqa": 12_576,
    "musique": 2_417,
    "bamboogle": 125,
}
"""Test questions per data set in the public file."""


def write_search(
    out: Path,
    *,
    source: Path | None = None,
    revisions: tuple[str, ...] = (),
    allow_count: bool = False,
    drop_overlap: bool = False,
) -> dict[str, Any]:
    """Write ``train.parquet``, a file per test set and ``manifest.json``; all of them or none.

    Args:
        out: Directory that does not exist yet.
        source: Directory with local files ``train`` and ``test``; None for the hub.
        revisions: ``name=revision`` each, instead of the revision that the counts and checksums are known of.
        allow_count: Take other numbers of questions than the known ones.
        drop_overlap: Leave out training questions that are also in a test set.

    Returns:
        What the manifest says beyond inputs and outputs.

    Raises:
        DataSetError: A data set is missing or is not what it should be; or there is something at ``out``.
    """
    with new_directory(out) as directory:
        inputs = [locate(each, source) for each in at_revisions((TRAIN, TEST), list(revisions))]
        train, test = (read_questions(found) for found in inputs)
        counts = {
            "train": _counts("training", train, TRAIN_QUESTIONS, allow=allow_count),
            "test": _counts("test", test, TEST_QUESTIONS, allow=allow_count),
        }
        shared = overlap(_named(train), _named(test))
        dropped = {id for id, _ in shared} if drop_overlap else set()
        kept = [question for question in train if _id(question) not in dropped]

        writer = Writer(directory, _schema())
        writer.write("train", list(TRAIN_QUESTIONS), list(_rows("train", kept)), 1)
        for name in TEST_QUESTIONS:
            rows = list(_rows("test", [question for question in test if question["data_source"] == name]))
            writer.write(name, [name], rows, 1)
        findings = {
            "counts": counts,
            "train_and_test_share": {
                name: [list(pair) for pair in shared if pair[1].startswith(name + "/")] for name in TEST_QUESTIONS
            },
            "dropped_from_train": sorted(dropped),
        }
        writer.write_manifest("search", inputs, findings)
    return findings


def read_questions(found: Input) -> list[Row]:
    """Read questions with their golden answers, in the order of the file.

    Args:
        found: ``train`` or ``test`` of the public data.

    Returns:
        ``id``, ``question``, ``golden_answers`` (without empty ones and repetitions) and ``data_source`` of each.

    Raises:
        DataSetError: A column is missing, or a row has no question or no golden answer.
    """
    questions, faults = [], []
    for number, row in enumerate(read_rows(found, ("id", "question", "golden_answers", "data_source")), start=1):
        golden = row["golden_answers"]
        strings = isinstance(golden, list) and all(isinstance(answer, str) for answer in golden)
        answers = list(dict.fromkeys(answer.strip() for answer in golden if answer.strip())) if strings else []
        if not isinstance(row["question"], str) or not row["question"].strip():
            faults.append(f"row {number} ({row['id']}): no question")
        elif not answers:
            faults.append(f"row {number} ({row['id']}): expected a list of golden answers, found {golden!r}")
        else:
            questions.append(
                {
                    "id": str(row["id"]),
                    "question": row["question"].strip(),
                    "golden_answers": answers,
                    "data_source": str(row["data_source"]),
                }
            )
    if faults:
        raise DataSetError(
            f"{found.path}: {len(faults)} rows are no questions: {'; '.join(faults[:5])}. Expected "
            f"{found.source.file} of the data set {found.source.hub_id}; repair the rows in a copy and name its "
            "directory with --source"
        )
    return questions


def _counts(what: str, questions: list[Row], expected: dict[str, int], *, allow: bool) -> dict[str, dict[str, int]]:
    found = Counter(question["data_source"] for question in questions)
    unknown = sorted(set(found) - set(expected))
    if unknown:
        raise DataSetError(
            f"expected {what} questions of {', '.join(expected)}; found also {', '.join(unknown)}. "
            "Remove them from a copy of the file and name its directory with --source"
        )
    return {
        name: checked_count(f"{what} questions of {name}", found[name], number, allow=allow)
        for name, number in expected.items()
    }


def _id(question: Row) -> str:
    """Ids repeat across data sets: both count from ``train_0`` and ``test_0``."""
    return f"{question['data_source']}/{question['id']}"


def _named(questions: list[Row]) -> Iterator[tuple[str, str]]:
    return ((_id(question), question["question"]) for question in questions)


def _rows(split: str, questions: list[Row]) -> Iterator[Row]:
    for index, question in enumerate(questions):
        row = chat_row(
            data_source=question["data_source"],
            system=SYSTEM_PROMPT,
            user=question["question"],
            ability="search",
            ground_truth={"target": question["golden_answers"]},
            extra_info={"split": split, "index": index, "id": question["id"]},
        )
        yield {**row, "agent_name": AGENT}


def _schema() -> "pyarrow.Schema":
    import pyarrow as pa

    text = pa.string()
    return pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": pa.struct({"target": pa.list_(text)})}),
            "extra_info": pa.struct({"split": text, "index": pa.int64(), "id": text}),
            "agent_name": text,
        }
    )
