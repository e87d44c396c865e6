"""Routes for a made-up rollout, and what the routers of a worker make of them."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.routing_replay import running
from tests.worker import harness

EXPERTS = 300
LAYERS = 3
SPARSE = (1, 2)


def build_wide_model_folder(folder: Path) -> Path:
    """A Qwen3-MoE whose first layer is dense and whose expert ids need more than a byte."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from verl_sis.cpu.tiny_model import build_tokenizer

    tokenizer = build_tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        mlp_only_layers=[0],
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    tokenizer.save_pretrained(folder)
    # Experts in one tensor, as they are in memory: to join 300 of them takes most of the time of loading.
    Qwen3MoeForCausalLM(config).save_pretrained(folder, save_original_format=False)
    return folder


def distinct_tokens(lengths: list[int]) -> harness.Rollout:
    """Prompts of 3 tokens and responses of the given lengths, no token id twice in the batch."""
    ids = iter(range(6, 102))
    prompts = [torch.tensor([next(ids) for _ in range(3)]) for _ in lengths]
    return harness.Rollout(prompts, [torch.tensor([next(ids) for _ in range(length)]) for length in lengths])


def label(sample: int, position: int, layer: int) -> list[int]:
    """Two distinct experts that no other (sample, position, layer) of a small batch has, ids above 255 among them."""
    return [(sample * 37 + position * 7 + layer) % 150, 299 - (sample * 20 + position + 100 * layer) % 149]


def with_labels(rollout: harness.Rollout) -> harness.Rollout:
    """The rollout with its labels for routes, the last row of each sequence missing, as engines leave it."""
    rollout.routes = []
    for sample, sequence in enumerate(rollout.sequences()):
        rows = [[label(sample, position, layer) for layer in range(LAYERS)] for position in range(len(sequence))]
        rows[-1] = [[0, 0]] * LAYERS
        rollout.routes.append(torch.tensor(rows, dtype=torch.int16))
    return rollout


@dataclass
class Seen:
    """What the routers of a worker put out, by the token in each row."""

    tokens: list[torch.Tensor] = field(default_factory=list)
    """Token ids of each forward pass, flattened to rows; 0 is padding."""
    choices: list[dict[int, torch.Tensor]] = field(default_factory=list)
    """Expert ids ``[n, K]`` of each forward pass, by layer; a recomputation replaces what it repeats."""


def watch(worker: Any) -> Seen:
    """Record all further forward passes of a worker."""
    seen = Seen()

    def before(_module, _args, kwargs):
        seen.tokens.append(kwargs["input_ids"].reshape(-1).clone())
        seen.choices.append({})

    worker.engine.module.register_forward_pre_hook(before, with_kwargs=True)
    for router in worker._passes.replay.routers:

        def after(_module, _args, output, layer=router.layer):
            if layer in seen.choices[-1]:
                assert torch.equal(seen.choices[-1][layer], output[2]), "the recomputation chose others"
            seen.choices[-1][layer] = output[2].clone()

        router.module.register_forward_hook(after)
    return seen


def assert_labels_arrived(seen: Seen, rollout: harness.Rollout) -> int:
    """Each row of each forward pass took the experts of its own token; returns the number of rows checked."""
    sequences = rollout.sequences()
    where = {
        token: (sample, position)
        for sample, sequence in enumerate(sequences)
        for position, token in enumerate(sequence.tolist())
    }
    checked = 0
    for tokens, choices in zip(seen.tokens, seen.choices, strict=True):
        assert sorted(choices) == list(SPARSE)
        for row, token in enumerate(tokens.tolist()):
            if token not in where:
                assert token == 0
                continue
            sample, position = where[token]
            last = position == len(sequences[sample]) - 1
            for layer in SPARSE:
                assert (choices[layer][row].tolist() == label(sample, position, layer)) == (not last)
            checked += 1
    return checked


def native_routes(worker: Any, rollout: harness.Rollout) -> harness.Rollout:
    """The rollout with the routes of the worker's own model, sequence by sequence, as an engine would report them."""
    replay = worker._passes.replay
    module = worker.engine.module.eval()
    rollout.routes = []
    for sequence in rollout.sequences():
        recording = running.record(module, replay, sequence[None]).clone()
        recording[-1] = 0
        rollout.routes.append(recording)
    return rollout


def flipped(rollout: harness.Rollout, share: float, experts: int, seed: int = 0) -> harness.Rollout:
    """The rollout with another second expert in a share of its routes: an engine that sometimes chose otherwise."""
    generator = torch.Generator().manual_seed(seed)
    routes = []
    for rows in rollout.routes:
        other = torch.rand(*rows.shape[:2], experts, generator=generator)
        other.scatter_(-1, rows.long(), -1.0)
        changed = torch.stack([rows[..., 0], other.argmax(-1).to(torch.int16)], dim=-1)
        chosen = torch.rand(*rows.shape[:2], 1, generator=generator) < share
        chosen[-1] = False
        routes.append(torch.where(chosen, changed, rows))
    rollout.routes = routes
    return rollout
