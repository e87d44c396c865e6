"""The environment that a verl run on a CPU needs, in one place.

From a shell: ``eval "$(python -m verl_sis.cpu.environment)"``. From Python: `cpu_environment`.
"""

import shlex

SETTINGS = {
    # Chooses the platform of this package, in verl and in vLLM's processes.
    "VERL_PLATFORM": "cpu",
    # Everything comes from local directories.
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # GiB for vLLM's key-value cache; without it vLLM takes a share of the machine's memory.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Trainer and rollout engine share few cores; pinned threads would sit on the same ones.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # vLLM's offline engine, which studies use, runs in the process that asks. verl's server starts one all the same.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # No usage reports.
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A full stack trace when an override is wrong.
    "HYDRA_FULL_ERROR": "1",
}


def cpu_environment(inherited: dict[str, str]) -> dict[str, str]:
    """Complete an environment for a verl run on a CPU.

    Args:
        inherited: Usually ``os.environ``; its values win, so that a user can change any setting.

    Returns:
        A new dictionary.
    """
    return {**SETTINGS, **inherited, "VERL_PLATFORM": SETTINGS["VERL_PLATFORM"]}


def main() -> None:
    """Print ``export`` lines for a POSIX shell; a value that the shell already has is kept."""
    for name, value in SETTINGS.items():
        print(f'export {name}="${{{name}:-{shlex.quote(value)}}}"')


if __name__ == "__main__":
    main()
