"""``sis.dump`` in a real worker: its rows are the worker's own numbers, and training does not notice it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.worker import harness, recorder
from tests.worker.dumps import KINDS, K, columns_of, names, responses_in, table, two_turn_rollout
from verl_sis.records.schema import FOOTER_KEY

KS = (1, 2, 5, 10, 20)


def weights(worker) -> list[torch.Tensor]:
    return [parameter.full_tensor().detach().clone() for parameter in worker.engine.module.parameters()]


def counted(engine) -> list[dict]:
    """Calls that move weights and optimizer between host and device, from now on."""
    calls, move = [], engine.to

    def to(**where):
        calls.append(where)
        move(**where)

    engine.to = to
    return calls


class Pair:
    """The same run with a dump of every second rollout and without one."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder = folder
        self.rollout = two_turn_rollout()
        settings = {"every": 2, "directory": str(folder), "max_contexts": 30}
        self.dumping = harness.build_worker(harness.Settings(model=model, sis={"top_k": K, "dump": settings}))
        self.silent = harness.build_worker(harness.Settings(model=model, sis={"top_k": K}))
        self.decisions = recorder.record(self.dumping)
        self.moves = [counted(worker.engine) for worker in (self.dumping, self.silent)]
        self.metrics, self.entropies = [], []
        for _ in range(3):
            self.step()

    def step(self) -> None:
        """One rollout of two epochs of two mini-batches, in both runs, from equal random states."""
        found = []
        for worker in (self.dumping, self.silent):
            torch.manual_seed(7)
            output = harness.old_pass(worker, self.rollout)
            old = harness.response_log_probs(output, self.rollout)
            columns = {"rollout_log_probs": harness.nested([row - 0.25 for row in old.unbind()])}
            found.append(harness.update(worker, self.rollout, old, mini_batch_size=4, epochs=2, columns=columns))
            entropies = harness.response_log_probs({"log_probs": output["entropy"]}, self.rollout)
            found[-1]["drawn after"] = torch.rand(3).tolist()
        self.metrics.append(found)
        self.entropies.append([row.numpy() for row in entropies.unbind()])

    def row_of(self, response: dict[str, np.ndarray]) -> int:
        """Row of the rollout that a dumped response is."""
        tokens = [
            row[mask.bool()].tolist() for row, mask in zip(self.rollout.responses, self.rollout.masks, strict=True)
        ]
        return tokens.index(response["token"].tolist())


@pytest.fixture(scope="module")
def pair(model_folder, tmp_path_factory):
    torch.set_num_threads(1)
    return Pair(model_folder, tmp_path_factory.mktemp("dump"))


def test_training_is_bit_for_bit_that_of_a_run_without_dump(pair):
    assert pair.silent._dump is None and pair.silent._update_pass.rows is None
    assert pair.dumping._update_pass.rows is None, "freed"
    assert pair.moves[0] == pair.moves[1] != [], "offloaded weights make no extra way"
    for _ in range(2):
        for dumping, silent in pair.metrics:
            ours = [name for name in silent if not name.startswith(("perf/", "mfu"))]
            assert json.dumps({name: dumping[name] for name in ours}) == json.dumps({n: silent[n] for n in ours})
        for first, second in zip(weights(pair.dumping), weights(pair.silent), strict=True):
            assert torch.equal(first, second)
        if len(pair.metrics) == 5:
            break
        # Again with dropout, which draws random numbers in the pass that only one of the two runs makes.
        for worker in (pair.dumping, pair.silent):
            for module in worker.engine.module.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.3
        pair.step()
        pair.step()
    # The anchor is taken in train mode: dropout sets it apart from the old pass, in the fifth rollout only.
    gaps = {update: anchor_gap(pair.folder, update) for update in (0, 8, 16)}
    assert max(gaps[0], gaps[8]) < 1e-5 < 1e-2 < gaps[16]


def anchor_gap(folder: Path, update: int) -> float:
    rows = columns_of(table(folder, "tokens", update))
    return float(np.abs(rows["anchor_log_prob"] - rows["old_log_prob"]).mean())


def test_every_second_rollout_is_written_by_its_update_counter(pair):
    of_three = [f"{kind}/update-{update:08d}-rank-00000.parquet" for kind in KINDS for update in (0, 8)]
    assert set(of_three) <= set(names(pair.folder))
    assert not any("00000004" in name or "00000012" in name for name in names(pair.folder))


def test_the_header_says_what_ran(pair):
    header = json.loads(table(pair.folder, "tokens", 8).schema.metadata[FOOTER_KEY])
    assert (header["kind"], tuple(header["ks"])) == ("dump", KS)
    source = header["source"]
    assert source["versions"].keys() == {"verl", "verl-sis"}
    expected = {"strategy": "fsdp2", "dtype": "float32", "base_loss": "vanilla", "top_k": K, "world_size": 1}
    assert expected.items() <= source.items()


