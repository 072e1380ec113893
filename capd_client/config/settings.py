"""The client's settings: environment > capd.toml > default, resolved once per process, with origins.

An unusable value never stops the job. The logger reports it once, and the default applies. With CAPD_STRICT=1 (tests,
tools) it raises ConfigError instead. Importing this module reads nothing.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Optional

from capd_client.config import values
from capd_client.config.file import FileSettings, read_settings_file
from capd_client.errors import ConfigError
from capd_client.protocol.key import MAX_INDEX
from capd_client.rules.schema import RuleSettings

__all__ = [
    "CP_ORDERS", "MODES", "POLICIES", "RINGS", "SNAPSHOTS", "VARIABLES", "ClientConfig", "check_file_value",
    "check_setting", "load_config", "parse_endpoint",
]  # fmt: skip

logger = logging.getLogger("capd_client")

POLICIES = ("drop", "block", "thin", "stats")
MODES = ("tensor", "stats")
SNAPSHOTS = ("always", "auto")
RINGS = ("wait", "drop")
GPU_CALLS = ("raw", "torch")
CP_ORDERS = ("zigzag", "contiguous")
MAX_PIECE_NBYTES = 1 << 30
MIN_PIECE_NBYTES = 1 << 20
DEFAULT_MAX_BLOCK_MS = 30_000.0
# The directory that tensor_saver wrote to.
EMBEDDED_STORE = "./enhanced_tensor_logs"
# sun_path holds 108 bytes, and the last one is NUL.
MAX_SOCKET_PATH = 107


class _Setting(NamedTuple):
    """The sources of a field: environment variables in order of precedence, the key in the file, the converter."""

    variables: tuple[str, ...]
    # The dotted path in capd.toml, "" without one. A field that the file has under its own name leaves it out.
    key: str
    convert: Callable[[Any], Any]


def _setting(default: Any, convert: Callable[[Any], Any], *variables: str, key: str = "") -> Any:
    return field(default=default, metadata={"setting": _Setting(variables, key, convert)})


@dataclass(frozen=True)
class ClientConfig:
    """The resolved settings of the client. `origins` names the source of each value.

    Attributes:
        endpoint: The absolute path of the daemon's socket; None if capture is off.
        embedded: The directory of runs of a daemon that the job starts for itself
            (`capd_client.session.embedded_daemon`); None if it starts none.
        run_id: The run to join; None lets the daemon assign one.
        policy: One of POLICIES.
        mode: "tensor" keeps tensors, "stats" only statistics, "sample:1/N" the tensors of every Nth call.
        watch: "off" leaves a job that never calls `watch` alone, even if capd would find its models.
        steps, micro_batches, ranks: What `watch` captures, as `capd_client.protocol.selection.Ranges`.
        rules: The modules and tensors to capture, how and when, if that differs from the default. An empty tuple
            captures everything.
        slice: The rows that `watch` keeps of activations and their gradients (`capd_client.rules.slices`); None is all.
        quant_type: The label of every capture that has none of its own; None is the tensor's real dtype.
        exit_timeout_s: The longest wait for the daemon when the job ends, in seconds.
        log: The level of the log.
        arena_bytes: The size of the rank's arena; None chooses it by the free memory.
        max_mb_per_step: The limit of all captures of one iteration, in 10⁶ bytes; None has no limit.
        max_d2h_gbps: The limit of captures on the link from the GPUs, in 10⁹ bytes per second; None has no limit.
        ring_bytes: The size of the ring on each device; None chooses it by the free memory
            (`capd_client.device.ring`).
        piece_bytes: The size of one copy from a device to the host; None lets capd choose.
        snapshot: "always" copies each tensor on its device; "auto" holds a tensor that autograd keeps anyway.
        ring: "wait" makes the job's stream wait on the device for room in the ring, "drop" does not; None: see
            `ring_waits`.
        gpu_calls: "raw" calls CUDA's runtime directly if that has proved itself (`capd_client.device.cuda.raw_calls`);
            "torch" never does.
        cp_order: How the job deals out sequences over context parallel ranks; one of CP_ORDERS.
        max_block_ms: The longest wait of one capture under policy `block`.
        strict: Whether an unusable value raises ConfigError.
        ping_s: Seconds between two PINGs.
        iteration, sample_idx: The start of the counting.
        replace_tensor_saver: Whether `capd run` replaces the job's tensor_saver by `capd_client.tensor_saver`.
        emulate: The recipe, as text, of the models that are found or watched (`capd_client.emulate`); None is none.
        perturb: "EPS" or "EPS:SEED": the first numbers of watched models are multiplied by 1 ± EPS
            (`capd_client.watching.perturbation`); None changes nothing.
        collect: "N/M" under `capd run --mode single|batch|quick`. Of the moments that `steps` and rules select, it
            keeps the first N micro-batches, at most M of an iteration (`capd_client.protocol.quota`).
        collect_dir: The directory in which processes report their progress.
        plan: Under `capd plan`, the directory for the plan of this process. Nothing is captured then, whatever
            `endpoint` is.
        plan_steps: The number of planned iterations.
    """

    endpoint: Optional[str] = None
    embedded: Optional[str] = None
    run_id: Optional[str] = _setting(None, values.text("a run id", 128), "CAPD_RUN_ID")
    policy: str = _setting("drop", values.one_of(POLICIES), "CAPD_POLICY")
    mode: str = _setting("tensor", values.mode(MODES), "CAPD_MODE")
    watch: str = _setting("auto", values.watch, "CAPD_WATCH")
    steps: str = _setting("0", values.ranges, "CAPD_STEPS", key="when.steps")
    micro_batches: str = _setting("all", values.ranges, key="when.micro_batches")
    ranks: str = _setting("all", values.ranges, key="when.ranks")
    rules: tuple[RuleSettings, ...] = _setting((), values.rules, "CAPD_SELECT", key="rule")
    slice: Optional[str] = _setting(None, values.slice_text, "CAPD_SLICE")
    quant_type: Optional[str] = _setting(
        None, values.text("a quant_type", 256), "CAPD_QUANT_TYPE", "CUSTOM_QUANT_TYPE"
    )
    exit_timeout_s: float = _setting(30.0, values.number(0, 86_400), "CAPD_EXIT_TIMEOUT_S")
    log: Optional[str] = _setting(None, values.log_level, "CAPD_LOG")
    arena_bytes: Optional[int] = _setting(None, values.size(1 << 16, 1 << 44), "CAPD_ARENA_BYTES")
    max_mb_per_step: Optional[float] = _setting(
        None, values.size_in("MB", 0.001, 1e9), "CAPD_MAX_MB_PER_STEP"
    )
    max_d2h_gbps: Optional[float] = _setting(None, values.size_in("GB", 0.001, 1e6), "CAPD_MAX_D2H_GBPS")
    ring_bytes: Optional[int] = _setting(None, values.size(1 << 16, 1 << 44), "CAPD_RING_BYTES")
    piece_bytes: Optional[int] = _setting(
        None, values.size(MIN_PIECE_NBYTES, MAX_PIECE_NBYTES), "CAPD_PIECE_BYTES"
    )
    snapshot: str = _setting("always", values.one_of(SNAPSHOTS), "CAPD_SNAPSHOT")
    ring: Optional[str] = _setting(None, values.one_of(RINGS), "CAPD_RING")
    gpu_calls: str = _setting("raw", values.one_of(GPU_CALLS), "CAPD_GPU_CALLS")
    cp_order: str = _setting("zigzag", values.one_of(CP_ORDERS), "CAPD_CP_ORDER")
    max_block_ms: float = _setting(DEFAULT_MAX_BLOCK_MS, values.number(0, 86_400_000), "CAPD_MAX_BLOCK_MS")
    strict: bool = False
    ping_s: float = _setting(5.0, values.number(0.01, 3600), "CAPD_PING_S")
    iteration: int = _setting(0, values.integer(0, MAX_INDEX), "CAPD_ITERATION", "TENSOR_SAVER_ITERATION")
    sample_idx: Optional[int] = _setting(None, values.integer(0, MAX_INDEX), "CURRENT_SAMPLE_IDX")
    replace_tensor_saver: bool = _setting(False, values.flag, "CAPD_REPLACE_TENSOR_SAVER")
    emulate: Optional[str] = _setting(None, values.emulation, "CAPD_EMULATE")
    perturb: Optional[str] = _setting(None, values.perturbation, "CAPD_PERTURB")
    collect: Optional[str] = _setting(None, values.quota, "CAPD_COLLECT")
    collect_dir: Optional[str] = _setting(None, str, "CAPD_COLLECT_DIR")
    plan: Optional[str] = _setting(None, str, "CAPD_PLAN")
    plan_steps: int = _setting(3, values.integer(1, 1000), "CAPD_PLAN_STEPS")
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def enabled(self) -> bool:
        """Whether captures are stored or planned."""
        return self.endpoint is not None or self.embedded is not None or self.plan is not None

    @property
    def max_block_s(self) -> float:
        """The longest wait of one capture, in seconds; 0 unless the policy is `block`."""
        return self.max_block_ms / 1e3 if self.policy == "block" else 0.0

    @property
    def max_step_nbytes(self) -> Optional[int]:
        """Bytes that the captures of one iteration may take together; None for no limit."""
        return None if self.max_mb_per_step is None else int(self.max_mb_per_step * 1e6)

    @property
    def ring_waits(self) -> bool:
        """Whether the job's stream waits on the device for room in the ring; by default only under policy `block`."""
        return self.policy == "block" if self.ring is None else self.ring == "wait"

    @property
    def store(self) -> str:
        """The store of a capture whose rule names none (one of `capd_client.rules.schema.STORES`)."""
        return "stats" if self.mode == "stats" else "full"

    @property
    def sample_every(self) -> int:
        """One call in this many is kept: N of mode `sample:1/N`, else 1."""
        return values.sample_every(self.mode)


