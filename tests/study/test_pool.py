"""Pooled sums: by hand, against a slow float64 loop, and the same for any cut of the files."""

import math

import numpy as np
import pytest

from tests.records.test_token_tables import made_up_columns
from tests.study import tables
from verl_sis.records.read import open_study
from verl_sis.records.schema import LOG_PROBS, Header
from verl_sis.records.write import write_tokens
from verl_sis.study import measures, pool, summary
from verl_sis.study.pool import pool_study

HAND = {
    # Two responses, of three tokens and of one; K of 1 and 2.
    "sequence": np.array([0, 0, 0, 1]),
    "position": np.array([0, 1, 2, 0]),
    "turn": np.zeros(4),
    "token": np.array([7, 8, 9, 7]),
    "rollout_log_prob": np.log(np.array([0.5, 0.25, 0.1, 0.8])),
    "native_log_prob": np.log(np.array([0.5, 0.5, 0.05, 0.4])),
    "rollout_rank": np.array([0, 1, -1, 0]),
    # M^ = 1 and 2 ... ; a = w / M^ where the token is among the first K.
    "engine_log_envelope": np.log(np.array([[1.0, 2.0], [1.0, 2.0], [1.0, 1.0], [0.5, 1.0]])),
    "engine_residual_mass": np.array([[0.5, 0.2], [0.5, 0.2], [0.3, 0.2], [0.6, 0.05]]),
    "engine_acceptance": np.array([[1.0, 0.5], [0.0, 1.0], [0.0, 0.0], [1.0, 0.5]]),
}


def test_by_hand(tmp_path):
    header = Header(kind="collect", ks=(1, 2))
    tables.write_study(tmp_path, HAND, header)
    found = tables.summary_of(tmp_path)
    d = [0.0, math.log(2), -math.log(2), -math.log(2)]
    assert found.pool.rows == 4
    assert found.pool.responses == 2
    assert found.comparison("engine", "k1").value == pytest.approx(-sum(d) / 4, abs=1e-7)
    assert found.comparison("engine", "k3").value == pytest.approx(
        ((2 - 1 - d[1]) + 2 * (0.5 - 1 + d[1])) / 4, rel=1e-6
    )
    assert found.comparison("engine", "abs").value == pytest.approx(3 * math.log(2) / 4)
    assert found.headline_k == 2
    assert found.pair("engine", "accepted", 1).value == pytest.approx(2 / 4)
    assert found.pair("engine", "accepted", 2).value == pytest.approx(2 / 4)
    # (1 - xi) / M^ at K = 2: 0.4, 0.4, 0.8, 0.95.
    assert found.pair("engine", "expected", 2).value == pytest.approx(2.55 / 4)
    assert found.kappa("engine", 2).value == pytest.approx(2.0 / 2.55)
    assert found.pair("engine", "inside", 1).value == pytest.approx(2 / 4)
    assert found.pair("engine", "residual", 2).value == pytest.approx(0.65 / 4)
    assert found.pair("engine", "certain", 2).value == pytest.approx(1 / 4)
    # D: log 2 + log 2 of the first response, log 2 of the second; a is 0.5, 1, 0, 0.5.
    assert found.divergence("engine", under_sis=False).value == pytest.approx(3 * math.log(2) / 2)
    assert found.divergence("engine", under_sis=True).value == pytest.approx(1.5 * math.log(2) / 2)
    assert found.pool.by_token[7].tolist() == pytest.approx([2, 1.0, math.log(2)])
    assert not found.certified("engine", 2)


def damaged(columns):
    """Some log-probs that are none, and an envelope without a usable entry."""
    columns = {name: np.array(values) for name, values in columns.items()}
    columns["native_log_prob"][3] = np.nan
    columns["rollout_log_prob"][5] = -np.inf
    columns["replay_log_prob"][6] = -3.4e38
    columns["floor_log_envelope"][7] = -np.inf
    return columns


