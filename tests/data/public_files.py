"""Small files of the public data sets' schemas, with what is known of their rows: copies, several ids, odd answers."""

import json
from pathlib import Path

import pyarrow
from pyarrow import parquet

PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'

BLOCK = [
    ("id-0", "Find $x^2$ for $x = 3$.", "9"),
    ("id-1", "求 $1 + 1$。", "2"),
    ("id-2", "Find  $x^2$\nfor $x = 3$.", "9"),  # another id, the same words
    ("id-3", "How many sides has a triangle?", "3"),
    ("id-4", "How many sides has a triangle?", "-3"),  # another id, another answer
    ("id-5", "Find the number of AMC.", "27"),  # is in AMC 2023
]
"""Id, problem and answer of DAPO-Math-17k's rows, before they are copied."""

MATH500 = [
    {
        "problem": "Convert $(0,3)$.",
        "solution": r"$\boxed{\frac{1}{2}}$",
        "answer": r"\frac{1}{2}",
        "subject": "Precalculus",
        "level": 2,
        "unique_id": "test/precalculus/807.json",
    },
    {
        "problem": "Name her.",
        "solution": "",
        "answer": r"\text{Evelyn}",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
]
AMC23 = [
    {"id": 0, "question": "find the number of AMC", "answer": "27.0", "url": "u"},
    {"id": 1, "question": "Second of AMC?", "answer": "-1", "url": "u"},
]
AIME24 = [
    {"id": 60, "problem": "First of AIME 2024?", "solution": "", "answer": "033", "url": "u", "year": "2024"},
]
AIME25 = [
    {"problem": "First of AIME 2025?", "answer": "336^\\circ", "id": "0"},
]


def dapo_row(id, problem, answer, prefix=PREFIX, suffix=SUFFIX):
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": prefix + problem + suffix, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": id},
    }


def dapo_rows(copies=3):
    """The block, several times over, as in the public file."""
    return [dapo_row(*row) for _ in range(copies) for row in BLOCK]


def question(id, text, golden, data_source):
    return {
        "id": id,
        "question": text,
        "golden_answers": golden,
        "data_source": data_source,
        "prompt": [{"content": f"Answer the given question. {text}", "role": "user"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": golden}, "style": "rule"},
        "extra_info": {"index": 0, "split": "train"},
    }


SEARCH_TRAIN = [
    question("train_0", "who sang help?", ["The Beatles", " Beatles ", "Beatles", ""], "nq"),
    question("train_1", "Where is Łódź?", ["Poland"], "nq"),
    question("train_0", "Are both rivers?", ["yes"], "hotpotqa"),
]
SEARCH_TEST = [
    question(f"test_{number}", f"question {number} of {name}?", [f"answer {number}"], name)
    for name in ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    for number in range(2)
] + [question("test_2", "Who sang 'Help'?", ["The Beatles"], "nq")]


def write_parquet(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_jsonl(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def math_files(directory: Path, **changed: list[dict]) -> Path:
    """All data sets of ``verl-sis data math`` in their public formats; some with other rows."""
    rows = {"dapo_math_17k": dapo_rows(), "math500": MATH500, "amc23": AMC23, "aime24": AIME24, "aime25": AIME25}
    for name, its_rows in {**rows, **changed}.items():
        if name in ("math500", "aime25"):
            write_jsonl(directory / f"{name}.jsonl", its_rows)
        else:
            write_parquet(directory / f"{name}.parquet", its_rows)
    return directory


def search_files(directory: Path, **changed: list[dict]) -> Path:
    """Both files of ``verl-sis data search``; some with other rows."""
    for name, rows in {"train": SEARCH_TRAIN, "test": SEARCH_TEST, **changed}.items():
        write_parquet(directory / f"{name}.parquet", rows)
    return directory


def read(path: Path) -> list[dict]:
    return parquet.read_table(path).to_pylist()


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}