def parse_endpoint(text: str) -> str:
    """Return the socket path in `unix:PATH`. Raises ConfigError for text that is no usable endpoint."""
    scheme, colon, path = text.partition(":")
    if scheme != "unix" or not colon or not path:
        raise ConfigError(f"cannot read endpoint {text!r}; write unix:/path/capd.sock, or off")
    nbytes = len(os.fsencode(path))
    if nbytes > MAX_SOCKET_PATH:
        raise ConfigError(
            f"endpoint path is {nbytes} bytes long, a unix socket path holds {MAX_SOCKET_PATH}: {path!r}; "
            "choose a shorter one, for example below /tmp or $XDG_RUNTIME_DIR"
        )
    return os.path.abspath(path)


_SETTINGS: dict[str, _Setting] = {
    one.name: setting._replace(key=one.name) if one.name in FileSettings.__struct_fields__ else setting
    for one in fields(ClientConfig)
    if (setting := one.metadata.get("setting")) is not None
}
VARIABLES = frozenset(
    {
        "CAPD_ATTEMPT", "CAPD_CONFIG", "CAPD_ENDPOINT", "CAPD_STRICT", "TENSOR_SAVE_DIR", "TENSOR_SAVE_ENABLED",
    }.union(*(s.variables for s in _SETTINGS.values()))
)  # fmt: skip
"""Every environment variable, of capd or of tensor_saver, that sets something in the training job."""


