"""Process that compares answers with math-verify: a JSON pair per input line, the name of a verdict per output line.

Started by ``verl_sis.rewards.symbolic``, with the CPU seconds of a comparison and the bytes of address space.
"""

import json
import logging
import os
import resource
import signal
import sys


def compare(ground_truth: str, answer: str) -> str:
    """Compare two bare answers with math-verify, without its own limits.

    Only LaTeX is read from the box. math-verify's search for plain numbers stays off: it would find "3" in an answer
    that it cannot parse.

    Args:
        ground_truth: LaTeX without ``$`` and box.
        answer: LaTeX without ``$`` and box.

    Returns:
        Name of a `verl_sis.rewards.symbolic.Verdict`.
    """
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    latex = (LatexExtractionConfig(),)
    # The type stubs know no None here, but the library does: no limit.
    gold, found = (
        parse(f"\\boxed{{{text}}}", latex, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        for text in (ground_truth, answer)
    )
    # What cannot be parsed is left as a string, and equals the same string only.
    if all(isinstance(reading, str) for reading in gold):
        return "SAME_TEXT" if ground_truth.strip() == answer.strip() else "OTHER_TEXT"
    return "EQUAL" if verify(gold, found, timeout_seconds=None) else "DIFFERENT"


def main(cpu_seconds: float, memory_bytes: int) -> None:
    """Answer until the input ends."""
    # The replies go to a copy of standard output; whatever else prints, prints to standard error.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # An interrupt at the keyboard is for the parent; at the limit the kernel shall end this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    import math_verify  # noqa: F401  (takes a second, which is not the first comparison's)

    # It warns that its limits are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    print("ready", file=replies)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        verdict = compare(*json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(verdict, file=replies)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
