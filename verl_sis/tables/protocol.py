"""How runs were trained and evaluated: what has to agree before their numbers stand in one table."""

from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from verl_sis.tables.configuration import Configuration

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


def _names(value: Any) -> str:
    """File names without directories, which differ between machines."""
    files = value if isinstance(value, list) else [value]
    return " ".join(PurePosixPath(str(file)).name for file in files)


def _reward(config: Configuration) -> str:
    # verl still accepts the older key, and prefers it where both are set.
    for section in ("custom_reward_function", "reward.custom_reward_function"):
        path = config.get(f"{section}.path")
        if path is not None:
            where = path if str(path).startswith("pkg://") else _names(path)
            arguments = config.get(f"{section}.reward_kwargs")
            return f"{where}:{config.get(f'{section}.name', 'compute_score')}" + f" {arguments}" * bool(arguments)
    if config.get("reward.reward_model.enable", False):
        return f"reward model {_names(config.get('reward.reward_model.model_path'))}"
    return "verl's default of each data source"


def _list(config: Configuration, section: str, *keys: str) -> str:
    return ", ".join(f"{key} {_text(config.get(f'{section}.{key}'))}" for key in keys)


def _text(value: Any) -> str:
    """Numbers in one spelling, whether they were written 1, 1.0 or 1e0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return f"{value:.12g}" if is_number else str(value)


def _dtype(config: Configuration) -> str:
    section = (
        "fsdp_config" if str(config.get(f"{_ACTOR}.strategy")).startswith("fsdp") else config.get(f"{_ACTOR}.strategy")
    )
    trainer = config.get(f"{_ACTOR}.{section}.mixed_precision.param_dtype") or config.get(f"{_ACTOR}.{section}.dtype")
    return f"rollout {config.get(f'{_ROLLOUT}.dtype')}, trainer {trainer}"


PROTOCOL: Mapping[str, Callable[[Configuration], str]] = {
    "reward": _reward,
    "validation_sampling": lambda config: _list(
        config, f"{_ROLLOUT}.val_kwargs", "do_sample", "temperature", "top_p", "top_k", "n"
    ),
    "validation_data": lambda config: _names(config.get("data.val_files")),
    "training_data": lambda config: _names(config.get("data.train_files")),
    "training_sampling": lambda config: _list(config, _ROLLOUT, "temperature", "top_p", "top_k", "n"),
    "lengths": lambda config: _list(config, "data", "max_prompt_length", "max_response_length"),
    "dtype": _dtype,
    "mini_batch": lambda config: f"{config.get(f'{_ACTOR}.ppo_mini_batch_size')} prompts",
    "optimizer": lambda config: (
        _list(
            config,
            f"{_ACTOR}.optim",
            "lr",
            "lr_warmup_steps",
            "lr_warmup_steps_ratio",
            "lr_scheduler_type",
            "weight_decay",
        )
        + f", grad_clip {_text(config.get(f'{_ACTOR}.grad_clip'))}"
    ),
    "engine": lambda config: (
        f"{config.get(f'{_ACTOR}.strategy')}, {config.get(f'{_ROLLOUT}.name')}, "
        f"trainer {config.get('trainer.v1.trainer_mode') if config.get('trainer.use_v1') else 'v0'}"
    ),
}
"""What all runs on one model and task share, with two keys that come from the logs: see ``verl_sis.tables.runs``."""

SETTINGS: Mapping[str, Callable[[Configuration], str]] = {
    "clip": lambda config: _list(config, _ACTOR, "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"),
    "aggregation": lambda config: _list(config, _ACTOR, "loss_agg_mode", "loss_scale_factor"),
    "advantage": lambda config: _list(config, "algorithm", "adv_estimator", "norm_adv_by_std_in_grpo"),
    "filter_groups": lambda config: _list(config, "algorithm.filter_groups", "enable", "metric"),
    "regularisation": lambda config: (
        ", ".join(
            [
                _list(config, _ACTOR, "entropy_coeff", "use_kl_loss"),
                _list(config, _ACTOR, "kl_loss_coef", "kl_loss_type") if config.get(f"{_ACTOR}.use_kl_loss") else "",
                _list(config, "algorithm", "use_kl_in_reward"),
                _list(config, "algorithm.kl_ctrl", "kl_coef") if config.get("algorithm.use_kl_in_reward") else "",
            ]
        )
        .replace(", , ", ", ")
        .strip(", ")
    ),
    "correction": lambda config: _list(
        config,
        "algorithm.rollout_correction",
        *("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "bypass_mode"),
    ),
}
"""What a base algorithm shares with the same one under SIS, beside its name."""

LOGGED = ("evaluation_sets", "optimizer_steps")
"""Keys of a protocol that are not, or not only, in the configuration."""

KEYS = (*PROTOCOL, *LOGGED, *SETTINGS)
"""What ``--allow-mixed`` may name."""


def protocol_of(config: Configuration) -> dict[str, str]:
    """What ``PROTOCOL`` says of a run.

    Args:
        config: Of the run.
    """
    return {key: read(config) for key, read in PROTOCOL.items()}


def settings_of(config: Configuration) -> dict[str, str]:
    """What ``SETTINGS`` says of a run.

    Args:
        config: Of the run.
    """
    return {key: read(config) for key, read in SETTINGS.items()}
