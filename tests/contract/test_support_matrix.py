"""docs/support.md: each named test exists, each refusal names a setting that an error of ours names too."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "support.md").read_text()
TABLES = re.split(r"\n## ", TEXT)[1:3]


def test_each_named_file_exists():
    names = set(re.findall(r"`((?:tests|scripts)/[\w/.]+)`", TEXT))
    assert len(names) > 10
    assert [name for name in sorted(names) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("table", TABLES, ids=["sis", "replay"])
def test_each_cell_says_what_is_so(table):
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    header, _, *cells = rows
    assert len(cells) >= 8
    for layout, *columns in cells:
        assert len(columns) <= len(header) - 1, layout
        for cell in columns:
            known = ("refused", "not run", "no such", "`tests/", "verl gathers")
            assert not cell or any(word in cell for word in known), (layout, cell)
            assert not cell.startswith("yes") or "`tests/" in cell, (layout, cell)


def test_what_a_refusal_tells_to_type_stands_in_an_error():
    sources = "\n".join(
        (ROOT / "verl_sis" / name).read_text()
        for name in ("config.py", "run_facts.py", "verl_compat/megatron.py", "verl_compat/veomni.py")
    ).replace("{prefix}", "actor.megatron")
    typed = set(re.findall(r"refused(?: with SIS)?: `([\w.]+)=", TEXT))
    assert len(typed) >= 7
    for setting in typed:
        assert setting.rpartition(".")[2] in sources, setting
