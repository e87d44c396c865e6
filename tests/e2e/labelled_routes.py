"""External library of a test run: replaces the rollout engine's routes by labels, and checks where they arrive.

The label of a row is a function of its token and position. It is put on in verl's agent loop, and checked in the
training worker when a micro-batch is armed, against the tokens and positions that the model is about to be fed.
"""

import os
from itertools import permutations
from pathlib import Path

import numpy as np
import torch
import wrapt

EXPERTS = 8
CHOICES = np.array(list(permutations(range(EXPERTS), 2)))


def labels(tokens, positions, layers: int) -> np.ndarray:
    """Two distinct experts per layer, ``[n, layers, 2]``."""
    code = np.asarray(tokens)[:, None] * 31 + np.asarray(positions)[:, None] * 17 + np.arange(layers) * 5
    return CHOICES[code % len(CHOICES)]


@wrapt.when_imported("verl.experimental.agent_loop.agent_loop")
def label_in_the_agent_loop(module) -> None:
    """The engine's own number of rows is kept: it must be one less than there are tokens."""
    as_dict = module.AgentLoopOutput.as_dict

    def labelled(self):
        tokens = [*self.prompt_ids, *self.response_ids]
        rows, layers, _ = self.routed_experts.shape
        assert rows == len(tokens) - 1, (rows, len(tokens))
        self.routed_experts = labels(tokens[:rows], range(rows), layers).astype(np.uint8)
        return as_dict(self)

    module.AgentLoopOutput.as_dict = labelled


@wrapt.when_imported("verl_sis.routing_replay.passes")
def check_in_the_worker(module) -> None:
    """Append to a file: rows that were armed, and how many of them with another token's label."""
    before = module.RoutingPasses._before

    def checked(self, data, model_inputs):
        before(self, data, model_inputs)
        if not self.replay.active:
            return
        targets = self.replay.targets
        tokens, positions = (model_inputs[name].reshape(-1).cpu().numpy() for name in ("input_ids", "position_ids"))
        expected = torch.from_numpy(labels(tokens, positions, targets.ids.shape[1]))
        wrong = (targets.ids != expected).flatten(1).any(1) & targets.valid
        with Path(os.environ["LABELLED_ROUTES_LOG"]).open("a") as log:
            log.write(f"{int(targets.valid.sum())} {int(wrong.sum())}\n")

    module.RoutingPasses._before = checked
