"""``verl-sis data math``: what is written from small files of the public schemas, and what is refused."""

import json

import pytest

from tests.data import public_files as public
from verl_sis.data import problems
from verl_sis.data.math import write_math
from verl_sis.errors import DataSetError

SYSTEM = {"role": "system", "content": "Please reason step by step, and put your final answer within \\boxed{}."}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return public.math_files(tmp_path_factory.mktemp("public"))


@pytest.fixture(scope="module")
def written(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("written") / "data"
    write_math(out, source=source, allow_count=True)
    return out


def test_training_rows_are_the_block_without_copies_and_instructions(written):
    assert public.read(written / "train.parquet") == [
        {
            "data_source": "dapo_math_17k",
            "prompt": [SYSTEM, {"role": "user", "content": problem}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": "train", "index": index, "id": id, "sample": 0},
        }
        for index, (id, problem, answer) in enumerate(public.BLOCK)
    ]


def test_math500_is_written_once(written):
    rows = public.read(written / "math500.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == [r"\frac{1}{2}", r"\text{Evelyn}"]
    assert rows[0]["prompt"] == [SYSTEM, {"role": "user", "content": "Convert $(0,3)$."}]
    assert rows[0]["extra_info"] == {"split": "test", "index": 0, "id": "test/precalculus/807.json", "sample": 0}


@pytest.mark.parametrize(
    ("name", "answers", "ids"),
    [("amc23", ["27", "-1"], ["0", "1"]), ("aime24", ["33"], ["60"]), ("aime25", ["336"], ["0"])],
)
def test_competitions_are_written_32_times(written, name, answers, ids):
    rows = public.read(written / f"{name}.parquet")
    assert [row["reward_model"]["ground_truth"] for row in rows] == [answer for answer in answers for _ in range(32)]
    assert [row["extra_info"] for row in rows] == [
        {"split": "test", "index": 32 * number + sample, "id": id, "sample": sample}
        for number, id in enumerate(ids)
        for sample in range(32)
    ]
    assert {row["data_source"] for row in rows} == {name}


def test_manifest(written):
    manifest = json.loads((written / "manifest.json").read_text())
    assert {name: (each["expected"], each["found"]) for name, each in manifest["counts"].items()} == {
        "dapo_math_17k": (17917, 6),
        "math500": (500, 2),
        "amc23": (40, 2),
        "aime24": (30, 1),
        "aime25": (30, 1),
    }
    sizes = {
        each["file"]: (each["problems"], each["samples_per_problem"], each["rows"]) for each in manifest["outputs"]
    }
    assert sizes == {
        "train.parquet": (6, 1, 6),
        "math500.parquet": (2, 1, 2),
        "amc23.parquet": (2, 32, 64),
        "aime24.parquet": (1, 32, 32),
        "aime25.parquet": (1, 32, 32),
    }
    assert manifest["different_texts"] == 4
    assert manifest["texts_with_several_answers"] == [{"id-3": "3", "id-4": "-3"}]
    assert manifest["train_and_test_share"] == {"math500": [], "amc23": [["id-5", "0"]], "aime24": [], "aime25": []}
    assert manifest["dropped_from_train"] == []
    first = manifest["inputs"][0]
    assert (first["hub_id"], first["revision"], first["file"]) == (
        "BytedTsinghua-SIA/DAPO-Math-17k",
        None,
        "dapo_math_17k.parquet",
    )
    assert str(written.parent) not in (written / "manifest.json").read_text()


def test_shared_problems_can_be_left_out(source, tmp_path):
    write_math(tmp_path / "out", source=source, allow_count=True, drop_overlap=True)
    rows = public.read(tmp_path / "out" / "train.parquet")
    assert [row["extra_info"]["id"] for row in rows] == ["id-0", "id-1", "id-2", "id-3", "id-4"]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["dropped_from_train"] == ["id-5"]
    assert manifest["counts"]["dapo_math_17k"]["found"] == 6


def test_equal_inputs_give_equal_bytes(source, written, tmp_path):
    write_math(tmp_path / "again", source=source, allow_count=True)
    assert public.contents(tmp_path / "again") == public.contents(written)


def test_the_format_of_a_local_file_does_not_matter(written, tmp_path):
    files = public.math_files(tmp_path / "files")
    (files / "dapo_math_17k.parquet").unlink()
    public.write_jsonl(files / "dapo_math_17k.jsonl", public.dapo_rows(copies=1))
    (files / "amc23.parquet").unlink()
    (files / "amc23.json").write_text(json.dumps(public.AMC23))
    write_math(tmp_path / "out", source=files, allow_count=True)
    for name in ("train", "amc23"):
        assert public.read(tmp_path / "out" / f"{name}.parquet") == public.read(written / f"{name}.parquet")


def test_other_numbers_are_refused_unless_allowed(source, tmp_path, monkeypatch):
    with pytest.raises(DataSetError, match=r"dapo_math_17k: expected 17,917, found 6.*add --allow-count"):
        write_math(tmp_path / "out", source=source)
    monkeypatch.setattr("verl_sis.data.math.DAPO_PROBLEMS", 6)
    with pytest.raises(DataSetError, match=r"math500: expected 500, found 2.*add --allow-count"):
        write_math(tmp_path / "out", source=source)
    assert list(tmp_path.iterdir()) == []


WITHOUT_ANSWER = public.dapo_row("id-9", "What?", None)
TWO_MESSAGES = {**public.dapo_row("id-9", "What?", "1"), "prompt": 2 * public.dapo_row("", "What?", "")["prompt"]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dapo_math_17k": [public.dapo_row("id-9", "What?", "1", prefix="Solve.\n\n")]}, "row 1: expected the instr"),
        ({"dapo_math_17k": [public.dapo_row("id-9", "What?", "1", suffix="")]}, "row 1: expected the instructions"),
        ({"dapo_math_17k": [public.dapo_row("id-9", " ", "1")]}, "row 1: expected a problem, an answer and an id"),
        ({"dapo_math_17k": [*public.dapo_rows(1), WITHOUT_ANSWER]}, "row 7: expected a problem, an answer and an id"),
        ({"dapo_math_17k": [TWO_MESSAGES]}, "row 1: expected one message"),
        ({"dapo_math_17k": [{"problem": "What?"}]}, "expected the columns prompt, reward_model, extra_info"),
        ({"dapo_math_17k": [*public.dapo_rows(2), public.dapo_row("id-0", public.BLOCK[0][1], "8")]},
         "row 13: id id-0 has different answers '9' and '8'"),
        ({"dapo_math_17k": [*public.dapo_rows(2), public.dapo_row("id-0", "Else?", "9")]},
         "row 13: id id-0 has different texts"),
        ({"dapo_math_17k": [public.dapo_row(f"id-{n}", "x", "") for n in range(7)]}, "row 5: .*; and 2 more"),
        ({"math500": [{"problem": "What?", "answer": None}]}, "row 1: expected an answer, found None"),
        ({"math500": [{"problem": "", "answer": "1"}]}, "row 1: no problem"),
        ({"math500": [*public.MATH500, public.MATH500[1]]}, "row 3: the problem of row test/algebra/1.json again"),
        ({"aime25": [{"problem": "What?", "answer": r"\frac{1}{2}"}]}, "row 1: expected a whole number, found"),
        ({"aime24": [{"problem": "What?", "answer": 0.5}]}, "row 1: expected a whole number, found 0.5"),
        ({"amc23": [{"problem": "What?", "answer": "1"}]}, "expected the columns question, answer"),
        ({"aime25": []}, "aime25: expected 30, found 0"),
    ],
)  # fmt: skip
def test_rows_that_are_not_as_they_should_be(tmp_path, changed, message):
    files = public.math_files(tmp_path / "files", **changed)
    with pytest.raises(DataSetError, match=message):
        write_math(tmp_path / "out", source=files, allow_count=True)
    assert list(tmp_path.iterdir()) == [files]


def test_the_recipe_needs_the_numbers_of_the_paper():
    assert problems.DAPO_PROBLEMS == 17_917
    assert {each.source.name: (each.problems, each.samples) for each in problems.EVALUATIONS} == {
        "math500": (500, 1),
        "amc23": (40, 32),
        "aime24": (30, 32),
        "aime25": (30, 32),
    }