def test_rows_are_the_tokens_that_bear_loss(pair):
    rows = columns_of(table(pair.folder, "tokens", 8))
    masks = [mask.bool() for mask in pair.rollout.masks]
    assert len(rows["token"]) == 2 * sum(int(mask.sum()) for mask in masks)
    assert set(rows["step"]) == {8}
    # Two epochs of two mini-batches of four responses each.
    assert sorted(set(rows["age"])) == [0, 1, 2, 3]
    seen = []
    for of_one in responses_in(rows):
        assert len(set(of_one["age"])) == len(set(of_one["sample_key"])) == 1
        row = pair.row_of(of_one)
        assert of_one["position"].tolist() == masks[row].nonzero().squeeze(1).tolist()
        assert of_one["turn"].tolist() == {3: [0, 0, 1, 1], 5: [0, 0, 1, 1]}.get(row, [0] * len(of_one["turn"]))
        assert set(of_one["advantage"]) == {pair.rollout.advantages[row]}
        seen.append((int(of_one["age"][0]) % 2, row))
    assert sorted(seen) == sorted([(row // 4, row) for row in range(7)] * 2)
    order = list(zip(rows["age"].tolist(), rows["sample_key"].tolist(), rows["position"].tolist(), strict=True))
    assert order == sorted(order)


def test_rows_are_the_workers_own_numbers(pair):
    for update, (metrics, _) in ((0, pair.metrics[0]), (8, pair.metrics[2])):
        rows = columns_of(table(pair.folder, "tokens", update))
        assert metrics["sis/tokens"] == [len(rows["token"])]
        assert metrics["sis/accept_rate"][0] == pytest.approx(rows["accepted"].mean())
        assert metrics["sis/in_topk_rate"][0] == pytest.approx((rows["old_rank"] >= 0).mean())
        log_envelope, mass = rows["update_log_envelope"][:, -1], rows["update_residual_mass"][:, -1]
        expected = np.exp(np.log1p(-mass) - log_envelope).mean()
        assert metrics["sis/accept_rate_expected"][0] == pytest.approx(expected, rel=1e-5)
        assert metrics["sis/residual_mass/mean"][0] == pytest.approx(mass.mean(), abs=1e-6)
        log_ratio = rows["old_log_prob"] - rows["rollout_log_prob"]
        assert metrics["mismatch/k3"][0] == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).mean(), rel=1e-5)
        for age in range(4):
            of_age = rows["accepted"][rows["age"] == age]
            assert metrics[f"sis/accept_rate_by_age/{age}"][0] == pytest.approx(of_age.mean())
        # At the K of the run, the probability is the one that training tested with.
        for of_one in responses_in(rows):
            at = (update + int(of_one["age"][0]), int(of_one["sample_key"][0]))
            tested = pair.decisions.acceptance[at][of_one["position"]]
            np.testing.assert_allclose(of_one["update_acceptance"][:, -1], tested, rtol=0, atol=2e-5)
            drawn = pair.decisions.uniforms[at][of_one["position"]] < tested
            assert of_one["accepted"].tolist() == drawn.tolist()


def test_before_the_first_update_all_policies_are_one(pair):
    for update in (0, 8):
        rows = columns_of(table(pair.folder, "tokens", update))
        fresh = {name: values[rows["age"] == 0] for name, values in rows.items()}
        for name in ("anchor_log_prob", "log_prob"):
            np.testing.assert_allclose(fresh[name], fresh["old_log_prob"], rtol=0, atol=1e-5)
        np.testing.assert_allclose(fresh["rollout_log_prob"], fresh["old_log_prob"] - 0.25, rtol=0, atol=1e-6)
        inside = (fresh["old_rank"][:, None] >= 0) & (fresh["old_rank"][:, None] < np.array(KS))
        np.testing.assert_allclose(fresh["update_acceptance"], inside, rtol=0, atol=2e-5)
        later = {name: values[rows["age"] > 0] for name, values in rows.items()}
        np.testing.assert_allclose(later["anchor_log_prob"], later["old_log_prob"], rtol=0, atol=1e-5)
        assert np.abs(later["log_prob"] - later["anchor_log_prob"]).mean() > 1e-3, "staleness"


def test_entropy_is_that_of_the_policy(pair):
    for of_one in responses_in(columns_of(table(pair.folder, "tokens", 8))):
        if of_one["age"][0] == 0:
            expected = pair.entropies[2][pair.row_of(of_one)][of_one["position"]]
            np.testing.assert_allclose(of_one["entropy"], expected, rtol=0, atol=2e-5)


def test_contexts_are_tokens_of_the_table_with_their_whole_top_k(pair):
    rows = columns_of(table(pair.folder, "tokens", 8))
    contexts = columns_of(table(pair.folder, "contexts", 8))
    assert 20 <= len(contexts["token"]) <= 30
    assert contexts["ids"].shape == contexts["old_log_prob"].shape == contexts["current_log_prob"].shape
    at = {
        key: index for index, key in enumerate(zip(rows["sequence"].tolist(), rows["position"].tolist(), strict=True))
    }
    for index in range(len(contexts["token"])):
        row = at[contexts["sequence"][index], contexts["position"][index]]
        assert (contexts["token"][index], contexts["age"][index]) == (rows["token"][row], rows["age"][row])
        old, current = contexts["old_log_prob"][index], contexts["current_log_prob"][index]
        assert (np.diff(old) <= 0).all()
        envelope = [(current - old)[:k].max() for k in KS]
        np.testing.assert_allclose(envelope, rows["update_log_envelope"][row], rtol=0, atol=1e-5)
        (entry,) = np.nonzero(contexts["ids"][index] == contexts["token"][index])
        assert entry.tolist() == [rank for rank in [rows["old_rank"][row]] if rank >= 0]
        np.testing.assert_allclose(current[entry], rows["log_prob"][row], rtol=0, atol=1e-6)


def test_counts_are_of_all_tokens_by_id(pair):
    counts, rows = (columns_of(table(pair.folder, kind, 0)) for kind in ("counts", "tokens"))
    assert table(pair.folder, "counts", 0).schema.types == ["int32", "int64", "int64"]
    ids = np.unique(rows["token"])
    assert counts["token"].tolist() == ids.tolist()
    for accepted, name in ((True, "accepted"), (False, "rejected")):
        expected = [int(((rows["token"] == token) & (rows["accepted"] == accepted)).sum()) for token in ids]
        assert counts[name].tolist() == expected
