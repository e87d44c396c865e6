"""What SIS cannot honour on verl's VeOmni engine is refused when the actor is built; verl's contract holds."""

from types import SimpleNamespace

import pytest

pytest.importorskip("veomni", reason="Type: pip install --no-deps veomni==0.1.12")

from verl_sis import verl_compat
from verl_sis.errors import SisConfigError

REFUSED = {
    "fused kernels": ({"use_fused_kernels": True}, "never materialise them. Type actor_rollout_ref.model.use_fused_k"),
    "static padding": ({"pad_to_length": True}, "Type actor_rollout_ref.actor.veomni.pad_to_length=False"),
}


def engine(**settings):
    """What the check reads of an engine: verl's own configuration."""
    from verl.workers.config import VeOmniEngineConfig

    return SimpleNamespace(engine_config=VeOmniEngineConfig(**settings))


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    settings, message = REFUSED[case]
    with pytest.raises(SisConfigError, match=f"SIS on verl's VeOmni engine: .*{message}"):
        verl_compat.check_veomni_engine(engine(**settings))


def test_accepted():
    verl_compat.check_veomni_engine(engine())
    verl_compat.check_veomni_engine(engine(ulysses_parallel_size=2, use_remove_padding=False))


@pytest.mark.parametrize("touchpoint", verl_compat.VEOMNI_CONTRACT, ids=lambda touchpoint: touchpoint.name)
def test_installed_verl_keeps_the_contract(touchpoint):
    assert touchpoint.problems() == []
    assert touchpoint.why
