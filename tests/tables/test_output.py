"""The command and its files: golden texts, LaTeX that compiles, refusals on the command line.

The runs are composed (``tests.contract.compose``), in the worker that has what Hydra has read.
"""

import csv
import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.tables.runs import write_run
from verl_sis.__main__ import app
from verl_sis.tables.statistics import Measured
from verl_sis.tables.table import Column
from verl_sis.tables.write import markdown, tex

GOLDEN = Path(__file__).parent / "golden"
TEXTS = (".md", ".csv", ".tex")


@pytest.fixture(scope="module")
def out(recorded_runs, tmp_path_factory):
    """Output of the command, over that of an earlier call."""
    root = tmp_path_factory.mktemp("tables")
    (root / "out").mkdir()
    (root / "out" / "tables.md").write_text("of an earlier call")
    result = CliRunner().invoke(app, ["tables", str(recorded_runs / "qwen"), "-o", str(root / "out")])
    assert result.exit_code == 0, result.output
    assert "GRPO + SIS (K=10): 45.00 ± 1.53 (n = 3)" in result.output
    return root / "out"


def test_golden_output(out):
    """After a change that is meant, put the new files there: the output for the runs of ``recorded.write_all``."""
    texts = {file.relative_to(out).as_posix(): file.read_text() for file in out.rglob("*") if file.suffix in TEXTS}
    golden = {
        file.relative_to(GOLDEN).as_posix(): file.read_text() for file in GOLDEN.rglob("*") if file.suffix in TEXTS
    }
    assert sorted(texts) == sorted(golden)
    for name, text in golden.items():
        assert texts[name] == text, name


def test_nothing_else_is_left(out):
    others = sorted(file.relative_to(out).as_posix() for file in out.rglob("*") if file.suffix not in (*TEXTS, ""))
    assert others == ["figures/figure2.png", "figures/figure3.png", "figures/figure4.png", "tables.json"]
    assert sorted(file.name for file in out.iterdir() if file.is_dir()) == ["data", "figures"]


def test_every_caption_states_the_protocol(out):
    tables = json.loads((out / "tables.json").read_text())["tables"]
    assert len(tables) == 8
    for table in tables:
        caption = " ".join(table["caption"])
        assert "Protocol of Qwen3-8B-Base, math: reward: pkg://verl_sis.rewards.math:math_verify; " in caption
        assert "validation sampling: do_sample True, temperature 1, top_p 0.95, top_k -1, n 1" in caption
        assert "Reported: the last validation" in caption
        assert "1 of actor/grad_norm in qwen/a3" in caption
        assert "Versions: verl 0.9.1; 15 of 16 runs did not record them." in caption


def test_latex_is_well_formed(out):
    """No engine is at hand: braces balance, nothing special is bare, rows have as many cells as the table columns."""
    files = sorted(out.glob("*.tex"))
    assert len(files) == 8
    for file in files:
        text = file.read_text()
        assert text.isascii()
        body = "".join(line for line in text.splitlines(keepends=True) if not line.startswith("%"))
        bare = re.sub(r"\\[&%$#_{}\\]|\$(\\pm|<|>|\|)\$", "", body)
        assert not re.search(r"[%$#~^<>|]", bare), file.name
        assert not re.search(r"_", bare), file.name
        depth = 0
        for sign in bare:
            depth += (sign == "{") - (sign == "}")
            assert depth >= 0
        assert depth == 0
        (columns,) = re.findall(r"\\begin\{tabular\}\{([lr]+)\}", body)
        rows = [line for line in re.sub(r"\\&", "", body).splitlines() if line.endswith(r"\\")]
        assert rows
        assert {line.count("&") + 1 for line in rows} == {len(columns)}
        assert [body.count(rf"\{rule}rule") for rule in ("top", "mid", "bottom")] == [1, 1, 1]


def test_markdown_tables_are_rectangular(out):
    blocks = re.findall(r"(?:^\|.*\n)+", (out / "tables.md").read_text(), re.M)
    assert len(blocks) == 9
    for block in blocks:
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1


def test_csv_holds_what_json_holds(out):
    for table in json.loads((out / "tables.json").read_text())["tables"]:
        with (out / f"{table['name']}.csv").open() as stream:
            rows = list(csv.DictReader(stream))
        assert rows == [{k: "" if v is None else str(v) for k, v in row.items()} for row in table["rows"]]


def test_escapes():
    assert tex("a_b & 5% ± {x} \\ ~^ <|> é") == (
        r"a\_b \& 5\% $\pm$ \{x\} \textbackslash{} \textasciitilde{}\textasciicircum{} $<$$|$$>$ ?"
    )
    assert markdown("a|b *c* <d> \\ `e` f_g") == r"a\|b \*c\* \<d\> \\ \`e\` f_g"


def test_values_for_people_and_programs():
    column = Column("x", "x", "measured")
    assert column.text(Measured(1.005, 0.25, 3)) == "1.00 ± 0.25"
    assert column.text(Measured(1.0, None, 1)) == "1.00"
    assert column.plain(Measured(1 / 3, 0.25, 3)) == [0.333333, 0.25, 3]
    assert column.plain(None) == [None, None, None]
    assert Column("y", "y", "interval", 1).text((-1.0, 2.04)) == "-1.0 to 2.0"
    assert Column("z", "z").text(None) == "-"


def test_refusals_are_one_message(tmp_path):
    result = CliRunner().invoke(app, ["tables", str(tmp_path), "-o", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "Error: " in result.output
    assert "expected a run" in result.output
    assert not (tmp_path / "out").exists()
    write_run(tmp_path / "a", **{"data.train_batch_size": 10})
    result = CliRunner().invoke(app, ["tables", str(tmp_path), "-o", str(tmp_path / "out")])
    assert "N is an integer, found 10 and 4" in result.output
