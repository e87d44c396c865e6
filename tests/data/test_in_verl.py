"""What is written goes through verl's own data set, reward loader and reward manager."""

import asyncio

import datasets
import pytest
import torch
from omegaconf import OmegaConf

from tests.data import public_files as public
from verl_sis.cpu.tiny_model import build_tokenizer
from verl_sis.data.math import write_math
from verl_sis.data.search import write_search


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("in_verl")
    write_math(root / "math", source=public.math_files(root / "math_files"), allow_count=True)
    write_search(root / "search", source=public.search_files(root / "search_files"), allow_count=True)
    return root


@pytest.fixture
def open_in_verl(tokenizer, tmp_path, monkeypatch):
    from verl.utils.dataset.rl_dataset import RLHFDataset

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def opened(*files, longest=1024):
        settings = {"cache_dir": str(tmp_path), "max_prompt_length": longest, "filter_overlong_prompts_workers": None}
        return RLHFDataset([str(file) for file in files], tokenizer, OmegaConf.create(settings))

    return opened


def test_mathematics(data, tokenizer, open_in_verl):
    dataset = open_in_verl(*(data / "math" / f"{name}.parquet" for name in ("math500", "amc23", "aime24", "aime25")))
    assert len(dataset) == 2 + 64 + 32 + 32
    row = dataset[2 + 33]
    assert row["data_source"] == "amc23"
    assert (row["index"], row["extra_info"]["sample"], row["reward_model"]["ground_truth"]) == (33, 1, "-1")
    ids = tokenizer.apply_chat_template(row["raw_prompt"], add_generation_prompt=True, tokenize=True)["input_ids"]
    assert tokenizer.decode(ids) == (
        "<|system|>Please reason step by step, and put your final answer within \\boxed{}."
        "<|user|>Second of AMC?<|assistant|>"
    )


def test_prompts_are_measured_in_tokens(data, open_in_verl):
    """One token per character here: 72 of the system message, 3 of the roles, and the problem."""
    problems = [problem for _, problem, _ in public.BLOCK]
    longest = 72 + 3 + 24
    assert (
        len(open_in_verl(data / "math" / "train.parquet", longest=longest)) == sum(len(p) <= 24 for p in problems) > 0
    )


def test_search(data, open_in_verl):
    row = open_in_verl(data / "search" / "train.parquet", longest=4096)[0]
    assert row["agent_name"] == "tool_agent"
    assert row["reward_model"]["ground_truth"] == {"target": ["The Beatles", "Beatles"]}
    assert row["tools_kwargs"] == {}


def rewarded(tokenizer, row, module, name, response):
    """Through verl's loader and manager, which calls the function in a thread."""
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
    from verl.trainer.ppo.reward import get_custom_reward_fn

    function = {"path": f"pkg://{module}", "name": name}
    config = OmegaConf.create({"reward": {"custom_reward_function": function}})
    ids = torch.tensor([tokenizer(response)["input_ids"]])
    batch = DataProto.from_dict(
        tensors={"responses": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={key: [row[key]] for key in ("data_source", "reward_model", "extra_info")},
    )

    async def run():
        return await NaiveRewardManager(config, tokenizer, get_custom_reward_fn(config)).run_single(batch)

    return asyncio.run(run())


@pytest.mark.parametrize("name", ["math_verify", "hendrycks", "exact"])
def test_rewards_of_mathematics(data, tokenizer, open_in_verl, name):
    row = open_in_verl(data / "math" / "math500.parquet")[0]
    result = rewarded(tokenizer, row, "verl_sis.rewards.math", name, "So \\boxed{0.5}.")
    right = float(name != "exact")
    assert result["reward_score"] == right
    assert result["reward_extra_info"] == {
        "score": right,
        "acc": right,
        "answer_missing": 0.0,
        "answer_too_long": 0.0,
        "timed_out": 0.0,
        "check_failed": 0.0,
        "ground_truth_unparsed": 0.0,
    }


def test_reward_of_search(data, tokenizer, open_in_verl):
    row = open_in_verl(data / "search" / "train.parquet", longest=4096)[0]
    response = "user\n<tool_response>\nretrieval failed: x\n</tool_response>\nassistant\n<answer>the Beatles</answer>"
    result = rewarded(tokenizer, row, "verl_sis.rewards.search", "exact_match", response)
    assert result["reward_score"] == 1.0
    assert result["reward_extra_info"]["retrieval_failures"] == 1.0
