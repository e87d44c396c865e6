"""A real verl TrainingWorker in this process, without Ray and vLLM: 7 seconds instead of a minute.

Everything here is verl's own: configuration classes, engine, loss, metric exchange. Only the rollout is made up.
"""

import os
import socket
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch


def prepare_environment(rank: int = 0, world_size: int = 1, port: int | None = None) -> None:
    """Set what verl reads from the environment; call before verl is imported."""
    os.environ.update(
        VERL_PLATFORM="cpu",
        HF_HUB_OFFLINE="1",
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port or free_port()),
    )


def free_port() -> int:
    """A port that the system says is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def build_model_folder(folder: Path, *, spread: float = 0.12, seed: int = 0, **shape_changes: int) -> Path:
    """Write a random Qwen3-MoE of 0.1 million parameters and its tokenizer.

    Args:
        folder: Where to write.
        spread: Standard deviation of the weights; large enough that probabilities are far from uniform.
        seed: Of the weights.
        shape_changes: Fields of ``ModelShape`` that differ.
    """
    from verl_sis.cpu.tiny_model import ModelShape, build_model, build_tokenizer

    sizes = {"hidden_size": 64, "layers": 2, "heads": 4, "experts": 4, "experts_per_token": 2, "expert_size": 32}
    shape = ModelShape(**{**sizes, **shape_changes})
    tokenizer = build_tokenizer()
    model = build_model(shape, tokenizer, 256, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, spread, generator=generator)
        model.lm_head.weight.normal_(0.0, 4 * spread, generator=torch.Generator().manual_seed(seed + 1))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@dataclass
class Settings:
    """What varies between tests of the worker."""

    model: Path
    sis: dict[str, Any] | None = field(default_factory=dict)
    """Settings of SIS, those of its dump under the key ``dump``; None for verl alone."""
    replay: dict[str, Any] | None = None
    """Settings of routing replay; None for none. Facts of the run under the key ``run``."""
    actor: dict[str, Any] = field(default_factory=dict)
    model_overrides: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    micro_batch_size: int = 4
    max_tokens: int | None = None
    """Token budget of dynamic micro-batches; None for micro-batches of fixed size."""
    learning_rate: float = 1e-3
    dtype: str = "fp32"


def build_worker(settings: Settings) -> Any:
    """Build a worker as ``ActorRolloutRefWorker.init_model`` does: model, engine, then the loss function."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.config.actor import FSDPActorConfig, PolicyLossConfig
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss

    import verl_sis.cpu.engine  # noqa: F401

    dynamic = settings.max_tokens is not None
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), settings.dtype)
    engine_config = FSDPEngineConfig(
        **{
            "strategy": "fsdp2",
            "use_torch_compile": False,
            "mixed_precision": precision,
            "model_dtype": "fp32",
            "use_dynamic_bsz": dynamic,
            "micro_batch_size_per_gpu": settings.micro_batch_size,
            "infer_micro_batch_size_per_gpu": settings.micro_batch_size,
            "max_token_len_per_gpu": settings.max_tokens,
            "infer_max_token_len_per_gpu": settings.max_tokens,
            **settings.engine,
            **({} if settings.replay is None else {"router_replay": replay_choice(settings.replay)}),
        }
    )
    model_config = HFModelConfig(
        **{
            "path": str(settings.model),
            "override_config": {"attn_implementation": "sdpa"},
            "use_remove_padding": True,
            "enable_gradient_checkpointing": False,
            **settings.model_overrides,
        }
    )
    worker_class: type[TrainingWorker] = TrainingWorker
    policy_loss = PolicyLossConfig()
    if settings.sis is not None or settings.replay is not None:
        from verl_sis.integration.actor import ActorTrainingWorker

        worker_class = ActorTrainingWorker
    if settings.sis is not None:
        policy_loss = sis_choice(settings.sis)
    worker = worker_class(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=FSDPOptimizerConfig(lr=settings.learning_rate, total_training_steps=100),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor_config = FSDPActorConfig(
        **{
            "strategy": "fsdp2",
            "rollout_n": 1,
            "ppo_mini_batch_size": 8,
            "ppo_micro_batch_size_per_gpu": settings.micro_batch_size,
            "use_dynamic_bsz": dynamic,
            "fsdp_config": engine_config,
            "policy_loss": policy_loss,
            **settings.actor,
        }
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor_config))
    return worker


def sis_choice(sis: dict[str, Any]) -> Any:
    """The policy-loss section of a run that chose SIS; imported only then."""
    from verl_sis.config import SisConfig, SisDumpConfig, SisPolicyLossConfig
    from verl_sis.run_facts import ACTIVATION_MODULE, SisRunFacts

    settings = {**sis, "dump": SisDumpConfig(**sis.get("dump", {}))}
    return SisPolicyLossConfig(sis=SisConfig(run=SisRunFacts(external_lib=ACTIVATION_MODULE), **settings))


def replay_choice(replay: dict[str, Any]) -> Any:
    """The ``router_replay`` section of a run that chose routing replay."""
    from verl_sis.routing_replay.config import RoutingReplayConfig, RoutingReplayRunFacts
    from verl_sis.run_facts import ACTIVATION_MODULE

    settings = {"mode": "R3", **replay}
    facts = {"external_lib": ACTIVATION_MODULE, "strategy": "fsdp2", "return_routes": settings["mode"] == "R3"}
    return RoutingReplayConfig(**{**settings, "run": RoutingReplayRunFacts(**{**facts, **settings.get("run", {})})})


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    """A jagged nested tensor."""
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


