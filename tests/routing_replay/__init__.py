"""Tests of routing replay outside of verl's worker; those in it stand in ``tests/worker``, whole runs in ``tests/e2e``.

Public bugs of other implementations, and the test that keeps each out:

* verl #7340, Miles #2570 (routers that belong to no forwarded model): ``test_controller.py``, ``TestCoverage`` and
  ``test_a_router_that_runs_twice_or_never_is_refused``.
* verl #5037, slime #810 (layers shifted by dense ones): ``test_routers_are_keyed_by_absolute_layer``, and the dense
  first layer of ``tests/worker/test_routing_replay.py``.
* slime #822, verl #4986 (one expert repeated in padding rows): padding routes natively; ``test_an_expert_twice``.
* SkyRL #1908 (state left by forward-only or failed passes): ``test_a_stale_target_is_caught_in_the_recomputation``,
  ``test_an_exception_in_the_middle_of_an_update_leaves_no_state``.
* verl #6029, #6046, #7158 (interrupted and resumed rollouts): ``test_agent_loop.py``.
* verl #6027, #6089 (truncation of tokens but not of routes): ``test_agent_loop.py``, ``test_truncated``.
* prime-rl #1807 (the row between two turns): ``test_agent_loop.py``; two real turns in ``tests/e2e/test_mismatch.py``.
* prime-rl #3051, verl #7407 (ids above a byte): ``test_agent_loop.py``, and 300 experts in ``tests/worker``.
* vLLM #48622 (heads for more tokens): ``test_heads_for_more_tokens_and_layers_beyond_the_decoder_are_left_out``.
* NeMo-RL #1203, Automodel #3247 (choices that flip in a recomputation, or are counted twice):
  ``test_gradients_with_and_without_checkpointing``.
* verl #4252, TRL #4159 (mismatch of two temperatures): refused, ``tests/contract/test_routing_presets.py``.
* verl #4973 (R2 with the rollout engine's routes), #7786 (off must mean untouched): the same, ``test_unchosen.py``.
* NeMo-RL #3837 (rows without routes go unnoticed): ``test_missing_before_a_token_with_loss``.
"""
