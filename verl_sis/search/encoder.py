"""Dense encoders of queries and passages: a transformers model, how its tokens are pooled, and which prefixes it wants.

These choices belong together: E5 was trained with the prefixes ``query: `` and ``passage: ``, and finds little without
them. So they form one description, which an index keeps (`verl_sis.search.manifest`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_sis.errors import RetrievalError, SisConfigError

POOLINGS = ("mean", "cls")
DTYPES = ("float32", "bfloat16", "float16")

PROBE = "The quick brown fox jumps over the lazy dog near the river bank."
"""A text whose embedding identifies an encoder's weights, wherever they lie and in whichever dtype they are loaded."""

MIN_PROBE_COSINE = 0.999
"""bfloat16 and float32 loads of one encoder differ by less than this allows; other weights or prefixes by far more."""


@dataclass(frozen=True)
class EncoderSettings:
    """What determines an embedding, beside the weights."""

    pooling: str = "mean"
    """"mean" over the tokens of the text, or "cls": the first token."""

    query_prefix: str = ""
    """Put before each query."""

    passage_prefix: str = ""
    """Put before each passage."""

    max_tokens: int = 256
    """Longer texts are cut there."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.pooling not in POOLINGS:
            raise SisConfigError(f"expected the pooling to be one of {POOLINGS}, found {self.pooling!r}.")
        if self.max_tokens < 3:
            raise SisConfigError(f"expected max_tokens of at least 3 (two are special), found {self.max_tokens}.")


PRESETS = {
    # https://huggingface.co/intfloat/e5-base-v2: prefixes, average pooling, L2 norm, at most 512 tokens.
    "e5": EncoderSettings(query_prefix="query: ", passage_prefix="passage: ", max_tokens=512),
    # sentence-transformers/all-MiniLM-L6-v2: average pooling, L2 norm, at most 256 tokens.
    "minilm": EncoderSettings(),
}
"""Settings of known encoders, by the name that the command line takes."""


class Encoder:
    """Embeds texts as unit vectors, so that an inner product is a cosine.

    The model is loaded from a local directory, or from the hub or its cache, as transformers does.
    """

    def __init__(
        self, model: str, settings: EncoderSettings, device: str = "cpu", dtype: str = "float32", batch_size: int = 64
    ) -> None:
        """Load the model.

        Args:
            model: Directory or hub name.
            settings: Pooling, prefixes, longest text.
            device: Of torch.
            dtype: One of `DTYPES`, of the weights. Pooling and norm are always in float32.
            batch_size: Texts in one forward pass.

        Raises:
            RetrievalError: If transformers cannot load it.
            SisConfigError: If the dtype is none of `DTYPES`.
        """
        import torch
        from transformers import AutoModel, AutoTokenizer

        if dtype not in DTYPES:
            raise SisConfigError(f"expected the encoder's dtype to be one of {DTYPES}, found {dtype!r}.")
        self.model, self.settings, self.batch_size = model, settings, batch_size
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
            self._network: Any = AutoModel.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
        except (OSError, ValueError) as error:
            raise RetrievalError(
                f"expected an encoder at {model!r}, but transformers cannot load it: {error}. Give a directory with "
                "config.json, weights and tokenizer: --encoder DIR"
            ) from error
        self._device = device

    @property
    def dimension(self) -> int:
        """Length of an embedding."""
        return int(self._network.config.hidden_size)

    def queries(self, texts: Sequence[str]) -> np.ndarray:
        """Embed queries; float32 ``[texts, dimension]``, rows of unit length."""
        return self._embed([self.settings.query_prefix + text for text in texts])

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """Embed passages; float32 ``[texts, dimension]``, rows of unit length."""
        return self._embed([self.settings.passage_prefix + text for text in texts])

    def probe(self) -> np.ndarray:
        """Embeddings of `PROBE` as query and as passage, float32 ``[2, dimension]``."""
        return np.concatenate([self.queries([PROBE]), self.passages([PROBE])])

    def _embed(self, texts: list[str]) -> np.ndarray:
        import torch

        found = np.empty((len(texts), self.dimension), dtype=np.float32)
        # Texts of like length share a batch: less padding.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
        with torch.inference_mode():
            for start in range(0, len(order), self.batch_size):
                chosen = order[start : start + self.batch_size]
                found[chosen] = self._forward([texts[index] for index in chosen])
        if not np.isfinite(found).all():
            faulty = int((~np.isfinite(found)).any(1).sum())
            raise RetrievalError(
                f"{self.model}: expected finite embeddings, found {faulty} of {len(texts)} that are not. Use --dtype "
                "float32 or bfloat16."
            )
        return found

    def _forward(self, texts: list[str]) -> np.ndarray:
        import torch

        inputs = self._tokenizer(
            texts, padding=True, truncation=True, max_length=self.settings.max_tokens, return_tensors="pt"
        ).to(self._device)
        hidden = self._network(**inputs).last_hidden_state.float()
        if self.settings.pooling == "cls":
            pooled = hidden[:, 0]
        else:
            weights = inputs["attention_mask"].unsqueeze(-1).float()
            pooled = (hidden * weights).sum(1) / weights.sum(1)
        return torch.nn.functional.normalize(pooled, dim=-1).cpu().numpy()


def same_weights(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two results of `Encoder.probe` come from the same weights, prefixes and pooling."""
    return found.shape == expected.shape and bool(((found * expected).sum(-1) >= MIN_PROBE_COSINE).all())