@dataclass
class Rollout:
    """Prompts and responses of one rollout, with advantages."""

    prompts: list[torch.Tensor]
    responses: list[torch.Tensor]
    masks: list[torch.Tensor] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    routes: list[torch.Tensor] = field(default_factory=list)
    """int16 ``[len, layers, K]`` of each row, as the rollout engine reports them; empty for none."""

    def __post_init__(self) -> None:
        """Fill what was not given: every token bears loss, advantages alternate in sign."""
        self.masks = self.masks or [torch.ones(len(row), dtype=torch.int64) for row in self.responses]
        self.advantages = self.advantages or [(-1.0) ** row for row in range(len(self.responses))]

    def select(self, rows: list[int]) -> "Rollout":
        """The given rows, in the given order."""
        columns = (self.prompts, self.responses, self.masks, self.advantages, self.routes)
        return Rollout(*([column[row] for row in rows] if column else [] for column in columns))

    def sequences(self) -> list[torch.Tensor]:
        """Prompt and response of each row."""
        return [torch.cat(pair) for pair in zip(self.prompts, self.responses, strict=True)]

    def columns(self) -> dict[str, torch.Tensor]:
        """What verl's old pass gets."""
        sequences = self.sequences()
        routes = {"routed_experts": nested(self.routes)} if self.routes else {}
        return {
            "prompts": nested(self.prompts),
            "responses": nested(self.responses),
            "input_ids": nested(sequences),
            "position_ids": nested([torch.arange(len(row)) for row in sequences]),
            "response_mask": nested(self.masks),
            "loss_mask": nested(self.masks),
            **routes,
        }


def made_up_rollout(lengths: list[int], *, seed: int = 0, vocab_size: int = 90) -> Rollout:
    """Random tokens: prompts of 3 to 6, responses of the given lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> torch.Tensor:
        return torch.randint(6, vocab_size, (count,), generator=generator)

    prompts = [tokens(int(torch.randint(3, 7, (1,), generator=generator))) for _ in lengths]
    return Rollout(prompts, [tokens(length) for length in lengths])


def sampled_rollout(worker: Any, count: int, *, length: int, seed: int = 0) -> Rollout:
    """Responses really sampled from the worker's current policy: what the identities of SIS speak of."""
    generator = torch.Generator().manual_seed(seed)
    module = worker.engine.module.eval()
    prompts = [torch.randint(6, 90, (4,), generator=generator) for _ in range(count)]
    tokens = torch.stack(prompts)
    with torch.no_grad():
        for _ in range(length):
            logits = module(input_ids=tokens, use_cache=False).logits[:, -1].float()
            drawn = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
            tokens = torch.cat([tokens, drawn], dim=1)
    return Rollout(prompts, list(tokens[:, 4:]))


def old_pass(worker: Any, rollout: Rollout, *, columns: dict[str, torch.Tensor] | None = None, **extra: Any) -> Any:
    """Run ``infer_batch`` as ``compute_log_prob`` does; returns its output."""
    from verl.utils import tensordict_utils as tu

    settings = {"temperature": 1.0, "calculate_entropy": True, "compute_loss": False}
    settings["global_token_num"] = [len(row) for row in rollout.sequences()]
    return worker.infer_batch(
        tu.get_tensordict({**rollout.columns(), **(columns or {})}, non_tensor_dict={**settings, **extra})
    )


def update(
    worker: Any,
    rollout: Rollout,
    old_log_probs: torch.Tensor,
    *,
    mini_batch_size: int | None = None,
    epochs: int = 1,
    columns: dict[str, torch.Tensor] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Run ``train_mini_batch`` as ``update_actor`` does; returns its metrics (empty on ranks without outputs)."""
    from verl.utils import tensordict_utils as tu

    size = mini_batch_size or len(rollout.responses)
    data = rollout.columns()
    data["old_log_probs"] = old_log_probs
    data["advantages"] = nested(
        [torch.full((len(row),), value) for row, value in zip(rollout.responses, rollout.advantages, strict=True)]
    )
    data.update(columns or {})
    settings = {
        "temperature": 1.0,
        "calculate_entropy": False,
        "distillation_use_topk": False,
        "global_batch_size": size,
        "mini_batch_size": size,
        "epochs": epochs,
        "seed": 1,
        "dataloader_kwargs": {"shuffle": False},
    }
    output = worker.train_mini_batch(tu.get_tensordict(data, non_tensor_dict={**settings, **extra}))
    return {} if output is None else tu.get(output, "metrics")


def response_log_probs(output: Any, rollout: Rollout) -> torch.Tensor:
    """Old log-probs of the responses, sliced as verl's trainer slices them."""
    from verl.workers.utils.padding import response_from_nested

    return response_from_nested(output["log_probs"], nested(rollout.masks))


def step(worker: Any, rollout: Rollout, **extra: Any) -> dict[str, Any]:
    """Old pass and update on one rollout, as one step of verl's trainer; returns the update's metrics."""
    output = old_pass(worker, rollout)
    return update(worker, rollout, response_log_probs(output, rollout), **extra)
