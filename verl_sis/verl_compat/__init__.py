"""The only place that knows verl's versions, private names and data layout.

``CONTRACT`` lists what verl_sis builds on; ``check_contract`` compares it with the installed verl, in every process
that uses SIS and in ``verl-sis doctor``. Nothing of verl is replaced here: SIS uses hooks that verl offers (see
``verl_sis.integration``). The patches of the CPU port stand in ``verl_sis.cpu``.
"""

from verl_sis.verl_compat.batch import (
    LOGITS_HOOK_FLAG,
    SAMPLE_KEY,
    gather_packed,
    gather_packed_integers,
    is_old_pass,
    log_probs_keep_float32,
    packed,
    padded,
    response_columns,
    response_lengths,
    response_width,
    sample_keys,
    sequence_parallel_rank,
    sequence_parallel_size,
    sum_over_sequence_parallel,
    with_metrics,
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
    is_fsdp_engine,
    vocab_size,
)
from verl_sis.verl_compat.contract import CONTRACT, Touchpoint
from verl_sis.verl_compat.engine import (
    around_forward,
    check_model_rows,
    current_device,
    model_of,
    model_rows,
    text_config,
)

__all__ = [
    "CONTRACT",
    "LOGITS_HOOK_FLAG",
    "PLUGIN_NAME",
    "SAMPLE_KEY",
    "SUPPORTED_VERL",
    "Touchpoint",
    "actor_config_of",
    "around_forward",
    "check_contract",
    "check_engine",
    "check_model_rows",
    "check_plugin_policy",
    "check_registered_loss",
    "check_version",
    "contract_problems",
    "current_device",
    "gather_packed",
    "gather_packed_integers",
    "installed_verl",
    "is_fsdp_engine",
    "is_old_pass",
    "log_probs_keep_float32",
    "model_of",
    "model_rows",
    "packed",
    "padded",
    "response_columns",
    "response_lengths",
    "response_width",
    "sample_keys",
    "sequence_parallel_rank",
    "sequence_parallel_size",
    "sum_over_sequence_parallel",
    "text_config",
    "vocab_size",
    "with_metrics",
]