def check_setting(name: str, value: Any) -> None:
    """Raise ConfigError, saying what is accepted, if `value` cannot be the setting `name`."""
    _SETTINGS[name].convert(value)


def check_file_value(key: str, value: Any) -> None:
    """Raise ConfigError if `value` cannot be the setting under `key`, such as "when.steps", in capd.toml."""
    next(setting for setting in _SETTINGS.values() if setting.key == key).convert(value)


def load_config(environ: Optional[Mapping[str, str]] = None) -> ClientConfig:
    """Resolve the settings of this process.

    Args:
        environ: The environment, which may name a file; None is os.environ.

    Raises:
        ConfigError: A value is unusable, under CAPD_STRICT=1. Otherwise each such value is logged once, and the next
            source or the default applies.
    """
    environ = os.environ if environ is None else environ
    resolver = _Resolver(environ)
    resolver.resolve_file()
    for name, setting in _SETTINGS.items():
        resolver.resolve(name, setting)
    resolver.resolve_endpoint()
    resolver.resolve_slurm()
    return resolver.config()


class _Resolver:
    """One resolution: collects values and origins, and reports unusable values."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}
        self._file: Mapping[str, Any] = {}
        self._path: Optional[str] = None
        strict = environ.get("CAPD_STRICT", "").strip().lower() in values.TRUE
        self._strict = strict
        if strict:
            self._take("strict", True, "env CAPD_STRICT")

    def resolve_file(self) -> None:
        """Read $CAPD_CONFIG, else ./capd.toml if there is one."""
        path = self._environ.get("CAPD_CONFIG", "")
        explicit = bool(path)
        try:
            self._file, self._path = read_settings_file(path or "capd.toml", must_exist=explicit)
        except ConfigError as error:
            self._report(str(error))

    def resolve(self, name: str, setting: _Setting) -> None:
        """Take the first usable value: the variables in order, then the file."""
        candidates = [(self._environ[v], f"env {v}") for v in setting.variables if self._environ.get(v)]
        if setting.key in self._file:
            candidates.append((self._file[setting.key], f"file {self._path}"))
        for value, origin in candidates:
            if self._try(name, setting, value, origin):
                return

    def _try(self, name: str, setting: _Setting, value: Any, origin: str) -> bool:
        try:
            self._take(name, setting.convert(value), origin)
        except ConfigError as error:
            self._report(f"{name} ({origin}): {error}", "; using the next source or the default")
            return False
        return True

    def resolve_endpoint(self) -> None:
        """CAPD_ENDPOINT=off > TENSOR_SAVE_ENABLED=false > CAPD_ENDPOINT > TENSOR_SAVE_ENABLED=true > off."""
        text = self._environ.get("CAPD_ENDPOINT", "").strip()
        switch = self._environ.get("TENSOR_SAVE_ENABLED", "").strip().lower()
        if switch and switch not in values.TRUE | values.FALSE:
            self._report(f"TENSOR_SAVE_ENABLED={switch!r:.80} is neither true nor false", "; it is ignored")
        if text.lower() == "off":
            self._take("endpoint", None, "env CAPD_ENDPOINT")
        elif switch in values.FALSE:
            self._take("endpoint", None, "env TENSOR_SAVE_ENABLED")
        elif text:
            try:
                self._take("endpoint", parse_endpoint(text), "env CAPD_ENDPOINT")
            except ConfigError as error:
                self._report(f"CAPD_ENDPOINT: {error}", "; capture is off")
        elif switch in values.TRUE:
            self._take("embedded", self._embedded_store(), "env TENSOR_SAVE_ENABLED")

    def _embedded_store(self) -> str:
        own = self._environ.get("CAPD_STORE", "")
        return os.path.abspath(
            own or values.store_root(self._environ.get("TENSOR_SAVE_DIR") or EMBEDDED_STORE)
        )

    def resolve_slurm(self) -> None:
        """Derive a run id under Slurm, the same for every rank of a job step."""
        job = self._environ.get("SLURM_JOB_ID", "")
        if "run_id" in self._values or not job:
            return
        step = self._environ.get("SLURM_STEP_ID", "0")
        self._take("run_id", f"slurm-{job}.{step}", "env SLURM_JOB_ID")

    def config(self) -> ClientConfig:
        """Return the resolved settings; fields without an origin keep their defaults."""
        for entry in fields(ClientConfig):
            self._origins.setdefault(entry.name, "default")
        del self._origins["origins"]
        return ClientConfig(**self._values, origins=self._origins)

    def _take(self, name: str, value: Any, origin: str) -> None:
        self._values[name] = value
        self._origins[name] = origin

    def _report(self, problem: str, consequence: str = "") -> None:
        if self._strict:
            raise ConfigError(problem)
        logger.warning("capd: %s%s", problem, consequence)
