"""The search tool of verl's tool agent loop (``rollout.multi_turn.tool_config_path``).

verl turns whatever a tool raises during a rollout into an observation, and drops the metrics that a tool returns. So a
dead server is found when the tool is built, before the first rollout: that error ends the run. Later failures become an
observation that starts with `verl_sis.rewards.search.RETRIEVAL_FAILED`, are logged as errors, and are counted in the
trajectory's ``extra_fields``, which verl hands to the reward function in ``extra_info``.
"""

import logging
from dataclasses import dataclass, fields
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_sis.errors import RetrievalError, SisConfigError
from verl_sis.rewards.search import INVALID_CALLS, RETRIEVAL_FAILED
from verl_sis.search.client import ClientSettings, RetrievalClient
from verl_sis.search.observation import PASSAGE_FORMAT, observation

logger = logging.getLogger("verl_sis")

COUNTS = CALLS, FAILURES, REFUSALS, CUTS = "search_calls", "search_failures", "search_refusals", "search_cuts"
"""Counts of a trajectory: calls answered or failed, those that failed, calls refused, observations cut."""

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search an encyclopedia; returns the passages that fit the query best.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What to look for."}},
            "required": ["query"],
        },
    },
}
"""What the model is told if the configuration has no ``tool_schema``."""


@dataclass(frozen=True)
class SearchToolSettings:
    """``config`` of the tool; beside these fields it takes those of `ClientSettings`."""

    top_k: int = 3
    """Passages in an observation."""

    max_calls: int = 2
    """Searches in one trajectory; further ones are refused, with an observation that says so."""

    max_tokens: int | None = None
    """Longest observation in tokens; longer ones lose their end. verl's own limit counts characters."""

    tokenizer: str | None = None
    """Directory or hub name of the policy's tokenizer, which counts them."""

    passage_format: str = PASSAGE_FORMAT
    """One passage of an observation."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("top_k", "max_calls"):
            if getattr(self, name) < 1:
                raise SisConfigError(
                    f"expected {name} of the search tool to be at least 1, found {getattr(self, name)}."
                )
        observation([{"title": "", "text": ""}], self.passage_format)
        if (self.max_tokens is None) != (self.tokenizer is None):
            raise SisConfigError(
                "the search tool needs max_tokens and tokenizer together, or neither: found "
                f"max_tokens={self.max_tokens}, tokenizer={self.tokenizer}."
            )


def split_settings(config: dict[str, Any]) -> tuple[SearchToolSettings, ClientSettings]:
    """Sort the entries of a tool's ``config`` into the two groups of settings.

    Args:
        config: As in the tool's YAML; ``type`` is verl's.

    Raises:
        SisConfigError: If an entry is unknown, ``url`` is missing, or a value is out of range.
    """
    entries = {name: value for name, value in config.items() if name != "type"}
    own = {entry.name for entry in fields(SearchToolSettings)}
    clients = {entry.name for entry in fields(ClientSettings)}
    unknown = sorted(set(entries) - own - clients)
    if unknown or "url" not in entries:
        raise SisConfigError(
            f"expected url and any of {sorted(own | clients)} in the search tool's config, found {sorted(entries)}"
            + (f", of which {unknown} are unknown." if unknown else ".")
        )
    return (
        SearchToolSettings(**{name: value for name, value in entries.items() if name in own}),
        ClientSettings(**{name: value for name, value in entries.items() if name in clients}),
    )


class SearchTool(BaseTool):
    """Asks the retrieval server; one object per agent loop worker, shared by its trajectories."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        """Read the configuration and check that the server is alive.

        Args:
            config: See `split_settings`.
            tool_schema: From the tool's YAML; `SCHEMA` if None.

        Raises:
            SisConfigError: If the configuration is wrong.
            RetrievalError: If the server cannot be reached.
        """
        self.settings, client = split_settings(config)
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        self._client = RetrievalClient(client)
        self._tokenizer = _load_tokenizer(self.settings.tokenizer)
        self._calls = self._failures = 0
        served = self._client.check_health()
        logger.info("search tool: %s serves %s", client.url, served)

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], agent_data: Any = None, **_: Any
    ) -> tuple[ToolResponse, float, dict[str, int]]:
        """Search once; never raises for a fault of the model or the server.

        Args:
            instance_id: Of this call; verl makes a new one each time.
            parameters: ``{"query": text}``, as the model wrote it.
            agent_data: verl's state of the trajectory; the counts are kept in its ``extra_fields``.

        Returns:
            The observation, no reward, and what this call added to the counts, beside `CALLS`.
        """
        counts = agent_data.extra_fields if agent_data is not None else {}
        for name in COUNTS:
            counts.setdefault(name, 0)
        query = parameters.get("query") if isinstance(parameters, dict) else None
        if not isinstance(query, str) or not query.strip():
            text = f"{INVALID_CALLS[1]} for '{self.name}': expected {{\"query\": text}}"
            return _result(text, counts, {REFUSALS: 1})
        if counts[CALLS] >= self.settings.max_calls:
            text = f"Search refused: at most {self.settings.max_calls} searches are allowed. Answer now."
            return _result(text, counts, {REFUSALS: 1})
        # Counted before the wait: calls of one turn run side by side.
        counts[CALLS] += 1
        self._calls += 1
        try:
            documents = await self._client.retrieve(query, self.settings.top_k)
        except RetrievalError as error:
            self._report(error)
            return _result(f"{RETRIEVAL_FAILED} {error}", counts, {FAILURES: 1})
        text, cut = self._cut(observation(documents, self.settings.passage_format))
        return _result(text, counts, {CUTS: int(cut)})

    def _cut(self, text: str) -> tuple[str, bool]:
        """Keep the longest start of a text that has at most ``max_tokens`` tokens; and whether it was cut."""
        limit, cut = self.settings.max_tokens, False
        if limit is None:
            return text, cut
        while len(offsets := self._offsets(text)) > limit:
            # Cut within a word, the rest may be split into more tokens than before; each round is shorter.
            text, cut = text[: min(offsets[limit - 1][1], len(text) - 1)], True
        return text, cut

    def _offsets(self, text: str) -> list[tuple[int, int]]:
        return self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]

    def _report(self, error: RetrievalError) -> None:
        """Log failures 1, 2, 4, 8, ... of this worker: seen at once, and no flood."""
        self._failures += 1
        if self._failures & (self._failures - 1) == 0:
            logger.error("search tool: %d of %d calls failed so far; now: %s", self._failures, self._calls, error)


def _result(text: str, counts: dict[str, Any], added: dict[str, int]) -> tuple[ToolResponse, float, dict[str, int]]:
    """Add to the trajectory's counts, and return what verl expects of a tool."""
    for name, value in added.items():
        counts[name] += value
    return ToolResponse(text=text), 0.0, added


def _load_tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name)
    if not tokenizer.is_fast:
        raise SisConfigError(
            f"expected a fast tokenizer for the search tool's max_tokens, found a slow one at {name!r}."
        )
    return tokenizer
