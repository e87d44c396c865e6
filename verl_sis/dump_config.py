"""Settings of the per-token tables that training writes; part of ``verl_sis.config``."""

from dataclasses import dataclass
from typing import Any

from verl.base_config import BaseConfig

from verl_sis.errors import SisConfigError


@dataclass
class SisDumpConfig(BaseConfig):
    """Per-token tables written in training, at ``actor_rollout_ref.actor.policy_loss.sis.dump``.

    Args:
        every (int): Rollouts (steps of the trainer) from one dump to the next, the first included; 0 for none.
        directory (str): Where each rank writes its files; the presets say ``${trainer.default_local_dir}/sis_dump``.
        max_tokens (int): Rows that a rank writes of one rollout, in whole responses.
        max_mb (int): Size of all token files of a rank, in MB of 10^6 bytes, at which the dump of the run ends.
        max_contexts (int): Tokens of a dump whose whole top-K is written too, for the estimator laboratory.
    """

    every: int = 0
    directory: str = ""
    max_tokens: int = 65536
    max_mb: int = 2048
    max_contexts: int = 512

    def __post_init__(self) -> None:
        """Check each value.

        Raises:
            SisConfigError: If a value is not allowed.
        """
        for name, least in {"every": 0, "max_tokens": 1, "max_mb": 1, "max_contexts": 0}.items():
            check_integer(f"dump.{name}", getattr(self, name), least)
        if self.every and not self.directory:
            raise SisConfigError(
                f"policy_loss.sis.dump.every={self.every} needs a directory to write to. Type "
                "actor_rollout_ref.actor.policy_loss.sis.dump.directory=/path/to/dumps"
            )


def check_integer(name: str, value: Any, least: int) -> None:
    """Check a whole number of the section ``policy_loss.sis``.

    Args:
        name: Of the setting.
        value: What was typed.
        least: Smallest value allowed.

    Raises:
        SisConfigError: If it is no integer, or a smaller one.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise SisConfigError(f"policy_loss.sis.{name} must be an integer of at least {least}, got {value!r}")
