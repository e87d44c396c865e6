"""The report: one file that needs nothing else, figures with their numbers beside, nothing written on bad input."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas
import pytest
from typer.testing import CliRunner

from tests.study import tables
from verl_sis.__main__ import app
from verl_sis.errors import StudyFileError
from verl_sis.records.counts import write_counts
from verl_sis.records.schema import Header
from verl_sis.study import summary as sums
from verl_sis.study.report.log_section import log_findings, without_duplicates
from verl_sis.study.report.write import read_inputs, write_report
from verl_sis.study.run_logs import RunLog, find_run_logs


class Page(HTMLParser):
    """Collects what a page refers to, and its tags in order."""

    def __init__(self, text):
        super().__init__()
        self.references, self.images, self.findings, self.open = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.references += [values[name] for name in ("src", "href") if name in values]
        if tag == "img":
            self.images.append(values)
        if "data-finding" in values:
            self.findings.append(values["data-finding"])
        if tag not in ("img", "meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Two studies, one with another temperature, and a report on both."""
    folder = tmp_path_factory.mktemp("studies")
    routed = tables.with_routes(tables.study_columns(1000))
    tables.write_study(folder / "sound", routed, tables.ROUTED)
    tables.write_study(folder / "hot", tables.study_columns(1000, temperature=1.05))
    write_report([folder / "sound", folder / "hot"], folder / "report")
    return folder


def test_the_page_is_whole_and_needs_no_network(studies):
    text = (studies / "report" / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.references
    assert all(reference.startswith(("data:", "#")) for reference in page.references)
    assert not re.search(r"https?://|@import|<script", text)
    assert "temperature" in page.findings
    # The verdict of each study stands before its first figure.
    assert text.index('data-finding="temperature"') < text.index("hot-comparisons")


def test_every_figure_has_its_png_and_its_numbers(studies):
    page = Page((studies / "report" / "report.html").read_text())
    names = {image["id"] for image in page.images}
    assert {"sound-layers", "sound-acceptance_by_k-1", "sound-acceptance_by_k-2", "hot-residual_mass"} <= names
    for image in page.images:
        embedded = base64.b64decode(image["src"].partition(",")[2])
        assert embedded == (studies / "report" / "figures" / f"{image['id']}.png").read_bytes()
        assert embedded.startswith(b"\x89PNG")
        table = re.sub(r"-\d$", "", image["id"])
        assert len(pandas.read_csv(studies / "report" / "data" / f"{table}.csv")) > 0
    assert any(name.startswith("Side-by-side-side_by_side") for name in names)


def test_the_numbers_beside_a_figure_are_those_of_the_study(studies):
    found = tables.summary_of(studies / "sound")
    table = pandas.read_csv(studies / "report" / "data" / "sound-acceptance_by_k.csv").set_index(["pair", "k"])
    estimate = found.pair("engine", "accepted", 10)
    row = table.loc[("engine", 10)]
    assert (row["acceptance"], row["acceptance_low"], row["acceptance_high"]) == pytest.approx(
        (estimate.value, estimate.low, estimate.high), rel=1e-12
    )
    side = pandas.read_csv(studies / "report" / "data" / "Side-by-side-side_by_side.csv")
    assert set(side["study"]) == {"sound", "hot"}


def test_the_verdict_for_machines(studies):
    record = json.loads((studies / "report" / "report.json").read_text())
    by_name = {section["name"]: section for section in record["sections"]}
    assert [f["name"] for f in by_name["hot"]["findings"] if f["level"] == "fault"] == ["temperature"]
    assert [f for f in by_name["sound"]["findings"] if f["level"] == "fault"] == []
    assert by_name["sound"]["tokens"] == 1000
    assert by_name["sound"]["numbers"]["kappa at K = 10"]["value"] == pytest.approx(1.0, abs=0.02)


def test_the_command_prints_the_verdict(studies, tmp_path):
    result = CliRunner().invoke(app, ["report", str(studies / "hot"), "-o", str(tmp_path / "r")])
    assert result.exit_code == 0, result.output
    assert "fault: The rollout engine samples at another temperature" in result.output
    assert (tmp_path / "r" / "report.html").exists()


def test_several_inputs_need_a_directory(studies):
    result = CliRunner().invoke(app, ["report", str(studies / "hot"), str(studies / "sound")])
    assert result.exit_code == 1
    assert "Type -o DIR" in result.output


def test_a_damaged_file_is_named_and_nothing_is_written(studies, tmp_path):
    columns = tables.study_columns(100)
    study = tables.write_study(tmp_path / "study", columns)
    file = study / "tokens" / "part-00000.parquet"
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(StudyFileError, match=r"part-00000\.parquet is truncated"):
        write_report([studies / "sound", study], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_path_without_anything_is_refused(tmp_path):
    with pytest.raises(StudyFileError, match="neither"):
        write_report([tmp_path], tmp_path / "out")


def dumped(folder, seed=0):
    """A dump of training: ages 0 to 2, acceptance falling with age, counts beside it."""
    columns = tables.study_columns(1200, seed=seed)
    rng = np.random.default_rng(seed)
    age = np.repeat(rng.integers(0, 3, 60), 20)
    current = columns["native_log_prob"] + 0.05 * age * rng.standard_normal(1200)
    dump = {name: columns[name] for name in ("sequence", "position", "turn", "token", "entropy", "rollout_log_prob")}
    dump |= {
        "age": age,
        "old_log_prob": columns["old_log_prob"],
        "anchor_log_prob": columns["again_log_prob"],
        "log_prob": current,
        "old_rank": columns["native_rank"],
        "update_log_envelope": columns["floor_log_envelope"] + 0.1 * age[:, None],
        "update_residual_mass": columns["floor_residual_mass"],
        "update_acceptance": columns["floor_acceptance"] * np.exp(-0.1 * age)[:, None],
    }
    header = Header(kind="dump", ks=tables.KS, source={"model": "nowhere", "top_k": 50})
    tables.write_study(folder, dump, header)
    counts = np.zeros((30, 2), dtype=np.int64)
    counts[7], counts[9] = (40, 60), (1, 99)
    write_counts(folder / "counts" / "a.parquet", counts)
    write_counts(folder / "counts" / "b.parquet", counts)
    return folder


def test_a_training_run_with_dump_and_log(tmp_path):
    """Found below the run's directory, beside the log that verl wrote."""
    dumped(tmp_path / "run" / "checkpoints" / "sis_dump")
    lines = [
        {"step": step, "data": {"actor/sis/accept_rate": 0.9, "actor/mismatch/k3": 1e-4 * step, "actor/entropy": 1.0}}
        for step in range(1, 9)
    ]
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    sections = write_report([tmp_path / "run"], tmp_path / "out")
    assert [section.name for section in sections] == ["run", "Training logs"]
    study, logs = sections
    names = {figure.name: figure for figure in study.figures}
    assert {"by_age", "comparisons", "tokens", "divergence_by_position"} <= set(names)
    ages = names["by_age"].table
    by_age = ages[ages["k"] == 10].set_index("age")
    assert by_age["acceptance"].is_monotonic_decreasing
    assert by_age["staleness_k3"].is_monotonic_increasing
    np.testing.assert_allclose(by_age["staleness_k3"][0], 0.0, atol=1e-6)
    # Counted by training, of all tokens: the table of tokens does not matter.
    tokens = names["tokens"].table.set_index("token")
    assert tokens.loc[7, ["accepted", "rejected"]].tolist() == [120, 80]
    assert tokens.loc[7, "text"] == "[7]"
    assert "staleness" in {finding.name for finding in study.findings}
    widened = next(finding for finding in logs.findings if finding.name == "log_mismatch")
    assert widened.level == "fault"
    assert "from 0.00015 (first quarter of steps, median) to 0.00075" in widened.text


def test_a_log_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"critic/rewards/mean": 0.5}}\n')
    (section,) = write_report([tmp_path / "metrics.jsonl"], tmp_path / "out")
    assert [finding.name for finding in section.findings] == ["log_no_mismatch"]
    assert [figure.name for figure in section.figures] == ["log_reward"]


