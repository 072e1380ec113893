"""A real Slurm of one node, as processes of the test: munged, slurmctld and slurmd in a temporary directory."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.kit.daemon import wait_for

__all__ = ["Slurm", "slurm", "why_not"]

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "squeue")
NODE = "capdnode"
KILL_WAIT_S = 10
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def why_not() -> str:
    """Why no Slurm can run here; "" if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install slurmctld slurmd slurm-client munge"
    return "" if os.geteuid() == 0 else "slurmd starts jobs as their users, which needs root"


class Slurm:
    """The running processes, and the commands that talk to them."""

    def __init__(self, directory: Path, **settings: str) -> None:
        """Write the configuration, with further lines of slurm.conf. `start` starts everything."""
        self.directory = directory
        self.environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(directory / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []
        for name in ("state", "spool", "munge", "logs"):
            (directory / name).mkdir(mode=0o755)
        (directory / "slurm.conf").write_text(self._configuration(settings))

    def start(self) -> None:
        """Start the processes, and wait until the node takes jobs."""
        self._start_munge()
        self._start("slurmctld", "-D", "-c")
        self._start("slurmd", "-D", "-N", NODE)
        wait_for(lambda: self.node_state() == "idle", f"a node that takes jobs\n{self.logs()}")

    def _configuration(self, settings: dict[str, str]) -> str:
        at = self.directory
        values = {
            "ClusterName": "capdtest", "SlurmctldHost": f"{socket.gethostname()}(127.0.0.1)",
            "SlurmUser": "root", "SlurmdUser": "root", "AuthType": "auth/munge", "CredType": "cred/munge",
            "AuthInfo": f"socket={at}/munge/socket", "SlurmctldPort": _free_port(), "SlurmdPort": _free_port(),
            "StateSaveLocation": f"{at}/state", "SlurmdSpoolDir": f"{at}/spool",
            "SlurmctldPidFile": f"{at}/slurmctld.pid", "SlurmdPidFile": f"{at}/slurmd.pid",
            "SlurmctldLogFile": f"{at}/logs/slurmctld", "SlurmdLogFile": f"{at}/logs/slurmd",
            "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "MpiDefault": "none",
            "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_Core",
            "SchedulerType": "sched/backfill", "SchedulerParameters": "sched_interval=2",
            "AccountingStorageType": "accounting_storage/none",
            "JobAcctGatherType": "jobacct_gather/none", "ReturnToService": "2", "JobRequeue": "1",
            "KillWait": KILL_WAIT_S, "PropagateResourceLimits": "NONE",
            **settings,
        }  # fmt: skip
        lines = [f"{name}={value}" for name, value in values.items()]
        cpus = os.cpu_count() or 1
        lines.append(
            f"NodeName={NODE} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN"
        )
        lines.append(
            f"PartitionName=all Nodes={NODE} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES"
        )
        return "\n".join(lines) + "\n"

    def _start_munge(self) -> None:
        at = self.directory / "munge"
        key = at / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        options = [f"--{option}={at / name}" for option, name in files.items()]
        self._start("munged", "--foreground", "--force", *options)
        wait_for((at / "socket").is_socket, "munge's socket")

    def _start(self, program: str, *options: str) -> None:
        with (self.directory / "logs" / f"{program}.out").open("ab") as log:
            command = [shutil.which(program, path=_PATH) or program, *options]
            self._processes.append(
                subprocess.Popen(
                    command, env=self.environment, stdout=log, stderr=log, start_new_session=True
                )
            )

    def run(self, *command: str, check: bool = True, **environment: str) -> str:
        """Run a command of Slurm and return its output."""
        done = subprocess.run(
            command, env=self.environment | environment, cwd=self.directory, capture_output=True, text=True, timeout=120
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}\n{self.logs()}"
        return done.stdout

    def submit(self, script: Path | str, *options: str, **environment: str) -> str:
        """Submit a batch script and return the job's id. Its output is `output(job)`."""
        # A node that still completes the job before takes none, and Slurm looks again only after a while.
        wait_for(lambda: self.node_state() == "idle", f"a node that takes jobs\n{self.logs()}")
        out = str(self.directory / "logs" / "job-%j.out")
        words = script.split() if isinstance(script, str) else [str(script)]
        return self.run(
            "sbatch", "--parsable", f"--output={out}", "--open-mode=append", *options, *words, **environment
        ).strip()

    def output(self, job: str) -> str:
        """Return what a job has printed so far."""
        path = self.directory / "logs" / f"job-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def field(self, job: str, name: str) -> str:
        """Return one field of `scontrol show job`, such as JobState; "" if it has none."""
        shown = self.run("scontrol", "show", "job", job)
        return next((word.partition("=")[2] for word in shown.split() if word.startswith(f"{name}=")), "")

    def wait(self, job: str, condition: Callable[[], Any], what: str, timeout_s: float = 90.0) -> Any:
        """Wait until the condition is true, and return its value. A failure shows the job and its output."""
        try:
            return wait_for(condition, what, timeout_s)
        except AssertionError as error:
            shown = self.run("scontrol", "show", "job", job, check=False)
            raise AssertionError(f"{error}\n{shown}\n{self.output(job)}\n{self.logs()}") from None

    def wait_end(self, job: str, timeout_s: float = 90.0) -> str:
        """Wait until a job is over, and return its state."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        return str(
            self.wait(
                job, lambda: (state := self.field(job, "JobState")) in ended and state, "its end", timeout_s
            )
        )

    def node_state(self) -> str:
        """Return the state of the node; "" while nobody answers."""
        return self.run("sinfo", "--noheader", "--format=%T", check=False).strip()

    def logs(self) -> str:
        """Return the ends of all logs."""
        found = sorted((self.directory / "logs").iterdir())
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-2000:]}" for path in found)

    def stop(self) -> None:
        """End every process that was started, and what slurmd started."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        until = time.monotonic() + 20
        for process in reversed(self._processes):
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


@contextlib.contextmanager
def slurm(directory: Path, **settings: str) -> Iterator[Slurm]:
    """A Slurm for the block."""
    made = Slurm(directory, **settings)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
