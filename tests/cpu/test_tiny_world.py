"""The tiny world: disjoint data in verl's format, a tokenizer that keeps every character, a build to be trusted."""

import dataclasses
import json

import pandas
import pytest
import torch

from verl_sis.cpu import tiny_world
from verl_sis.cpu.tiny_model import ModelShape, build_tokenizer
from verl_sis.cpu.tiny_world import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, TinyWorld, split_problems
from verl_sis.cpu.warm_start import WarmStart, encode
from verl_sis.errors import SisConfigError

SMALL = TinyWorld(
    shape=ModelShape(hidden_size=32, layers=1, heads=2, experts=4, expert_size=32),
    warm_start=WarmStart(steps=3, batch_size=4),
    train_problems=(8, 8, 8, 8),
    validation_problems=(2, 2, 2, 2),
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return tiny_world.build(tmp_path_factory.mktemp("worlds"), SMALL, quiet=True)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model" / "model.safetensors")


def test_training_and_held_out_problems_are_disjoint():
    training, held_out = split_problems(TinyWorld())
    assert not set(training) & set(held_out)
    assert len(set(training)) == len(training) == sum(TinyWorld().train_problems)
    assert [sum(p.level == level for p in held_out) for level in (1, 2, 3, 4)] == [48, 48, 48, 48]


def test_too_many_problems_are_refused():
    with pytest.raises(SisConfigError, match="level 1"):
        split_problems(dataclasses.replace(SMALL, train_problems=(1000, 8, 8, 8)))


def test_data_is_in_verls_format(built):
    train = pandas.read_parquet(built / "train.parquet")
    assert len(train) == 32
    row = train.iloc[0]
    (message,) = row["prompt"]
    assert message["role"] == "user" and message["content"].endswith("=?")
    assert row["reward_model"]["ground_truth"] == str(eval(message["content"].rstrip("=?")))
    assert row["data_source"] == f"tiny_arithmetic_level{row['extra_info']['level']}"


def test_same_settings_same_weights(built, tmp_path):
    again = weights(tiny_world.build(tmp_path, SMALL, quiet=True))
    assert all(torch.equal(tensor, again[name]) for name, tensor in weights(built).items())


def test_other_settings_other_key():
    keys = {world.key for world in (SMALL, dataclasses.replace(SMALL, seed=1), TinyWorld())}
    assert len(keys) == 3


def test_a_finished_world_is_found_and_a_failed_build_leaves_nothing(built, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("disk full")

    monkeypatch.setattr(tiny_world, "_write", fail)
    assert tiny_world.build(built.parent, SMALL) == built
    with pytest.raises(RuntimeError, match="disk full"):
        tiny_world.build(tmp_path, SMALL)
    assert list(tmp_path.iterdir()) == []


def test_the_slower_of_two_builders_takes_the_others_world(built, tmp_path, monkeypatch):
    def write(directory, world, quiet):
        (tmp_path / SMALL.key).mkdir()
        (tmp_path / SMALL.key / "theirs").touch()
        (directory / "ours").touch()

    monkeypatch.setattr(tiny_world, "_write", write)
    target = tiny_world.build(tmp_path, SMALL)
    assert [path.name for path in target.iterdir()] == ["theirs"]
    assert list(tmp_path.iterdir()) == [target]


def test_settings_are_written_beside_the_files(built):
    assert json.loads((built / "settings.json").read_text())["warm_start"]["steps"] == 3


def test_tokenizer_keeps_every_character():
    tokenizer = build_tokenizer()
    text = "27+10=37+8=45 Ab\n~"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2=?"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "1", "+", "2", "=", "?", "<|assistant|>"]


def test_lengths_fit_the_preset():
    from verl_sis.register import presets

    (config,) = (node for name, node in presets("cpu") if name == "tiny")
    assert config.data.max_prompt_length >= MAX_PROMPT_TOKENS
    assert config.data.max_response_length >= MAX_RESPONSE_TOKENS
    tokenizer = build_tokenizer()
    problem = split_problems(SMALL)[0][0]
    prompt, response = encode(tokenizer, problem, "1+1=2")
    assert len(prompt) <= MAX_PROMPT_TOKENS and response[-1] == tokenizer.eos_token_id
