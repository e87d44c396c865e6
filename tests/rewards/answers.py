"""The shared answer pairs, and a checker with few processes."""

import json
from pathlib import Path

PAIRS = [json.loads(line) for line in Path(__file__).with_name("answer_pairs.jsonl").read_text().splitlines()]
"""``response``, ``ground_truth``, verdicts of the rules, ``kind`` and ``note``; all written by hand."""

RULES = ("exact", "hendrycks", "math_verify")
