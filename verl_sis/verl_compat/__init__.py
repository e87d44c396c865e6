"""The only place that knows verl's versions, private names and data layout.

``CONTRACT`` lists what verl_sis builds on; ``check_contract`` compares it with the installed verl, in every process
that uses SIS and in ``verl-sis doctor``. Nothing of verl is replaced here: SIS uses hooks that verl offers (see
``verl_sis.integration``). The patches of the CPU port stand in ``verl_sis.cpu``.
"""

from verl_sis.verl_compat.batch import (
    LOGITS_HOOK_FLAG,
    gather_packed,
    log_probs_keep_float32,
    packed,
    padded,
    response_lengths,
    response_width,
    sequence_parallel_rank,
    sequence_parallel_size,
)
from verl_sis.verl_compat.checks import (
    PLUGIN_NAME,
    SUPPORTED_VERL,
    actor_config_of,
    check_contract,
    check_engine,
    check_plugin_policy,
    check_registered_loss,
    check_version,
    contract_problems,
    installed_verl,
    vocab_size,
)
from verl_sis.verl_compat.contract import CONTRACT, Touchpoint

__all__ = [
    "CONTRACT",
    "LOGITS_HOOK_FLAG",
    "PLUGIN_NAME",
    "SUPPORTED_VERL",
    "Touchpoint",
    "actor_config_of",
    "check_contract",
    "check_engine",
    "check_plugin_policy",
    "check_registered_loss",
    "check_version",
    "contract_problems",
    "gather_packed",
    "installed_verl",
    "log_probs_keep_float32",
    "packed",
    "padded",
    "response_lengths",
    "response_width",
    "sequence_parallel_rank",
    "sequence_parallel_size",
    "vocab_size",
]