def run_log(**columns):
    index = pandas.Index(range(1, 9), name="step")
    return RunLog("run", None, "jsonl", pandas.DataFrame(columns, index=index), {}, 0)


@pytest.mark.parametrize(
    ("columns", "name", "level"),
    [
        ({"actor/sis/non_finite": [0.0] * 7 + [3.0]}, "log_non_finite", "fault"),
        ({"actor/entropy": [1.0, 1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01]}, "log_collapse", "fault"),
        ({"actor/grad_norm": [1.0] * 6 + [50.0, 80.0]}, "log_collapse", "fault"),
        ({"rollout_corr/k3_kl": [1e-3] * 8}, "log_mismatch", "note"),
        ({"actor/mismatch/k3": [1.0] * 8, "actor/mismatch/native/k3": [2.0] * 8}, "log_replay", "good"),
        ({"actor/mismatch/k3": [2.0] * 8, "actor/mismatch/native/k3": [1.0] * 8}, "log_replay", "note"),
    ],
)
def test_what_a_log_says(columns, name, level):
    assert level in {finding.level for finding in log_findings(run_log(**columns)) if finding.name == name}


def test_a_filtered_copy_of_a_log_is_left_out(tmp_path):
    rows = [{"step": n, "a": float(n), "b": 2.0 * n} for n in range(3)]
    for name, keep in (("all", ("a", "b")), ("some", ("a",)), ("other", ("a",))):
        values = [{"step": row["step"], **{k: row[k] + (name == "other") for k in keep}} for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in values))
    assert [log.name for log in without_duplicates(find_run_logs(tmp_path))] == ["all", "other"]


def test_studies_of_one_name_are_told_apart(tmp_path):
    for parent in ("a", "b"):
        tables.write_study(tmp_path / parent / "study", tables.study_columns(100))
    summaries, _ = read_inputs([tmp_path / "a" / "study", tmp_path / "b" / "study"])
    assert [summary.name for summary in summaries] == ["a/study", "b/study"]


def test_examples_show_every_token(studies):
    from verl_sis.study.report.examples import shown_responses

    found = tables.summary_of(studies / "sound")
    shown = shown_responses(found, None)
    assert len(shown) >= 3
    assert all(len(example.tokens) == 20 for example in shown)
    assert shown[0].tokens[0].text.startswith("[")
    assert "acceptance" in shown[0].tokens[0].note
    first = sums.tokens_table(found)
    assert first["rejected"].is_monotonic_decreasing
