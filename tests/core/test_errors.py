"""Errors cross process boundaries and stay what they were."""

import pickle

import pytest

from verl_sis import errors

KINDS = {
    errors.DataSetError: ValueError,
    errors.RetrievalError: RuntimeError,
    errors.RunComparisonError: ValueError,
    errors.SisError: Exception,
    errors.SisConfigError: ValueError,
    errors.SisShapeError: ValueError,
    errors.SisStateError: RuntimeError,
    errors.StudyFileError: ValueError,
    errors.VerlContractError: RuntimeError,
}


def test_every_error_is_listed_here():
    defined = {item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)}
    assert defined == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_pickling_keeps_type_and_message(kind):
    copy = pickle.loads(pickle.dumps(kind("expected 3, got 4; type x=3")))
    assert type(copy) is kind
    assert str(copy) == "expected 3, got 4; type x=3"


@pytest.mark.parametrize(("kind", "builtin"), KINDS.items(), ids=lambda kind: kind.__name__)
def test_callers_may_catch_ours_or_pythons(kind, builtin):
    assert issubclass(kind, builtin) and issubclass(kind, errors.SisError)
