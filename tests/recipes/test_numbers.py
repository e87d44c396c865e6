"""Values of the recipes against the table of published ones, and expected results against the paper's tables.

``hyper_parameters.csv`` holds what paper, release and others say, contradictions included; where a recipe has another
value, ``deliberate_differences.csv`` says why. Both are complete: an undeclared difference fails, and so does a
declared one that is none. The tests compose through tests.contract.compose.
"""

import csv
import math
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from tests.recipes.composing import RECIPES, composed, every_variant, expected, recipes, value

HERE = Path(__file__).parent
PAPER = RECIPES.parent / "verl_sis" / "tables" / "paper_numbers.csv"
PROBLEMS = {"math500": (500, 1), "amc23": (40, 32), "aime24": (30, 32), "aime25": (30, 32)}
"""Problems of each benchmark and samples of each problem."""


def rows(name):
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def matches(name, patterns):
    return any(fnmatch(name, pattern) for pattern in patterns.split())


def of_row(row):
    """Variants that a row is about."""
    return [pair for pair in every_variant() if matches(pair[0], row["recipes"]) and matches(pair[1], row["variants"])]


def same(found, text):
    """Whether a composed value is what a table says; numbers by value, so that 1 is 1.0."""
    return found == yaml.safe_load(text) or str(found) == text


def undeclared():
    """Every (recipe, variant, key, source) whose value differs from the published one."""
    return {
        (recipe, variant, row["key"], row["source"])
        for row in rows("hyper_parameters.csv")
        for recipe, variant in of_row(row)
        if not same(value(recipe, variant, row["key"]), row["value"])
    }


def test_each_difference_is_declared_and_each_declared_one_exists():
    declared = [
        (recipe, variant, row["key"], row["source"])
        for row in rows("deliberate_differences.csv")
        for recipe, variant in of_row(row)
    ]
    assert len(declared) == len(set(declared))
    assert sorted(undeclared()) == sorted(declared)


def test_differences_state_both_values():
    published = {(row["key"], row["source"], row["value"]) for row in rows("hyper_parameters.csv")}
    for row in rows("deliberate_differences.csv"):
        assert (row["key"], row["source"], row["there"]) in published
        assert row["reason"]
        for recipe, variant in of_row(row):
            assert same(value(recipe, variant, row["key"]), row["here"]), (row, variant)


@pytest.mark.parametrize("name", ["hyper_parameters.csv", "deliberate_differences.csv"])
def test_each_row_is_about_some_variant_and_about_one_thing(name):
    for row in rows(name):
        assert of_row(row), row
        assert None not in row, f"too many cells: {row}"
        assert all(row.values()), f"empty cell: {row}"


@pytest.mark.parametrize("recipe", [name for name in recipes() if name.startswith("math_")])
def test_what_a_math_recipe_trains_on_is_covered(recipe):
    keys = {
        key for row in rows("hyper_parameters.csv") if matches(recipe, row["recipes"]) for key in row["key"].split("|")
    }
    text = (RECIPES / recipe / "recipe.yaml").read_text() + (RECIPES / "math_qwen3_8b" / "recipe.yaml").read_text()
    for key in ("ppo_mini_batch_size", "lr", "lr_warmup_steps", "kl_loss_coef", "max_response_length", "n"):
        assert f" {key}:" in text
        assert any(known.endswith(f".{key}") for known in keys)


def test_the_readme_lists_every_difference():
    text = (RECIPES / "README.md").read_text()
    table = text.partition("<!-- differences -->")[2].partition("<!-- end of differences -->")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][1:]
    columns = ("recipes", "variants", "key", "here", "there", "source", "reason")
    assert lines == [
        "| " + " | ".join(row[column].replace("*", r"\*") for column in columns) + " |"
        for row in rows("deliberate_differences.csv")
    ]


def results():
    for recipe in recipes():
        sections = expected(recipe)
        entries = [*sections["variants"].items(), *((e["variant"], e) for e in sections.get("with_groups", []))]
        for variant, entry in entries:
            for result in entry["results"]:
                yield recipe, variant, result


@pytest.mark.parametrize("recipe", recipes())
def test_expected_json_says_what_is_active(recipe):
    for entry in expected(recipe)["variants"].values():
        assert {"sis", "top_k", "r3", "results"} <= set(entry)
        assert isinstance(entry["sis"], bool) and isinstance(entry["r3"], bool)
        assert (entry["top_k"] is not None) == entry["sis"]


def test_expected_results_have_these_fields():
    for recipe, _, result in results():
        assert set(result) == {"metric", "value", "source", "tolerance", "measured_here"}, recipe
        assert isinstance(result["metric"], str)
        assert isinstance(result["source"], str) and result["source"]
        numbers = [result["value"], result["tolerance"]]
        assert all(number is None or (isinstance(number, int | float) and number > 0) for number in numbers)
        assert result["measured_here"] is None or isinstance(result["measured_here"], int | float)


def test_expected_math_results_are_the_papers():
    with PAPER.open(newline="") as file:
        paper = {
            (row["model"], row["task"], f"{row['table']}, {row['method']}; {row['source']}"): float(row["value"])
            for row in csv.DictReader(file)
            if row["benchmark"] == "Avg"
        }
    found = [result for result in results() if result[0].startswith("math_")]
    for recipe, variant, result in found:
        model = composed(recipe, variant).actor_rollout_ref.model.path.partition("/")[2]
        assert paper[model, "math", result["source"]] == result["value"]
    assert len(found) == 10 + 9 + 6


def test_tolerance_is_the_noise_of_two_evaluations():
    """Binomial at most: p (1 - p) <= 1/4 for every problem; the four benchmarks are averaged; two runs are compared."""
    variance = sum(0.25 / (problems * samples) for problems, samples in PROBLEMS.values()) / len(PROBLEMS) ** 2
    tolerance = round(100 * 1.96 * math.sqrt(2 * variance), 2)
    assert tolerance == 2.42
    assert {result["tolerance"] for recipe, _, result in results() if recipe.startswith("math_")} == {tolerance}


def test_results_of_the_tiny_twins_are_those_of_the_committed_tables():
    with (RECIPES / "tiny" / "results" / "table1.csv").open(newline="") as file:
        # The falsifier's cells (K = 1, K = the vocabulary) are runs of a variant with another K, not variants.
        run = [row for row in csv.DictReader(file) if row["n"] == "3" and not row["method"].endswith(("=1)", "=102)"))]
    averages = [(row["N"], round(float(row["average"]), 2)) for row in run]
    found = [result for recipe, _, result in results() if recipe == "tiny"]
    stated = [(result["metric"].split("N = ")[1].split(",")[0], result["measured_here"]) for result in found]
    assert sorted(stated) == sorted(averages) and len(averages) == 12
    assert all(result["value"] == result["measured_here"] for result in found)
