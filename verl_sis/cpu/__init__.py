"""verl and vLLM on a machine without accelerators, for the quickstart, tests and teaching.

Nothing in this package acts unless the environment variable ``VERL_PLATFORM`` is ``cpu``. It teaches verl a platform
called "cpu" (`platform`), registers FSDP engines for it (`engine`), repairs the places in verl and vLLM that have no
extension point (`patches`, `vllm_plugin`; each with a ledger entry), and builds a tiny world to train in
(`tiny_world`).
"""
