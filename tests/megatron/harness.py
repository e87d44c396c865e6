"""A real verl TrainingWorker on verl's Megatron engine, in this process, with a small GPT of megatron-core.

verl builds its Megatron models with Megatron-Bridge and Transformer Engine, which need a GPU. Only that step is
replaced: the model here is megatron-core's ``GPTModel`` from its own local layers. Schedules, forward step, layouts,
logits hook, loss, gradient exchange, optimizer and metric exchange are verl's and megatron-core's.
"""

from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from tests.megatron import cuda_on_cpu
from tests.worker import harness

EXPERTS = 4
LAYERS = 4


@dataclass
class Parallel:
    """How the ranks share the work, and what else varies between tests."""

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    chunks: int | None = None
    """Model chunks of each pipeline stage; None for one."""
    sequence: bool = False
    experts: int | None = None
    """Experts of a mixture of four, top 2, on each rank; None for a dense model."""
    replay: str = "disabled"
    packed: bool = True
    width: int | None = None
    """Columns of the output layer on each rank; None for as few as hold the vocabulary."""
    vocab_size: int = 92
    micro_batch_size: int = 4
    max_tokens: int | None = None
    sis: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)


def transformer_config(parallel: Parallel) -> Any:
    """Configuration of the model, on the CPU and in float32."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    mixture: dict[str, Any] = {}
    if parallel.experts is not None:
        mixture = {
            "num_moe_experts": EXPERTS,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 32,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": EXPERTS // parallel.experts,
            "expert_tensor_parallel_size": 1,
            "moe_enable_routing_replay": parallel.replay != "disabled",
        }
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=64,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.context,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.chunks,
        sequence_parallel=parallel.sequence,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        overlap_p2p_comm=parallel.chunks is not None,
        batch_p2p_comm=False,
        **mixture,
    )


def build_chunk(config: Any, parallel: Parallel, chunk: int | None) -> Any:
    """One chunk of the model of this pipeline stage, its weights a function of their names."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    experts = None if parallel.experts is None else EXPERTS
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = cuda_on_cpu.attention_class()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = cuda_on_cpu.Norm
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=(parallel.width or -(-parallel.vocab_size // parallel.tensor)) * parallel.tensor,
        max_sequence_length=256,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=chunk,
    )
    first_layer = model.decoder.layers[0].layer_number - 1
    first_expert = parallel_state.get_expert_model_parallel_rank() * (parallel.experts or 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = numbered(numbered(name, "decoder.layers.", first_layer), "local_experts.", first_expert)
            fill(parameter, whole, parallel.vocab_size)
    return model


def numbered(name: str, before: str, first: int) -> str:
    """The name that a parameter has in a model that is not cut up: the number after ``before`` is counted on."""
    head, _, rest = name.partition(before)
    if not rest:
        return name
    number, _, tail = rest.partition(".")
    return f"{head}{before}{int(number) + first}.{tail}"


def fill(parameter: torch.Tensor, name: str, vocab_size: int) -> None:
    """Fill this rank's part of a parameter; rows past the vocabulary are 0, as Megatron-Bridge leaves them."""
    from megatron.core import parallel_state

    if parameter.ndim == 1:
        return
    sharded = getattr(parameter, "tensor_model_parallel", False) and "local_experts" not in name
    dim = parameter.partition_dim if sharded else 0
    size = parallel_state.get_tensor_model_parallel_world_size() if sharded else 1
    shape = list(parameter.shape)
    shape[dim] *= size
    of_vocabulary = "word_embeddings" in name or "output_layer" in name
    rows = shape[0]
    if of_vocabulary:
        shape[0] = vocab_size
    generator = torch.Generator().manual_seed(sum(ord(letter) * place for place, letter in enumerate(name, 1)))
    spread = 0.6 if "output_layer" in name else 0.25
    whole = torch.randn(shape, generator=generator) * spread
    if of_vocabulary:
        whole = torch.nn.functional.pad(whole, (0, 0, 0, rows - vocab_size))
    parameter.copy_(whole.chunk(size, dim)[parallel_state.get_tensor_model_parallel_rank() if sharded else 0])


@cache
def engine_class() -> type:
    """Verl's Megatron engine with the model above, registered for the CPU."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    @EngineRegistry.register(model_type="language_model", backend="megatron", device="cpu")
    class MegatronEngineOnCpu(MegatronEngineWithLMHead):
        """Builds the model without Megatron-Bridge."""

        parallel: Parallel

        def initialize(self) -> None:
            """Model, gradient buffers, optimizer and scheduler; no checkpoints."""
            parallel = self.parallel
            self.param_dtype = self.dtype = torch.float32
            self.is_value_model, self._hf_export_tasks = False, None
            self.tf_config = transformer_config(parallel)
            ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
            self.module = [
                DistributedDataParallel(
                    self.tf_config,
                    ddp,
                    build_chunk(self.tf_config, parallel, chunk),
                    disable_bucketing=bool(chunk),
                )
                for chunk in ([None] if parallel.chunks is None else range(parallel.chunks))
            ]
            self.optimizer = self._build_optimizer()
            self.lr_scheduler = self._build_lr_scheduler()

        def to(self, *_: Any, **__: Any) -> None:
            """Everything is where it belongs."""

    return MegatronEngineOnCpu


def build_worker(model: Path, parallel: Parallel, *, loss: Any = None, **actor: Any) -> Any:
    """Build a worker as ``ActorRolloutRefWorker.init_model`` does."""
    from megatron.core import parallel_state
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import HFModelConfig, McoreEngineConfig, McoreOptimizerConfig, TrainingWorkerConfig
    from verl.workers.config.actor import McoreActorConfig
    from verl.workers.config.engine import EngineRouterReplayConfig
    from verl.workers.utils.losses import ppo_loss

    from verl_sis.integration.actor import ActorTrainingWorker

    cuda_on_cpu.install()
    if parallel_state.is_initialized():
        parallel_state.destroy_model_parallel()
    engine_class().parallel = parallel
    dynamic = parallel.max_tokens is not None
    engine_config = McoreEngineConfig(
        tensor_model_parallel_size=parallel.tensor,
        context_parallel_size=parallel.context,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.chunks,
        sequence_parallel=parallel.sequence,
        expert_model_parallel_size=EXPERTS // (parallel.experts or EXPERTS),
        expert_tensor_parallel_size=1,
        router_replay=EngineRouterReplayConfig(mode=parallel.replay),
        use_distributed_optimizer=False,
        use_dynamic_bsz=dynamic,
        micro_batch_size_per_gpu=parallel.micro_batch_size,
        infer_micro_batch_size_per_gpu=parallel.micro_batch_size,
        max_token_len_per_gpu=parallel.max_tokens,
        infer_max_token_len_per_gpu=parallel.max_tokens,
        **parallel.engine,
    )
    model_config = HFModelConfig(path=str(model), use_remove_padding=parallel.packed)
    model_config.hf_config.vocab_size = parallel.vocab_size
    worker = ActorTrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=McoreOptimizerConfig(lr=1e-3, total_training_steps=100, lr_warmup_steps=0),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    actor_config = McoreActorConfig(
        rollout_n=1,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=parallel.micro_batch_size,
        use_dynamic_bsz=dynamic,
        megatron=engine_config,
        policy_loss=loss or harness.sis_choice(parallel.sis),
        **actor,
    )
    worker.set_loss_fn(partial(ppo_loss, config=actor_config))
    return worker