@pytest.fixture
def study(tmp_path):
    """A study of three files in which every column is there, ages and routes too."""
    rng = np.random.default_rng(1)
    header = Header(kind="dump", ks=(1, 5), layers=(0, 2, 3), experts_per_token=2)
    for part in range(3):
        lengths = tuple(rng.integers(1, 9, 12).tolist())
        columns = damaged(made_up_columns(header, lengths, seed=part))
        columns["age"] = np.repeat(rng.integers(0, 3, len(lengths)), lengths)
        write_tokens(tmp_path / "tokens" / f"{part}.parquet", columns, header)
    return tmp_path


def rows_of(study):
    for file in open_study(study):
        for batch in file.batches(file.columns):
            for row in range(len(batch["token"])):
                yield {name: values[row] for name, values in batch.items()}


def is_number(value):
    return math.isfinite(value) and value > measures.FILTERED_LOG_PROB


def looped(study):
    """Every term again, token by token, from the definitions, summed exactly."""
    terms = {}

    def add(name, value):
        terms.setdefault(name, []).append(float(value))

    for row in rows_of(study):
        add("tokens", 1)
        for c in measures.COMPARISONS:
            reference, other = float(row[c.reference]), float(row[c.other])
            finite = is_number(reference) and is_number(other)
            add(f"{c.name}.tokens", finite)
            add(f"{c.name}.non_finite", not finite)
            d = other - reference if finite else 0.0
            add(f"{c.name}.k1", -d)
            add(f"{c.name}.k3", math.expm1(d) - d)
            add(f"{c.name}.abs", abs(d))
            add(f"{c.name}.outside_2", abs(d) > math.log(2))
        for pair, (old, current) in LOG_PROBS.items():
            envelope, xi, a = (row[f"{pair}_{what}"] for what in ("log_envelope", "residual_mass", "acceptance"))
            finite = is_number(row[old]) and is_number(row[current]) and np.isfinite(envelope).all()
            size = abs(float(row[current]) - float(row[old])) if finite else 0.0
            add(f"{pair}.tested", finite)
            add(f"{pair}.divergence", size)
            for column, k in enumerate((1, 5)):
                add(f"{pair}.accepted@{k}", float(a[column]) * finite)
                expected = (1 - float(xi[column])) / math.exp(float(envelope[column])) if finite else 0.0
                add(f"{pair}.expected@{k}", expected)
                add(f"{pair}.residual@{k}", float(xi[column]) * finite)
                add(f"{pair}.divergence_sis@{k}", (1 - float(a[column])) * size)
                add(f"{pair}.certain@{k}", finite and float(xi[column]) <= 0.10)
                rank = row[measures.rank_of(pair)]
                add(f"{pair}.inside@{k}", finite and 0 <= rank < k)
        differs = [overlap < 2 for overlap in row["layer_overlap"]]
        add("routes.any", any(differs))
        for layer, value in zip((0, 2, 3), differs, strict=True):
            add(f"routes.differs@{layer}", value)
    return {name: math.fsum(values) for name, values in terms.items()}


def test_every_sum_is_that_of_a_slow_loop(study):
    found = pool_study(open_study(study))
    expected = looped(study)
    assert len(set(found.names)) == len(found.names)
    for name, value in expected.items():
        assert found.total(name) == pytest.approx(value, rel=1e-12, abs=1e-12), name
    unchecked = {name for name in found.names if name not in expected}
    # These are sums of columns as they stand; test_causes judges them.
    assert {name.partition(".")[0] for name in unchecked} == {
        "responses",
        "entropy",
        "routes",
        "moments",
        "filtered",
        "calibration",
    }
    assert found.total("engine.non_finite") == 6
    assert found.responses == 36


@pytest.mark.parametrize("rows", [1, 7])
def test_slices_change_nothing(study, monkeypatch, rows):
    whole = pool_study(open_study(study))
    monkeypatch.setattr(pool, "SLICE_ROWS", rows)
    cut = pool_study(open_study(study))
    assert cut.names == whole.names
    np.testing.assert_allclose(cut.sums, whole.sums, rtol=1e-12, atol=1e-12)
    for name in whole.cuts:
        np.testing.assert_allclose(cut.cuts[name], whole.cuts[name], rtol=1e-12, atol=1e-12)
    for name in whole.histograms:
        np.testing.assert_array_equal(cut.histograms[name], whole.histograms[name])
    for age in whole.by_age:
        np.testing.assert_allclose(cut.by_age[age], whole.by_age[age], rtol=1e-12, atol=1e-12)
    assert (cut.largest, cut.smallest, cut.responses) == (whole.largest, whole.smallest, whole.responses)


