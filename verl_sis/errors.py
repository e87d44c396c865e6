"""The errors of verl_sis.

Each error is also the standard-library error that it refines, so that callers may catch either. All of them carry
their message as the only argument: they cross Ray process boundaries and must survive pickling.
"""


class SisError(Exception):
    """Base of every error that verl_sis raises on purpose."""


class SisConfigError(SisError, ValueError):
    """A setting, or a combination of settings, that SIS cannot honour. Raised before the first rollout."""


class VerlContractError(SisError, RuntimeError):
    """The installed verl (or vLLM) does not have what verl_sis builds on."""


class SisStateError(SisError, RuntimeError):
    """State that SIS needs in the middle of a run is missing or inconsistent, e.g. a sample without stored top-K."""


class SisShapeError(SisError, ValueError):
    """A tensor does not have the shape or dtype that the mathematics needs."""


class StudyFileError(SisError, ValueError):
    """A file given to a study cannot be read, is corrupt, or is not of a kind that the study knows."""


class RetrievalError(SisError, RuntimeError):
    """A corpus, an index or a retrieval server is not what the run expects, or the server cannot be reached."""


class RunComparisonError(SisError, ValueError):
    """Runs that do not make one comparison: protocols that differ, equal seeds, unequal lengths, an unfinished run."""


class DataSetError(SisError, ValueError):
    """A data set is missing, or is not what its source promises: schema, number of rows, checksum, one answer each."""
