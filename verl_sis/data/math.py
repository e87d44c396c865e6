"""Mathematics: DAPO-Math-17k for training; MATH-500, AMC 2023, AIME 2024 and AIME 2025 for evaluation.

Prompts are those of the paper's recipe: the system message asks to reason step by step and to box the answer, the
user's message is the bare problem.

DAPO-Math-17k's public file holds 1,791,700 rows: 100 copies of 17,917 rows with an id each (``extra_info.index``).
These 17,917 are what is written. Fewer are different texts, since some problems have several ids, and a few of these
have several answers; the manifest lists them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_sis.data.files import Writer, chat_row, checked_count, new_directory
from verl_sis.data.problems import DAPO, DAPO_PROBLEMS, EVALUATIONS, Problem, read_dapo, read_evaluation
from verl_sis.data.sources import Row, at_revisions, locate
from verl_sis.data.texts import overlap, spaced

if TYPE_CHECKING:
    import pyarrow

SYSTEM_PROMPT = "Please reason step by step, and put your final answer within \\boxed{}."
"""Qwen2.5-Math's prompt for reasoning in steps."""


def write_math(
    out: Path,
    *,
    source: Path | None = None,
    revisions: tuple[str, ...] = (),
    allow_count: bool = False,
    drop_overlap: bool = False,
) -> dict[str, Any]:
    """Write ``train.parquet``, a file per evaluation set and ``manifest.json``; all of them or none.

    Args:
        out: Directory that does not exist yet.
        source: Directory of local files, one per data set; None for the hub.
        revisions: ``name=revision`` each, instead of the revisions that the counts and checksums are known of.
        allow_count: Take other numbers of problems than the known ones.
        drop_overlap: Leave out training problems that are also in an evaluation set.

    Returns:
        What the manifest says beyond inputs and outputs.

    Raises:
        DataSetError: A data set is missing or is not what it should be; or there is something at ``out``.
    """
    sources = at_revisions((DAPO, *(evaluation.source for evaluation in EVALUATIONS)), list(revisions))
    with new_directory(out) as directory:
        inputs = [locate(each, source) for each in sources]
        train = read_dapo(inputs[0])
        counts = {DAPO.name: checked_count("ids of " + DAPO.name, len(train), DAPO_PROBLEMS, allow=allow_count)}
        tests = {}
        for evaluation, found in zip(EVALUATIONS, inputs[1:], strict=True):
            name = found.source.name
            tests[name] = read_evaluation(evaluation, found)
            what = "problems of " + name
            counts[name] = checked_count(what, len(tests[name]), evaluation.problems, allow=allow_count)
        shared = {name: overlap(_named(train), _named(problems)) for name, problems in tests.items()}
        dropped = {id for pairs in shared.values() for id, _ in pairs} if drop_overlap else set()
        kept = [problem for problem in train if problem.id not in dropped]

        writer = Writer(directory, _schema())
        writer.write("train", [DAPO.name], list(_rows(DAPO.name, "train", kept, samples=1)), 1)
        for evaluation in EVALUATIONS:
            name, samples = evaluation.source.name, evaluation.samples
            writer.write(name, [name], list(_rows(name, "test", tests[name], samples=samples)), samples)
        findings = {
            "counts": counts,
            "train_and_test_share": {name: [list(pair) for pair in pairs] for name, pairs in shared.items()},
            "dropped_from_train": sorted(dropped),
            **_repeated(train),
        }
        writer.write_manifest("math", inputs, findings)
    return findings


def _named(problems: list[Problem]) -> Iterator[tuple[str, str]]:
    return ((problem.id, problem.text) for problem in problems)


def _repeated(problems: list[Problem]) -> dict[str, Any]:
    """How many different texts there are, and which have several answers; for the manifest."""
    by_text: dict[str, list[Problem]] = {}
    for problem in problems:
        by_text.setdefault(spaced(problem.text), []).append(problem)
    return {
        "different_texts": len(by_text),
        "texts_with_several_answers": [
            {problem.id: problem.answer for problem in same}
            for same in by_text.values()
            if len({problem.answer for problem in same}) > 1
        ],
    }


def _rows(data_source: str, split: str, problems: list[Problem], samples: int) -> Iterator[Row]:
    """Samples of a problem follow each other. ``index`` numbers rows: verl takes equal neighbours for one prompt's."""
    for number, problem in enumerate(problems):
        for sample in range(samples):
            index = number * samples + sample
            yield chat_row(
                data_source=data_source,
                system=SYSTEM_PROMPT,
                user=problem.text,
                ability="math",
                ground_truth=problem.answer,
                extra_info={"split": split, "index": index, "id": problem.id, "sample": sample},
            )


def _schema() -> "pyarrow.Schema":
    import pyarrow as pa

    text = pa.string()
    return pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct({"split": text, "index": pa.int64(), "id": text, "sample": pa.int64()}),
        }
    )