def test_parts_merge_to_the_whole(study):
    files = open_study(study)
    whole, merged = pool_study(files), pool_study(files[:1])
    merged.merge(pool_study(files[1:]))
    np.testing.assert_allclose(merged.sums.sum(axis=0), whole.sums.sum(axis=0), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(merged.by_token, whole.by_token, rtol=1e-12)
    for name in whole.cuts:
        np.testing.assert_allclose(merged.cuts[name].sum(axis=0), whole.cuts[name].sum(axis=0), rtol=1e-12, atol=1e-12)
    for name in whole.histograms:
        np.testing.assert_array_equal(merged.histograms[name], whole.histograms[name])
    assert sorted(merged.by_age) == sorted(whole.by_age)
    assert (merged.responses, merged.rows, merged.largest) == (whole.responses, whole.rows, whole.largest)


def test_each_response_is_a_group_until_there_are_many(study, monkeypatch):
    few = pool_study(open_study(study))
    lengths = [len(list(g)) for g in _responses(study)]
    np.testing.assert_array_equal(few.sums[:36, few.column("tokens")], lengths)
    assert not few.sums[36:].any()
    monkeypatch.setattr(pool, "GROUPS", 8)
    many = pool_study(open_study(study))
    dealt = [sum(lengths[start::8]) for start in range(8)]
    np.testing.assert_array_equal(many.sums[:, many.column("tokens")], dealt)


def _responses(study):
    current, key = [], None
    for file in open_study(study):
        for batch in file.batches(["sequence"]):
            for sequence in batch["sequence"].tolist():
                if (file.path, sequence) != key:
                    if current:
                        yield current
                    current, key = [], (file.path, sequence)
                current.append(sequence)
    yield current


def test_cuts_add_up_to_the_whole(study):
    found = pool_study(open_study(study))
    for grouping, cut in found.cuts.items():
        for column, name in enumerate(found.cut_names):
            assert cut[:, :, column].sum() == pytest.approx(found.total(name), rel=1e-12, abs=1e-12), (grouping, name)


def test_ages_add_up_to_the_whole(study):
    found = pool_study(open_study(study))
    assert set(found.by_age) <= {0, 1, 2}
    np.testing.assert_allclose(sum(found.by_age.values()), found.sums, rtol=1e-12, atol=1e-12)
    by_age = summary.by_age_table(tables.summary_of(study))
    assert set(by_age["age"]) == set(found.by_age)


def test_quantiles_and_the_certificate_come_from_exact_counts(tmp_path):
    rows = 1000
    columns = tables.study_columns(rows)
    column = tables.KS.index(10)
    columns["engine_residual_mass"][:, column] = np.where(np.arange(rows) < 950, 0.0, 0.3)
    assert tables.summary_of(tables.write_study(tmp_path / "at", columns)).certified("engine", 10)
    columns["engine_residual_mass"][:, column] = np.where(np.arange(rows) < 949, 0.0, 0.3)
    beyond = tables.summary_of(tables.write_study(tmp_path / "beyond", columns))
    assert not beyond.certified("engine", 10)
    columns["engine_residual_mass"][:, column] = 0.0201
    assert not tables.summary_of(tables.write_study(tmp_path / "mean", columns)).certified("engine", 10)


def test_columns_that_one_file_lacks_are_left_out(tmp_path):
    columns = tables.study_columns(100)
    write_tokens(tmp_path / "tokens" / "a.parquet", columns, tables.HEADER)
    fewer = {name: values for name, values in columns.items() if name != "precise_log_prob"}
    write_tokens(tmp_path / "tokens" / "b.parquet", fewer, tables.HEADER)
    names = {c.name for c in pool_study(open_study(tmp_path)).layout.comparisons}
    assert names == {"engine", "floor", "verl", "arithmetic"}
