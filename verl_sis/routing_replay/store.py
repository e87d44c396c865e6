"""The routes of the trainer's own old-log-prob pass (R2), kept on the worker until the update has used them."""

import torch

from verl_sis.errors import SisStateError


class RouteStore:
    """Routes of the samples of one old pass, by sample key, in host memory."""

    def __init__(self) -> None:
        """Start empty."""
        self._samples: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        """Number of samples held."""
        return len(self._samples)

    def clear(self) -> None:
        """Free everything."""
        self._samples.clear()

    def put(self, keys: list[int], ends: list[int], routes: torch.Tensor) -> None:
        """Keep the routes of a micro-batch.

        Args:
            keys: Key of each sample.
            ends: End of each sample in the packed micro-batch.
            routes: int16 ``[N, C, K]``, packed.
        """
        held = routes.cpu()
        for key, start, end in zip(keys, [0, *ends[:-1]], ends, strict=True):
            self._samples[key] = held[start:end].clone()

    def get(self, keys: list[int], device: torch.device) -> torch.Tensor:
        """Routes of a micro-batch, packed.

        Args:
            keys: Key of each sample.
            device: Where to.

        Returns:
            int16 ``[N, C, K]``.

        Raises:
            SisStateError: If a sample did not pass through this worker's last old pass.
        """
        missing = [row for row, key in enumerate(keys) if key not in self._samples]
        if missing:
            raise SisStateError(
                f"no routes of the old pass for {len(missing)} of {len(keys)} samples of this micro-batch, the first "
                f"in row {missing[0]}. This worker holds {len(self)} samples of its last compute_log_prob. Either the "
                "trainer sent this sample to another rank than the one that scored it, or its tokens changed in between"
            )
        return torch.cat([self._samples[key] for key in keys]).to(device)
