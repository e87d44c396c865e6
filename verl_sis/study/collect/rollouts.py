"""First stage: responses of the rollout engine, with its top-K at every token and its routes, one file per shard."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from verl_sis.errors import SisStateError, StudyFileError
from verl_sis.records.write import write_table
from verl_sis.study.collect.settings import CollectSettings, ModelFacts

_FORMAT = {b"verl_sis": b'{"format": "verl_sis.rollouts", "version": 1}'}


@dataclass(frozen=True)
class Response:
    """One response of the engine.

    Attributes:
        prompt: Number of its prompt in the study.
        sample: Number among the responses to that prompt.
        prompt_ids: Token ids of the prompt, P of them.
        ids: int32 ``[R]``, tokens of the response.
        log_prob: float32 ``[R]``, of the tokens, after temperature.
        top_ids: int32 ``[R, K]``, the engine's top-K by decreasing probability.
        top_log_prob: float32 ``[R, K]``; -inf where the sampler has filtered an entry.
        routes: int16 ``[P + R - 1, layers, experts per token]``, or None of a dense model.
    """

    prompt: int
    sample: int
    prompt_ids: np.ndarray
    ids: np.ndarray
    log_prob: np.ndarray
    top_ids: np.ndarray
    top_log_prob: np.ndarray
    routes: np.ndarray | None


class RolloutEngine:
    """vLLM with one model, sampling without filters."""

    def __init__(self, settings: CollectSettings, facts: ModelFacts, tensor_parallel: int) -> None:
        """Load the model.

        Args:
            settings: Of the study.
            facts: Of the model.
            tensor_parallel: GPUs that share it.
        """
        # verl's plugin makes vLLM's CPU build known by its name.
        import verl  # noqa: F401
        from vllm import LLM, SamplingParams

        routes = {"enable_return_routed_experts": True} if facts.sparse else {}
        arguments: dict[str, Any] = {
            "max_num_seqs": 64,
            **settings.engine,
            **routes,
            "dtype": settings.dtype,
            "seed": settings.seed,
            "tensor_parallel_size": tensor_parallel,
            "max_model_len": settings.longest,
            # Log-probs of the distribution that tokens are drawn from, temperature included.
            "logprobs_mode": "processed_logprobs",
            "max_logprobs": settings.top_k,
            # Without it a model's own generation_config.json would set top-p and top-k.
            "generation_config": "vllm",
        }
        self._llm = LLM(settings.model, **arguments)
        self._settings = settings
        self._sampling = {
            "temperature": settings.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_tokens": settings.max_tokens,
            "logprobs": settings.top_k,
        }
        self._sampling_class = SamplingParams

    def respond(self, prompts: list[tuple[int, list[int]]]) -> list[Response]:
        """Sample the responses to some prompts.

        Args:
            prompts: Number in the study, and token ids.

        Returns:
            ``settings.samples`` responses of each, in order.
        """
        numbered = [(number, ids, s) for number, ids in prompts for s in range(self._settings.samples)]
        # Own seeds: a resumed study draws what an uninterrupted one would have drawn, up to batching.
        sampling = [
            self._sampling_class(**self._sampling, seed=_seed(self._settings.seed, number, s))
            for number, _, s in numbered
        ]
        inputs: Any = [{"prompt_token_ids": ids} for _, ids, _ in numbered]
        outputs = self._llm.generate(inputs, sampling, use_tqdm=False)
        return [
            _response(number, sample, ids, output.outputs[0], self._settings.top_k)
            for (number, ids, sample), output in zip(numbered, outputs, strict=True)
        ]


def _seed(seed: int, prompt: int, sample: int) -> int:
    return int(np.random.SeedSequence([seed, prompt, sample]).generate_state(1)[0])


def _response(prompt: int, sample: int, prompt_ids: list[int], completion: Any, top_k: int) -> Response:
    ids = np.asarray(completion.token_ids, dtype=np.int32)
    top_ids = np.empty((len(ids), top_k), dtype=np.int32)
    top_log_prob = np.empty((len(ids), top_k), dtype=np.float32)
    log_prob = np.empty(len(ids), dtype=np.float32)
    for position, (token, entries) in enumerate(zip(ids.tolist(), completion.logprobs, strict=True)):
        log_prob[position] = entries[token].logprob
        # The engine adds the sampled token to its top-K where it is not among them: then there is one entry more.
        top = [(entry.logprob, id_) for id_, entry in entries.items() if len(entries) <= top_k or id_ != token]
        if len(top) != top_k:
            raise SisStateError(f"expected {top_k} top log-probs of the rollout engine, found {len(top)}")
        top.sort(key=lambda pair: -pair[0])
        top_log_prob[position], top_ids[position] = zip(*top, strict=True)
    routes = None if completion.routed_experts is None else np.asarray(completion.routed_experts, dtype=np.int16)
    return Response(prompt, sample, np.asarray(prompt_ids, np.int32), ids, log_prob, top_ids, top_log_prob, routes)


_LISTS = {
    "prompt_ids": pyarrow.int32(),
    "ids": pyarrow.int32(),
    "log_prob": pyarrow.float32(),
    "top_ids": pyarrow.int32(),
    "top_log_prob": pyarrow.float32(),
    "routes": pyarrow.int16(),
}


def write_responses(path: Path, responses: list[Response]) -> None:
    """Write the responses of a shard; the file appears complete or not at all.

    Args:
        path: Target.
        responses: At least one.
    """
    columns: dict[str, Any] = {
        "prompt": pyarrow.array([r.prompt for r in responses], pyarrow.int32()),
        "sample": pyarrow.array([r.sample for r in responses], pyarrow.int32()),
    }
    for name, kind in _LISTS.items():
        values = [getattr(r, name) for r in responses]
        flat = [None if value is None else value.reshape(-1) for value in values]
        columns[name] = pyarrow.array(flat, pyarrow.large_list(kind))
    shapes = [None if r.routes is None else list(r.routes.shape[1:]) for r in responses]
    columns["route_shape"] = pyarrow.array(shapes, pyarrow.list_(pyarrow.int32()))
    write_table(path, pyarrow.table(columns).replace_schema_metadata(_FORMAT))


def read_responses(path: Path) -> list[Response]:
    """Read the responses of a shard.

    Args:
        path: As written by ``write_responses``.

    Raises:
        StudyFileError: If the file is not complete.
    """
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise StudyFileError(f"{path} is not a complete file of rollouts: {error}. Delete it and resume") from error
    return [_response_of(table, row) for row in range(table.num_rows)]


def _response_of(table: pyarrow.Table, row: int) -> Response:
    flat: dict[str, Any] = {}
    for name in _LISTS:
        values: Any = table[name][row].values
        flat[name] = None if values is None else values.to_numpy()
    routes, count = flat["routes"], len(flat["ids"])
    return Response(
        prompt=table["prompt"][row].as_py(),
        sample=table["sample"][row].as_py(),
        prompt_ids=flat["prompt_ids"],
        ids=flat["ids"],
        log_prob=flat["log_prob"],
        top_ids=flat["top_ids"].reshape(count, -1),
        top_log_prob=flat["top_log_prob"].reshape(count, -1),
        routes=None if routes is None else routes.reshape(-1, *table["route_shape"][row].as_py()),
    )
