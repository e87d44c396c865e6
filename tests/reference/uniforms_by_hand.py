"""The documented construction of the acceptance uniforms in Python's unbounded integers, modulo 2^64.

Only the published SplitMix64 constants and the formula in the docstring of ``counter_uniforms`` went into it.
"""

MODULUS = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15


def mix64(x: int) -> int:
    """Finaliser of SplitMix64 on an unsigned 64-bit integer."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % MODULUS
    return x ^ (x >> 31)


def uniform(seed: int, update: int, sample_key: int, position: int) -> float:
    """Uniform of one token; negative integers enter as their two's complement."""
    h = mix64((seed * GOLDEN + GOLDEN) % MODULUS)
    h = mix64((h + (update + 1) * GOLDEN) % MODULUS)
    h = mix64(h ^ (sample_key % MODULUS))
    h = mix64((h + (position + 1) * GOLDEN) % MODULUS)
    return (h >> 40) / (1 << 24)
