"""External library of a test run: writes every trajectory of verl's agent loop to a file, as it is handed on.

One JSON object a line: token ids, response mask, the fields that tools add, and the reward.
"""

import json
import os
from pathlib import Path

import wrapt


@wrapt.when_imported("verl.experimental.agent_loop.agent_loop")
def record(module) -> None:
    as_dict = module.AgentLoopOutput.as_dict

    def recorded(self):
        row = {
            "prompt": self.prompt_ids,
            "response": self.response_ids,
            "mask": self.response_mask,
            "turns": self.num_turns,
            "reward": self.reward_score,
            "step": self.extra_fields.get("min_global_steps"),
            "tool": {name: value for name, value in self.extra_fields.items() if name.startswith("search_")},
            "scored": self.extra_fields.get("reward_extra_info"),
        }
        with Path(os.environ["RECORDED_TRAJECTORIES"]).open("a") as log:
            log.write(json.dumps(row) + "\n")
        return as_dict(self)

    module.AgentLoopOutput.as_dict = recorded
