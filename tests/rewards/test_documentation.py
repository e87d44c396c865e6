"""The examples of docs/data.md are pairs of the shared file, with its verdicts."""

import re
from pathlib import Path

from tests.rewards.answers import PAIRS, RULES

ROW = re.compile(r"^\| `(.+)` \| `(.+)` \| (yes|no) \| (yes|no) \| (yes|no) \|$", re.MULTILINE)


def test_examples():
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    verdicts = {
        (pair["response"], pair["ground_truth"]): tuple("yes" if pair[rule] else "no" for rule in RULES)
        for pair in PAIRS
    }
    rows = ROW.findall(text)
    assert len(rows) == 14
    for answer, ground_truth, *shown in rows:
        assert verdicts[f"So the answer is \\boxed{{{answer}}}.", ground_truth] == tuple(shown), (answer, ground_truth)
