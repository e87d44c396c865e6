"""The old policy's top-K, kept on the worker that computed it until the update has used it."""

import torch

from verl_sis.core.envelope import TopK
from verl_sis.errors import SisStateError


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
