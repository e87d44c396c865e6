"""The table in docs/study.md is the schema, column by column."""

from pathlib import Path

from verl_sis.records.schema import COLUMNS, VERSION

DOCUMENT = Path(__file__).parents[2] / "docs" / "study.md"

VALUES = {"token": "1", "by_k": "one per K", "by_layer": "one per layer", "moments": "3"}


def schema_table():
    """The schema as it stands in the document."""
    lines = ["| column | type | values per row | since | meaning |", "|---|---|---|---|---|"]
    lines += [
        f"| `{column.name}` | {column.type} | {VALUES[column.shape]} | {column.since} | {column.meaning} |"
        for column in COLUMNS
    ]
    return "\n".join(lines)


def test_the_document_carries_the_schema():
    text = DOCUMENT.read_text()
    assert schema_table() in text, f"put this into {DOCUMENT}:\n{schema_table()}"
    assert f"version {VERSION}" in text
