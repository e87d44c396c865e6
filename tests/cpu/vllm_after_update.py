"""Program for test_vllm_patches: serve a model, load other weights as verl does, compare with transformers.

    python vllm_after_update.py FOLDER [--routes]

Prints one JSON object: the largest |log p_vLLM - log p_transformers| before and after the update and, with --routes,
the number of (token, layer) pairs whose sets of experts differ.
"""

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import verl  # noqa: F401  its plugin makes vLLM's CPU build known by its name
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams

from verl_sis.cpu.tiny_model import ModelShape, build_model, build_tokenizer

LENGTH = 64
PROMPTS = [torch.randint(6, 100, (20,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(8)]


def save(folder, seed):
    tokenizer = build_tokenizer()
    model = build_model(ModelShape(), tokenizer, LENGTH, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)  # away from the uniform policy that small random weights give
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def update(llm, folder):
    """Load weights into the running engine in the steps of verl's update_weights_from_ipc."""
    weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()

    def load(model):
        from verl.utils.vllm.patch import patch_vllm_moe_model_weight_loader
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        patch_vllm_moe_model_weight_loader(model)
        model.load_weights(per_expert(weights))
        process_weights_after_loading(model, llm.llm_engine.vllm_config.model_config, torch.device("cpu"))

    llm.apply_model(load)
    llm.reset_prefix_cache()


def per_expert(weights):
    """Checkpoint names, one tensor per expert, from the fused tensors of transformers."""
    for name, tensor in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, fused in enumerate(tensor):
                gate, up = fused.chunk(2)
                yield name.replace("gate_up_proj", f"{expert}.gate_proj.weight"), gate
                yield name.replace("gate_up_proj", f"{expert}.up_proj.weight"), up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), down
        else:
            yield name, tensor


def expected(folder):
    """Log-probabilities [prompts, tokens - 1] and routes [prompts, tokens, layers, top_k] of transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    routes = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _module, _inputs, output: routes.append(output[2]))
    ids = torch.tensor(PROMPTS)
    with torch.no_grad():
        log_probs = model(ids).logits.log_softmax(-1)
    taken = log_probs[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return taken, torch.stack([route.view(*ids.shape, -1) for route in routes], dim=2)


def differences(llm, folder):
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], sampling, use_tqdm=False)
    log_probs, routes = expected(folder)
    served = torch.tensor(
        [
            [position[token].logprob for token, position in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)]
            for prompt, output in zip(PROMPTS, outputs, strict=True)
        ]
    )
    captured = [output.outputs[0].routed_experts for output in outputs]
    differing = None
    if captured[0] is not None:
        ids = torch.stack([torch.as_tensor(row).long() for row in captured])
        differing = int((ids.sort(-1).values != routes.sort(-1).values).any(-1).sum())
    return (served - log_probs).abs().max().item(), differing


def main(folder, routes):
    first, second = save(f"{folder}/first", seed=1), save(f"{folder}/second", seed=2)
    llm = LLM(
        model=first,
        dtype="float32",
        enforce_eager=True,
        max_model_len=LENGTH,
        max_num_seqs=8,
        distributed_executor_backend="uni",
        enable_return_routed_experts=routes,
        disable_log_stats=True,
    )
    before, _ = differences(llm, first)
    update(llm, second)
    after, differing = differences(llm, second)
    print(json.dumps({"before": before, "after": after, "differing_routes": differing}))


if __name__ == "__main__":
    main(sys.argv[1], "--routes" in sys.argv)
