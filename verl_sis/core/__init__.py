"""The mathematics of SIS in plain torch: no verl, no configuration objects, no logging.

Legend used in every file here: ``N`` tokens of a packed sequence, ``B`` responses, ``T`` response positions, ``V``
vocabulary size, ``K`` size of the old policy's top-K set. All log-probabilities are natural logarithms.
"""
