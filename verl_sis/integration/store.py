"""The old policy's top-K, kept on the worker that computed it until the update has used it."""

import hashlib
from itertools import pairwise

import torch
from tensordict import TensorDict

from verl_sis import verl_compat
from verl_sis.core.envelope import TopK
from verl_sis.errors import SisStateError

SAMPLE_KEY = "sis_sample_key"
"""Column ``[B]`` int64 that the worker adds to its own copy of a batch; it follows verl's selection and chunking."""


def sample_keys(data: TensorDict) -> torch.Tensor:
    """A key of each sample's token sequence and of where its response starts.

    Equal sequences have equal top-K and share a key, on any rank and in any run; 64 bits of BLAKE2b, so that two
    different sequences of a batch of a million share one with a probability of 3e-8.

    Args:
        data: Batch with nested ``input_ids``.

    Returns:
        ``[B]`` int64 on the CPU.
    """
    keys = []
    token_ids, ends = verl_compat.packed(data, "input_ids")
    tokens = token_ids.to(device="cpu", dtype=torch.int64).contiguous().numpy()
    for (start, end), length in zip(pairwise([0, *ends]), verl_compat.response_lengths(data), strict=True):
        digest = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=8)
        digest.update(tokens[start:end].tobytes())
        keys.append(int.from_bytes(digest.digest(), "little", signed=True))
    return torch.tensor(keys, dtype=torch.int64)


class TopKStore:
    """Top-K of the samples of one old pass, by sample key."""

    def __init__(self) -> None:
        """Start empty."""
        self._samples: dict[int, TopK] = {}

    def __len__(self) -> int:
        """Number of samples held."""
        return len(self._samples)

    def clear(self) -> None:
        """Free everything."""
        self._samples.clear()

    def put(self, keys: list[int], lengths: tuple[int, ...], top_k: TopK) -> None:
        """Keep the top-K of a micro-batch.

        Args:
            keys: Key of each sample.
            lengths: Response length of each sample.
            top_k: Of all response tokens of the micro-batch, sample after sample.
        """
        columns = zip(
            top_k.ids.split(lengths),
            top_k.log_prob.split(lengths),
            top_k.sampled_log_prob.split(lengths),
            top_k.contains_sampled.split(lengths),
            strict=True,
        )
        for key, (ids, log_prob, sampled_log_prob, contains_sampled) in zip(keys, columns, strict=True):
            self._samples[key] = TopK(ids, log_prob, sampled_log_prob, contains_sampled)

    def get(self, keys: list[int], lengths: tuple[int, ...]) -> TopK:
        """Top-K of all response tokens of a micro-batch, sample after sample.

        Args:
            keys: Key of each sample.
            lengths: Response length of each sample.

        Returns:
            The columns, concatenated.

        Raises:
            SisStateError: If a sample was not scored by this worker's last old pass.
        """
        missing = [(row, key) for row, key in enumerate(keys) if key not in self._samples]
        if missing:
            row, key = missing[0]
            raise SisStateError(
                f"no top-K of the old policy for {len(missing)} of {len(keys)} samples of this micro-batch; the first "
                f"is row {row}, key {key:#x}, {lengths[row]} response tokens. This worker holds {len(self)} samples of "
                "its last compute_log_prob. Either the trainer sent this sample to another rank than the one that "
                "scored it, or its tokens changed in between"
            )
        samples = [self._samples[key] for key in keys]
        return TopK(
            ids=torch.cat([sample.ids for sample in samples]),
            log_prob=torch.cat([sample.log_prob for sample in samples]),
            sampled_log_prob=torch.cat([sample.sampled_log_prob for sample in samples]),
            contains_sampled=torch.cat([sample.contains_sampled for sample in samples]),
        )
